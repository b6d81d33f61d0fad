"""Transformers attention: the function by which transformers' models compute attention here, and what runs it.

transformers' models find an attention function by name in `AttentionInterface`. Ours hands each call to whatever runs
in the thread: what follows a model (`transformers_follow`), or a step (`transformers_model`, `transformers_encoder`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

STEP, FOLLOWED = "argosy", "argosy_followed"
"""Names of our attention function: in steps, where transformers makes no masks for it, and while a model is
followed."""
_running = threading.local()


class AttentionCall(NamedTuple):
    """What a model asks of the attention function."""

    module: nn.Module
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """q [1, num_heads, T, head_dim], k and v."""
    mask: Any
    scaling: float | None
    others: Mapping[str, Any]


class Attends(Protocol):
    """Computes attention of the calls in a thread."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return [1, T, num_heads, head_dim]."""
        ...


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    attends: Attends = _running.attends
    return attends.attend(AttentionCall(module, (query, key, value), attention_mask, scaling, others)), None


AttentionInterface.register(STEP, _attention)
AttentionInterface.register(FOLLOWED, _attention)


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    """Let `attends` compute the attention of the models that this thread runs."""
    before = running()
    _running.attends = attends
    try:
        yield
    finally:
        _running.attends = before


def running() -> Attends | None:
    """Return what computes attention in this thread."""
    found: Attends | None = getattr(_running, "attends", None)
    return found


def set_attention(model: nn.Module, name: str) -> None:
    """Let every module compute attention by this function, whether its config is the model's or a copy."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            config._attn_implementation = name
