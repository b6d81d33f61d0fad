"""IsolatedProcessor: runs a custom logits processor such that its exceptions fail only the requests that use it.

The processor works on a copy of the rows that use it. If `apply` raises, it is retried with each row alone, and the
requests whose rows raise again fail. If `update_state` raises for a request, that request fails. Endless loops, device
faults and crashes of native code are not contained.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from argosy_engine.errors import ConfigError
from argosy_engine.sample.logits_processor.interface import (
    Added,
    BatchUpdate,
    Ints,
    LogitsProcessor,
    ProcessorConfig,
    Rows,
)

logger = logging.getLogger("argosy.worker")


class IsolatedProcessor:
    """Wrapper that the sampler calls in place of a custom processor.

    Raises (from the constructor):
        ConfigError: the processor's own constructor failed.
    """

    def __init__(self, kind: type[LogitsProcessor], config: ProcessorConfig) -> None:
        self._name = kind.__qualname__
        self._kind = kind
        try:
            self._processor = kind(config)  # type: ignore[call-arg]
        except Exception as error:
            logger.exception("constructing logits processor %s failed", self._name)
            raise ConfigError(
                f"--logits-processors: {self._name}(config) raised {type(error).__name__}: {error}"
            ) from error
        self.reads_tokens = kind.reads_tokens
        self._users: set[int] = set()
        self.failures: dict[int, str] = {}
        """Maps the slot of each failed request to the reason."""

    def __bool__(self) -> bool:
        return bool(self._users)

    def update_state(self, update: BatchUpdate) -> None:
        for slot in update.removed:
            self.failures.pop(slot, None)
            if slot in self._users:
                self._users.remove(slot)
                self._tell(BatchUpdate(removed=[slot]))
        for added in update.added:
            if self._is_used_by(added):
                # One by one, so that an exception can be attributed to one request.
                if self._tell(BatchUpdate(added=[added])):
                    self._users.add(added.slot)
                else:
                    self._fail(added.slot)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        index = np.flatnonzero(
            [slot in self._users and slot not in self.failures for slot in rows.slots.tolist()]
        )
        if not len(index) or self._try(logits, rows, index):
            return
        for row in index:
            if not self._try(logits, rows, np.array([row])):
                self._fail(int(rows.slots[row]))

    def _try(self, logits: torch.Tensor, rows: Rows, index: Ints) -> bool:
        """Apply the processor to some of the rows. If it raises, return False and leave the logits unchanged."""
        chosen = torch.from_numpy(index).to(logits.device)
        changed = logits[chosen]
        try:
            self._processor.apply(changed, rows.take(index))
        except Exception:
            logger.exception("logits processor %s failed in apply", self._name)
            return False
        logits[chosen] = changed
        return True

    def _is_used_by(self, added: Added) -> bool:
        """Whether a request uses the processor. If `is_used_by` raises, fail the request and return False."""
        try:
            return bool(self._kind.is_used_by(added.params))
        except Exception:
            logger.exception("logits processor %s failed in is_used_by", self._name)
            self._fail(added.slot)
            return False

    def _tell(self, update: BatchUpdate) -> bool:
        try:
            self._processor.update_state(update)
        except Exception:
            logger.exception("logits processor %s failed in update_state", self._name)
            return False
        return True

    def _fail(self, slot: int) -> None:
        self.failures[slot] = f"logits processor {self._name} failed on this request"
