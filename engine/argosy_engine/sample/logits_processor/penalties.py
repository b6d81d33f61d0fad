"""Repetition, frequency and presence penalties.

A penalty affects only tokens that occur in the request. Each request with penalties has a list of its distinct tokens
with their counts in the output, and a step gathers, changes and scatters only those logits, so the work grows with the
sequence length and not with the vocabulary. All operations run on the logits' device, and nothing is read back.
"""

from __future__ import annotations

import numpy as np
import torch

from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.sample.logits_processor.interface import Added, BatchUpdate, Ints, LogitsProcessor, Rows

_INITIAL_WIDTH = 256


class Penalties(LogitsProcessor):
    """Logits processor for all three penalties. Its tables grow with the number of requests that use penalties.

    Args:
        num_slots: maximum number of live requests.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._entry_of_slot = np.full(num_slots, -1, np.int64)
        self._free: list[int] = []
        self._num_live = 0
        self._bound = np.zeros(0, np.int64)
        """Upper bound of the distinct tokens per entry; the exact number is on the device only."""
        self._ids = torch.zeros(0, _INITIAL_WIDTH, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, _INITIAL_WIDTH, dtype=torch.float32, device=device)
        self._num_distinct = torch.zeros(0, dtype=torch.int64, device=device)
        self._penalties = torch.zeros(0, 3, dtype=torch.float32, device=device)
        """Per entry: repetition, frequency, presence."""

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return params.has_penalties

    def __bool__(self) -> bool:
        return self._num_live > 0

    def update_state(self, update: BatchUpdate) -> None:
        for slot in update.removed:
            entry = int(self._entry_of_slot[slot])
            if entry >= 0:
                self._entry_of_slot[slot] = -1
                self._free.append(entry)
                self._num_live -= 1
        for added in update.added:
            if self.is_used_by(added.params):
                self._add(added)

    def _add(self, added: Added) -> None:
        slot, params, token_ids, num_prompt = added
        ids, inverse = np.unique(np.asarray(token_ids, np.int64), return_inverse=True)
        counts = np.bincount(inverse.reshape(-1)[num_prompt:], minlength=len(ids))
        if not self._free:
            self._grow_entries()
        self._grow_width(len(ids) + 1)
        entry = self._free.pop()
        self._entry_of_slot[slot] = entry
        self._num_live += 1
        self._bound[entry] = len(ids)
        self._ids[entry, : len(ids)] = torch.from_numpy(ids).to(self._device)
        self._counts[entry, : len(ids)] = torch.from_numpy(counts.astype(np.float32)).to(self._device)
        self._num_distinct[entry] = len(ids)
        self._penalties[entry] = torch.tensor(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty],
            device=self._device,
        )

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        row_index, entry_index = self._present(rows)
        if not len(row_index):
            return
        row, entry = (torch.from_numpy(index).to(self._device) for index in (row_index, entry_index))
        width = max(int(self._bound[entry_index].max()), 1)
        column = torch.arange(width, device=self._device).expand(len(row_index), width)
        # Pad with the first distinct token: writing the same value twice changes nothing.
        column = torch.where(column < self._num_distinct[entry].unsqueeze(1), column, 0)
        ids = self._ids[entry].gather(1, column)
        counts = self._counts[entry].gather(1, column)
        repetition, frequency, presence = self._penalties[entry].unsqueeze(2).unbind(1)
        values = logits[row.unsqueeze(1), ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - frequency * counts - presence * (counts > 0)
        logits[row.unsqueeze(1), ids] = values

    def observe(self, rows: Rows, tokens: torch.Tensor) -> None:
        """Count the tokens [R] sampled for the rows."""
        row_index, entry_index = self._present(rows)
        if not len(row_index):
            return
        width = int(self._bound[entry_index].max())
        self._grow_width(width + 1)
        entry = torch.from_numpy(entry_index).to(self._device)
        token = tokens[torch.from_numpy(row_index).to(self._device)]
        is_known = torch.arange(width, device=self._device) < self._num_distinct[entry].unsqueeze(1)
        is_same = (self._ids[entry, :width] == token.unsqueeze(1)) & is_known
        was_seen = is_same.any(1)
        column = torch.where(was_seen, is_same.int().argmax(1), self._num_distinct[entry])
        self._counts[entry, column] = torch.where(was_seen, self._counts[entry, column] + 1.0, 1.0)
        self._ids[entry, column] = token
        self._num_distinct[entry] += (~was_seen).long()
        self._bound[entry_index] += 1

    def _present(self, rows: Rows) -> tuple[Ints, Ints]:
        """Return the rows that have penalties, and their entries."""
        entries = self._entry_of_slot[rows.slots]
        index = np.flatnonzero(entries >= 0)
        return index, entries[index]

    def _grow_entries(self) -> None:
        old, new = len(self._bound), max(2 * len(self._bound), 8)
        self._free.extend(range(new - 1, old - 1, -1))
        self._bound = np.concatenate([self._bound, np.zeros(new - old, np.int64)])
        for name in ("_ids", "_counts", "_num_distinct", "_penalties"):
            tensor = getattr(self, name)
            setattr(self, name, torch.cat([tensor, tensor.new_zeros(new - old, *tensor.shape[1:])]))

    def _grow_width(self, width: int) -> None:
        old = self._ids.shape[1]
        if width > old:
            extra = max(old, width - old)
            self._ids = torch.nn.functional.pad(self._ids, (0, extra))
            self._counts = torch.nn.functional.pad(self._counts, (0, extra))
