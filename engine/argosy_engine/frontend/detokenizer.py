"""IncrementalDetokenizer: decodes token ids as they arrive, and finds stop strings across token boundaries.

Invariant: the concatenated results of `update` and of the final flush do not depend on how the tokens were grouped into
calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

from tokenizers.decoders import DecodeStream

from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.params import SamplingParams

_PRIMING_TOKENS = 6
"""Number of prompt tokens that are decoded first, so that the output's first token is decoded in its context."""
_MAX_PRIMING_TOKENS = 24
"""Maximum number, used if fewer begin inside a character: with byte fallback that spoils all bytes up to the next
complete token."""
_MARKS = range(0xDC00, 0xE000)
"""Characters that stand for hidden special tokens while stop strings are looked for; no text has them."""


class IncrementalDetokenizer:
    """Decoder of one request's output.

    `stop_reason` is set to the stop string that ended the text. Text after it is dropped, and so is the stop string,
    unless `include_stop_str_in_output` is set. A special token is found where a stop string contains its text, also if
    the text does not show special tokens. `num_past_stop` is then the number of tokens of the last call after the
    one that completed the stop string. They are not part of the output: one that came token by token has none.

    `num_unshown` is the number of tokens, the last ones so far, without any text that `update` has returned: what they
    say is held back, or ended the output.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._prompt_token_ids = prompt_token_ids
        self._stream: DecodeStream | None = None
        """Made when a token comes whose text only decoding can tell; from then on it decodes every token."""
        self._shown: deque[int] | None = None
        """The last tokens before it, the prompt's included; None until the first token."""
        self._dropped: frozenset[int] = frozenset()
        if params.skip_special_tokens and params.kept_special_token_ids:
            self._dropped = tokenizer.special_ids.difference(params.kept_special_token_ids)
        self._marks = _marks(tokenizer, params)
        self._stops = _marked_stops(tokenizer, params.stop, self._marks)
        # Characters that could still become the beginning of a stop string are held back.
        self._hold_back = (
            0
            if params.include_stop_str_in_output and not self._marks
            else max((len(stop) for stop in params.stop), default=1) - 1
        )
        keeps_spaces = params.skip_special_tokens or params.spaces_between_special_tokens
        self._joined = frozenset() if keeps_spaces else tokenizer.special_ids
        """Tokens that are shown as they are if they follow another of them."""
        self._is_after_joined = False
        self._pending = ""
        self._tail = ""
        self._num_exempt = params.min_tokens
        """Number of further tokens whose text is not searched for stop strings (`min_tokens`)."""
        self.stop_reason: str | None = None
        self._matched = ""
        """The stop string as it was found, with marks."""
        self.num_past_stop = 0
        self.num_unshown = 0
        self._num_decoded = self._num_released = 0
        """Characters, if there are stop strings."""
        self._starts: deque[int] = deque()
        """Where the text of each token begins of which nothing is released, if there are stop strings."""

    def update(self, token_ids: Sequence[int], is_last: bool, *, ends_at_stop_token: bool = False) -> str:
        """Decode tokens, and return the text that is certain by now. With `is_last` nothing is held back.

        Args:
            ends_at_stop_token: the last token is the one that ended the output. As in vLLM, its text is shown only
                with `include_stop_str_in_output`.
        """
        shown = token_ids
        if ends_at_stop_token and not self._params.include_stop_str_in_output:
            shown = token_ids[:-1]
        self.num_unshown = len(token_ids) - len(shown)
        if is_last and self._stream is None and not self._params.stop and not self._joined:
            text = self._tokenizer.text_after(
                self._prompt_token_ids[-_PRIMING_TOKENS:],
                [token_id for token_id in shown if token_id not in self._dropped] if self._dropped else shown,
                skip_special_tokens=self._skips_special_tokens,
            )
            if text is not None:
                return text
        pieces = ["" if token_id in self._dropped else self._step(token_id) for token_id in shown]
        if self._marks:
            marks = (self._marks.get(token_id, "") for token_id in shown)
            pieces = [piece + mark for piece, mark in zip(pieces, marks, strict=True)]
        if not self._params.stop:
            return "".join(pieces)
        num_exempt = min(self._num_exempt, len(pieces))
        self._num_exempt -= num_exempt
        text, num_searched = self._match_stop("".join(pieces[:num_exempt]), pieces[num_exempt:], is_last)
        if self.stop_reason is not None:
            self.num_past_stop = len(token_ids) - num_exempt - num_searched
            self.num_unshown = 0
            del pieces[num_exempt + num_searched :]
        self._count_unshown(pieces, len(text), is_last and self.stop_reason is None)
        return self._unmarked(text)

    def _unmarked(self, text: str) -> str:
        """Return text without marks, except in the stop string that it ends with."""
        if not self._marks:
            return text
        shown_stop = ""
        if self.stop_reason is not None and self._params.include_stop_str_in_output:
            text, shown_stop = text.removesuffix(self._matched), self.stop_reason
        return text.translate(dict.fromkeys(map(ord, self._marks.values()))) + shown_stop

    def _count_unshown(self, pieces: Sequence[str], num_released: int, is_all: bool) -> None:
        starts, position = self._starts, self._num_decoded
        for piece in pieces:
            starts.append(position)
            position += len(piece)
        self._num_decoded = position
        self._num_released += num_released
        if is_all:
            starts.clear()
        while starts and starts[0] < self._num_released:
            starts.popleft()
        self.num_unshown += len(starts)

    def _match_stop(self, exempt: str, pieces: Sequence[str], is_last: bool) -> tuple[str, int]:
        """Find the stop string that completes first, in `pieces`; return the text to release, and the number of pieces
        up to the one that completes it, or of all. `_tail` is released text that a match may still need."""
        text = self._tail + self._pending + exempt
        searched = len(text)
        fresh = "".join(pieces)
        text += fresh
        released = len(self._tail)
        match = None
        for order, (stop, _) in enumerate(self._stops if fresh else ()):
            start = text.find(stop, max(searched - len(stop) + 1, 0))
            if start >= 0:
                match = min(match or (start + len(stop), order), (start + len(stop), order))
        if match is not None:
            end, order = match
            self._matched, self.stop_reason = self._stops[order]
            cut = end if self._params.include_stop_str_in_output else end - len(self._matched)
            self._pending = ""
            ends = accumulate(map(len, pieces), initial=searched)
            return text[released : max(cut, released)], next(n for n, at in enumerate(ends) if at >= end)
        keep = 0 if is_last else min(self._hold_back, len(text) - released)
        boundary = len(text) - keep
        self._pending = text[boundary:]
        longest = max(len(stop) for stop in self._params.stop)
        self._tail = text[max(0, boundary - longest + 1) : boundary]
        return text[released:boundary], len(pieces)

    def _step(self, token_id: int) -> str:
        text = self._decoded(token_id)
        if not self._joined:
            return text
        was_after, self._is_after_joined = self._is_after_joined, token_id in self._joined
        return self._tokenizer.token_text(token_id) if was_after and self._is_after_joined else text

    def _decoded(self, token_id: int) -> str:
        if self._stream is None:
            text = self._known(token_id)
            if text is not None:
                return text
            shown = self._prompt_token_ids if self._shown is None else list(self._shown)
            self._stream = self._new_stream(_context(self._tokenizer, shown))
        try:
            return self._stream.step(self._tokenizer.backend, token_id) or ""
        except Exception as error:
            # A byte sequence that is no UTF-8 can make the decoder's view of the prefix inconsistent
            # (huggingface/tokenizers: "Invalid prefix encountered"): start over from this token.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = self._new_stream(())
            return self._stream.step(self._tokenizer.backend, token_id) or ""

    def _known(self, token_id: int) -> str | None:
        """Return a token's text where decoding would find the same: of whole characters, after whole characters."""
        shown = self._shown
        if shown is None:
            context = self._prompt_token_ids[-_MAX_PRIMING_TOKENS:]
            if self._joined or self._tokenizer.text_after(context, (), skip_special_tokens=False) is None:
                return None
            self._shown = shown = deque(context, _MAX_PRIMING_TOKENS)
        text = self._tokenizer.whole_text(token_id)
        if text is None:
            return None
        shown.append(token_id)
        return "" if self._skips_special_tokens and token_id in self._tokenizer.special_ids else text

    def _new_stream(self, ids: Sequence[int]) -> DecodeStream:
        return DecodeStream(ids=list(ids), skip_special_tokens=self._skips_special_tokens)

    @property
    def _skips_special_tokens(self) -> bool:
        return self._params.skip_special_tokens and not self._params.kept_special_token_ids


def _marks(tokenizer: Tokenizer, params: SamplingParams) -> dict[int, str]:
    """Return a character for each special token that a stop string contains and the text does not show."""
    if not params.stop or not params.skip_special_tokens:
        return {}
    hidden = (
        token_id
        for token_id, text in tokenizer.special_texts.items()
        if any(text in stop for stop in params.stop) and token_id not in params.kept_special_token_ids
    )
    return {token_id: chr(mark) for token_id, mark in zip(hidden, _MARKS, strict=False)}


def _marked_stops(
    tokenizer: Tokenizer, stops: Sequence[str], marks: Mapping[int, str]
) -> list[tuple[str, str]]:
    """Return what to look for, and the stop string that each stands for: the text of special tokens may be theirs, or
    ordinary text."""
    texts = [(tokenizer.special_texts[token_id], mark) for token_id, mark in marks.items()]
    texts.sort(key=lambda item: len(item[0]), reverse=True)
    found = [(stop, stop) for stop in stops]
    for stop in stops:
        marked = stop
        for text, mark in texts:
            marked = marked.replace(text, mark)
        if marked != stop:
            found.append((marked, stop))
    return found


def _context(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Sequence[int]:
    """Return the shortest end of the prompt with `_PRIMING_TOKENS` tokens or more and complete characters."""
    for size in range(_PRIMING_TOKENS, min(len(token_ids), _MAX_PRIMING_TOKENS) + 1):
        if "\ufffd" not in tokenizer.decode(token_ids[-size:], skip_special_tokens=False):
            return token_ids[-size:]
    return token_ids[-_PRIMING_TOKENS:]
