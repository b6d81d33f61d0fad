"""ReasoningCounter: counts the tokens of one choice's reasoning, for `completion_tokens_details`.

It reads token ids, so that the count does not depend on how they come. As in vLLM the markers do not count. Calls may
end the reasoning without its end marker, which only the parser of the text finds: then its text is counted instead, as
where the markers are sentences (`ChatFormat`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from argosy_engine.structured.reasoning import Reasoning

_MAX_TOKENS_BEFORE = 8
"""Tokens, such as white space, that a model may write before it opens its reasoning."""


class ReasoningCounter:
    """
    Args:
        reasoning: the markers; None if the model cannot reason after this prompt.
        message_ends: tokens that end a message of reasoning, after which others may come; empty if there is only one,
            which the markers' end marker ends.
    """

    def __init__(self, reasoning: Reasoning | None, message_ends: Collection[int] = ()) -> None:
        self.count = 0
        """Tokens of the reasoning so far."""
        self._start = list(reasoning.start_ids) if reasoning is not None else []
        self._end = list(reasoning.end_ids) if reasoning is not None else []
        self._message_ends = message_ends
        self._is_open = reasoning is not None and reasoning.is_open
        self._is_done = not self._end
        self._tail: list[int] = []
        """Last tokens, in which a marker may be complete."""
        self._num_before = 0

    @property
    def is_open(self) -> bool:
        """Whether the tokens so far end within the reasoning."""
        return self._is_open and not self._is_done

    def end(self, count: int) -> None:
        """Set the count of an open reasoning, which has ended before its last tokens."""
        self.count, self._is_done = min(self.count, count), True

    def add(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens of the choice."""
        if self._is_done:
            return
        for token_id in token_ids:
            marker = self._end if self._is_open else self._start
            self._tail = [*self._tail, token_id][-len(marker) :]
            is_complete = self._tail == marker
            if not self._is_open:
                self._num_before += 1
                self._is_open = is_complete
                is_late = self._num_before >= _MAX_TOKENS_BEFORE + len(marker)
                self._is_done = is_late and not is_complete and not self._message_ends
            elif token_id in self._message_ends:
                self._is_open, self._tail = False, [token_id]
            else:
                self.count += 1
                if is_complete:
                    self.count -= min(self.count, len(marker))
                    self._is_done = True
            if is_complete:
                self._tail = []
            if self._is_done:
                return
