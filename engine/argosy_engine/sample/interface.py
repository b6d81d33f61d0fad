"""LogitsProcessor: per-request changes to logits, applied to a whole batch at once.

A processor is told about requests as they come and go (`update_state`) and keeps what it needs over all of them, so
that `apply` is a handful of array operations however many requests use it: no Python per row and step. The sampler's
own processors (`logits_processors`, `penalties`) and those of `--logits-processors` share this interface.

`examples/logits_processor.py` is one, for `argosy serve MODEL --logits-processors MODULE:CLASS` or
`LLM(MODEL, logits_processors=[CLASS])`. Requests address it by what they say in `vllm_xargs`, which it finds in
`SamplingParams.extra_args`.

The interface is vLLM V1's (v1/sample/logits_processor/interface.py) with three differences. A request keeps its slot
for as long as it lives, so there are no moved rows, and `apply` gets the slots of the rows it is given. Who uses a
processor is asked of the processor (`is_used_by`): it hears of no other requests, gets no other rows, and when it
raises, no other request pays for it. `is_argmax_invariant` does not exist: an unused processor is not called at all.

No torch here: the API process reads `is_used_by` and `validate_params`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy_engine.errors import ConfigError
from argosy_engine.sample.params import SamplingParams

if TYPE_CHECKING:
    import torch

Ints = NDArray[np.int64]


class Added(NamedTuple):
    """A request that took a slot: new, or back after a preemption with the output it had."""

    slot: int
    params: SamplingParams
    token_ids: list[int]
    """prompt and output so far"""
    num_prompt_tokens: int


@dataclass(slots=True)
class BatchUpdate:
    """What changed since the last step: first the slots that became free, then the requests that took one."""

    removed: list[int] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)


class Rows:
    """The rows of a logits tensor: parallel arrays [R]."""

    def __init__(self, slots: Ints, positions: Ints, num_slots: int) -> None:
        self.slots = slots
        self.positions = positions
        """index in its sequence of the token that is sampled"""
        self._num_slots = num_slots

    @cached_property
    def of_slot(self) -> Ints:
        """Slot -> row, -1 for slots without one."""
        rows = np.full(self._num_slots, -1, np.int64)
        rows[self.slots] = np.arange(len(self.slots))
        return rows

    @cached_property
    def position_of_slot(self) -> Ints:
        positions = np.zeros(self._num_slots, np.int64)
        positions[self.slots] = self.positions
        return positions

    def take(self, index: Ints) -> Rows:
        """Some of the rows."""
        return Rows(self.slots[index], self.positions[index], self._num_slots)


class ProcessorConfig(NamedTuple):
    """What a processor of `--logits-processors` is made with."""

    model_path: str
    """The model's directory, with its tokenizer.json."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    token_ids: NDArray[np.int32]
    """[max_num_seqs, max_model_len + 1], by slot the tokens of each request: up to the position that is sampled for
    processors with `reads_tokens`, else possibly one less. Read only."""
    device: torch.device
    """Of the logits."""


class LogitsProcessor(ABC):
    """Subclasses of `--logits-processors` are constructed with a `ProcessorConfig`, once per engine start."""

    reads_tokens = False
    """Whether `apply` looks at tokens that were sampled in earlier steps. While such a processor is in use, a step
    waits for the tokens of the one before it."""

    @classmethod
    @abstractmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        """Whether a request asks for this processor. One of `--logits-processors` hears of no others."""

    @classmethod  # noqa: B027 (most have nothing to refuse)
    def validate_params(cls, params: SamplingParams) -> None:
        """Called for requests that use this processor, before they reach the engine core.

        Raises:
            ValueError: something is wrong with the parameters; the client gets the message, with a 400.
        """

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Books requests that came and went."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        """Changes float32 logits [R, vocab_size] in place."""

    def __bool__(self) -> bool:
        """Whether any live request uses this processor; it is not called while none does."""
        return True


def load_logits_processors(paths: Sequence[str]) -> tuple[type[LogitsProcessor], ...]:
    """The classes that `MODULE:CLASS` name. The paths are the operator's, never a client's.

    Raises:
        ConfigError: one cannot be imported, or is no LogitsProcessor.
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
    except Exception as error:  # whatever importing somebody's module raises
        raise ConfigError(
            f"--logits-processors {path}: {type(error).__name__}: {error}; the module must be importable, as an "
            "installed package or through PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(f"--logits-processors {path} is not a subclass of argosy_engine.LogitsProcessor")
    return found


def processor_path(processor: str | type[LogitsProcessor]) -> str:
    """`MODULE:CLASS` of a class; a path remains one.

    Raises:
        ConfigError: the class lives inside a function, where no other process can find it.
    """
    if isinstance(processor, str):
        return processor
    if "<locals>" in processor.__qualname__:
        raise ConfigError(f"logits processor {processor.__qualname__} must be defined at the top of a module")
    return f"{processor.__module__}:{processor.__qualname__}"
