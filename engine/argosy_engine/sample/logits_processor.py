"""LogitsProcessor: the interface for per-request changes to logits, applied to a whole batch at once.

A processor is notified as requests come and go (`update_state`) and keeps its state in arrays over all of them, so that
`apply` takes a few array operations regardless of the number of requests, with no Python per row and step. The
sampler's own processors (`builtin_processors`) and those of `--logits-processors` share this interface.

`examples/logits_processor.py` is an example, for `argosy serve MODEL --logits-processors MODULE:CLASS` or
`LLM(MODEL, logits_processors=[CLASS])`. Requests pass it arguments in `vllm_xargs`, which it finds in
`SamplingParams.extra_args`.

The interface is vLLM V1's (v1/sample/logits_processor/interface.py) with three differences:

- A request keeps its slot until it leaves, so rows never move; `apply` gets the slots of its rows.
- The processor decides which requests use it (`is_used_by`). A custom processor hears of no other requests and gets no
  other rows, and an exception that it raises fails no other request.
- There is no `is_argmax_invariant`, because an unused processor is not called at all.

This module does not import torch: the API process calls `is_used_by` and `validate_params`.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy_engine.errors import ConfigError
from argosy_engine.params import SamplingParams

if TYPE_CHECKING:
    import torch


Ints = NDArray[np.int64]


class Added(NamedTuple):
    """A request that took a slot: a new one, or one that resumes after a preemption with its output so far."""

    slot: int
    params: SamplingParams
    token_ids: list[int]
    """Prompt and output so far."""
    num_prompt_tokens: int


@dataclass(slots=True)
class BatchUpdate:
    """Changes since the last step: first the slots that were freed, then the requests that took a slot."""

    removed: list[int] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)


class Rows:
    """The rows of a logits tensor: parallel arrays [R]."""

    def __init__(self, slots: Ints, positions: Ints, num_slots: int) -> None:
        self.slots = slots
        self.positions = positions
        """Index, in its sequence, of the token to sample."""
        self._num_slots = num_slots

    @cached_property
    def of_slot(self) -> Ints:
        """Row of each slot, -1 for slots without a row."""
        rows = np.full(self._num_slots, -1, np.int64)
        rows[self.slots] = np.arange(len(self.slots))
        return rows

    @cached_property
    def position_of_slot(self) -> Ints:
        positions = np.zeros(self._num_slots, np.int64)
        positions[self.slots] = self.positions
        return positions

    def take(self, index: Ints) -> Rows:
        """Select some of the rows."""
        return Rows(self.slots[index], self.positions[index], self._num_slots)


class ProcessorConfig(NamedTuple):
    """Constructor argument of custom processors (`--logits-processors`)."""

    model_path: str
    """The model's directory, with its tokenizer.json."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    token_ids: NDArray[np.int32]
    """[max_num_seqs, max_model_len + 1]: the tokens of each request, by slot. Up to date for processors with
    `reads_tokens`; for others the last sampled token may be missing. Read only."""
    device: torch.device
    """The logits' device."""


class LogitsProcessor(ABC):
    """Base class of logits processors.

    Custom ones (`--logits-processors`) are constructed with a `ProcessorConfig`, once per engine start.
    """

    reads_tokens = False
    """Whether `apply` reads tokens sampled in earlier steps. While such a processor is in use, each step waits for the
    tokens of the previous one."""

    @classmethod
    @abstractmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        """Whether a request uses this processor. Custom processors hear of no other requests."""

    @classmethod  # noqa: B027 (most have nothing to refuse)
    def validate_params(cls, params: SamplingParams) -> None:
        """Check the parameters of a request that uses this processor, before it reaches the engine core.

        Raises:
            ValueError: the parameters are invalid; the client gets the message in a 400 response.
        """

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Record requests that came or left."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        """Change float32 logits [R, vocab_size] in place."""

    def __bool__(self) -> bool:
        """Whether any live request uses this processor. While none does, `apply` is not called."""
        return True


def load_logits_processors(paths: Sequence[str]) -> tuple[type[LogitsProcessor], ...]:
    """Import the classes named by `MODULE:CLASS` paths, which come from the command line and never from a client.

    Raises:
        ConfigError: a class cannot be imported or is not a LogitsProcessor.
    """
    return tuple(_load(path) for path in paths)


def _load(path: str) -> type[LogitsProcessor]:
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"--logits-processors {path}: give MODULE:CLASS")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(
            f"--logits-processors {path}: {type(error).__name__}: {error}; the module must be importable, as an "
            "installed package or through PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(f"--logits-processors {path} is not a subclass of argosy_engine.LogitsProcessor")
    return found


@cache
def source_digest(processor: type[LogitsProcessor]) -> str:
    """Return the SHA-256 of the file that a class was loaded from; empty if there is none, as in a notebook."""
    try:
        return hashlib.sha256(Path(inspect.getfile(processor)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def processor_path(processor: str | type[LogitsProcessor]) -> str:
    """Return the `MODULE:CLASS` path of a class; paths are returned unchanged.

    Raises:
        ConfigError: the class is defined inside a function, so that other processes cannot import it.
    """
    if isinstance(processor, str):
        return processor
    if "<locals>" in processor.__qualname__:
        raise ConfigError(f"logits processor {processor.__qualname__} must be defined at the top of a module")
    return f"{processor.__module__}:{processor.__qualname__}"
