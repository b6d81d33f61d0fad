"""Transformers attention: the function by which transformers' models compute attention here, and what runs it.

transformers' models find an attention function by name in `AttentionInterface`. Ours hands each call to whatever runs
in the thread: what follows a model (`transformers_follow`), a `Step` of a decoder, or one of an encoder
(`transformers_encoder`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from argosy_engine.attention.backend import AttentionBackend, AttentionWeights
from argosy_engine.attention.cpu_attn import CpuAttention
from argosy_engine.attention.layer import Attention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import AttentionParams
from argosy_engine.models.transformers_states import StepStates

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


class Rotation(NamedTuple):
    """How a step's tokens are rotated."""

    cosines: torch.Tensor
    """float32 [T, head_dim / 2], of each token, not of each position."""
    sines: torch.Tensor
    meta: AttentionMetadata
    """The step's, whose `positions` index these tables."""


class RotatingAttention:
    """A layer's attention by our CPU kernels, which norm and rotate q and k as well, over the cache of that layer."""

    def __init__(self, attention: Attention, impl: CpuAttention) -> None:
        self._attention = attention
        self.impl = impl

    @property
    def kv_cache(self) -> torch.Tensor:
        return self._attention.kv_cache

    @property
    def group(self) -> int:
        return self._attention.group

    def rotate_by(self, rotation: Rotation) -> None:
        """Let calls until the next one rotate by these tables, which the caller keeps alive."""
        self.impl.rotate_by(rotation.cosines, rotation.sines)

    def __call__(self, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """See `Attention`."""
        self.rotate_by(rotation)
        return self.impl(qkv, self.kv_cache, rotation.meta.of_group(self.group))


class AttendingLayer:
    """One call of the attention function in every forward pass, with a layer of the KV cache."""

    def __init__(
        self,
        module: nn.Module,
        params: AttentionParams,
        backend: AttentionBackend,
        weights: AttentionWeights,
        value_dim: int,
    ) -> None:
        self.module = module
        self.attention = Attention(params, backend, weights)
        self.backend = backend
        self._weights = weights
        self._head_dim = params.head_dim
        self._value_dim = value_dim

    def __call__(
        self, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], meta: AttentionMetadata
    ) -> torch.Tensor:
        """Attend from q [1, num_heads, T, head_dim]; the result is [1, T, num_heads, value_dim]."""
        parts = [part.squeeze(0).transpose(0, 1) for part in heads]
        head_dim, num_tokens = self._head_dim, parts[0].shape[0]
        if not all(part.shape[-1] == head_dim for part in parts):
            parts = [F.pad(part, (0, head_dim - part.shape[-1])) for part in parts]
        attended = self.attention(torch.cat(parts, dim=1).view(num_tokens, -1), meta)
        assert isinstance(attended, torch.Tensor)
        attended = attended.view(1, num_tokens, -1, head_dim)
        return attended if self._value_dim == head_dim else attended[..., : self._value_dim]

    def rotating(
        self, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float
    ) -> RotatingAttention | None:
        """Return the same attention from q and k that have not been normed and rotated; None: no kernel computes it.

        Args:
            q_norm, k_norm, eps: see `AttentionWeights`.
        """
        if not isinstance(self.attention.impl, CpuAttention) or self._value_dim != self._head_dim:
            return None
        weights = self._weights._replace(q_norm=q_norm, k_norm=k_norm, eps=eps)
        impl = self.backend.attention(self.attention.params, weights)
        assert isinstance(impl, CpuAttention)
        return RotatingAttention(self.attention, impl) if impl.norms_in_kernel else None


class Step:
    """Computes attention of one forward pass over the KV cache, layer by layer.

    Args:
        states: of the requests, if the model keeps any.
    """

    def __init__(
        self, layers: Sequence[AttendingLayer], meta: AttentionMetadata, states: StepStates | None
    ) -> None:
        self._layers = iter(layers)
        self._meta = meta
        self.states = states
        self.is_attending = False
        """Whether our own code runs, rather than the model's."""
        self._rotations: dict[tuple[int, int], tuple[Any, Rotation | None]] = {}
        """By the identity of cos and sin, which are kept alive beside it, and the size of heads."""

    def _next_layer(self, module: nn.Module) -> AttendingLayer:
        layer = next(self._layers, None)
        assert layer is not None, "a model attends as often as when it was followed"
        assert layer.module is module, "a model attends in the order in which it was followed"
        return layer

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = self._next_layer(call.module)
        self.is_attending = True
        attended = layer(call.heads, self._meta)
        self.is_attending = False
        return attended

    def rotates(self, hidden_states: torch.Tensor, embeddings: Any, head_dim: int) -> bool:
        """Whether our kernels can rotate by what a model gives to its `apply_rotary_pos_emb`: it is the same for both
        halves of all heads, and in the dtype of the hidden states.

        Args:
            hidden_states: of all tokens, [1, T, hidden_size].
            embeddings: cos and sin, each [1, T, head_dim].
        """
        if not isinstance(embeddings, tuple) or len(embeddings) != 2:
            return False
        if hidden_states.shape[:-1] != (1, len(self._meta.positions)):
            return False
        key = id(embeddings), head_dim
        if key not in self._rotations:
            self.is_attending = True
            self._rotations[key] = embeddings, self._rotation(embeddings, hidden_states.dtype, head_dim)
            self.is_attending = False
        return self._rotations[key][1] is not None

    def begin_layers(self, modules: Sequence[nn.Module], embeddings: Any, head_dim: int) -> Rotation:
        """Return how q and k of modules are rotated that attend next without the attention function; it `rotates`."""
        for module in modules:
            self._next_layer(module)
        rotation = self._rotations[id(embeddings), head_dim][1]
        assert rotation is not None
        return rotation

    def _rotation(self, embeddings: tuple[Any, Any], dtype: torch.dtype, head_dim: int) -> Rotation | None:
        tables = []
        for each in embeddings:
            if each.dtype is not dtype or each.shape != (1, len(self._meta.positions), head_dim):
                return None
            first, second = each[0].split(head_dim // 2, dim=1)
            if not torch.equal(first, second):
                return None
            tables.append(first.float().contiguous())
        rows = torch.arange(len(tables[0]))
        groups = tuple(replace(each, positions=rows, shared={}) for each in self._meta.groups)
        meta = replace(self._meta, positions=rows, groups=groups, shared={})
        return Rotation(tables[0], tables[1], meta)
