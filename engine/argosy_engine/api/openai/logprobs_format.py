"""Log probabilities in the shapes of OpenAI's two endpoints, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_protocol.openai import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

_FLOOR = -9999.0
"""Replaces minus infinity, which JSON does not have; vLLM's value."""


class TextOffsets:
    """Computes the character offset of each token of a choice in its text.

    A token that is a part of a character begins where the character does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def advance(self, token_id: int, *, is_echoed: bool = False) -> int:
        """Return the offset of the next token. Special tokens of an echoed prompt are never skipped."""
        offset = self._offset
        if is_echoed or token_id not in self._skipped:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


class LogprobsFormat:
    """
    Args:
        as_token_ids: write tokens as `token_id:ID` (vLLM's `return_tokens_as_token_ids`).
        shows_all: the alternatives are chosen tokens (`logprob_token_ids`), all of which a chat shows, after the
            sampled one.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool, shows_all: bool = False) -> None:
        self._tokenizer = tokenizer
        self._shows_all = shows_all
        self._as_token_ids = as_token_ids

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    token=self._name(entry.token_ids[0]),
                    logprob=_finite(entry.logprobs[0]),
                    bytes=list(self._tokenizer.token_bytes(entry.token_ids[0])),
                    top_logprobs=[
                        TopLogprob(
                            token=self._name(token_id),
                            logprob=_finite(logprob),
                            bytes=list(self._tokenizer.token_bytes(token_id)),
                        )
                        for token_id, logprob in _alternatives(entry)[
                            : len(entry.token_ids) - (0 if self._shows_all else 1)
                        ]
                    ],
                )
                for entry in entries
            ]
        )

    def completion(
        self,
        entries: Sequence[TokenLogprobs],
        offsets: TextOffsets,
        first_token_id: int | None = None,
        *,
        num_echoed: int = 0,
        is_first_shown: bool = True,
    ) -> CompletionLogprobs:
        """
        Args:
            first_token_id: first token of an echoed prompt, which has no log probabilities.
            num_echoed: number of entries that belong to an echoed prompt.
            is_first_shown: whether the text has the first token.
        """
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if first_token_id is not None:
            result.tokens.append(self._completion_name(first_token_id))
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            result.text_offset.append(offsets.advance(first_token_id, is_echoed=is_first_shown))
        for index, entry in enumerate(entries):
            result.tokens.append(self._completion_name(entry.token_ids[0]))
            result.token_logprobs.append(_finite(entry.logprobs[0]))
            best: dict[str, float] = {}
            for token_id, logprob in _alternatives(entry):
                name = self._completion_name(token_id)
                best[f"token_id:{token_id}" if name in best else name] = _finite(logprob)
            result.top_logprobs.append(best)
            result.text_offset.append(offsets.advance(entry.token_ids[0], is_echoed=index < num_echoed))
        return result

    def prompt(self, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
        """Format `prompt_logprobs`: one entry per prompt token, None for the first."""
        result: PromptLogprobs = [None]
        for entry in entries:
            ranks = [entry.rank, *range(1, len(entry.token_ids))]
            alternatives: dict[str, PromptLogprob] = {}
            for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
                alternatives.setdefault(
                    str(token_id),
                    PromptLogprob(
                        logprob=_finite(logprob),
                        rank=rank,
                        decoded_token=self._tokenizer.token_text(token_id),
                    ),
                )
            result.append(alternatives)
        return result

    def _completion_name(self, token_id: int) -> str:
        """Return a token as text, or as its bytes if these are not text alone, in OpenAI's form: `bytes:\\xe2\\x80`."""
        if self._as_token_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(
                chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}" for byte in data
            )

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_text(token_id)


def _alternatives(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Return the sampled token and then the other best ones, likeliest first, as in vLLM."""
    pairs = list(zip(entry.token_ids, entry.logprobs, strict=True))
    return [pairs[0], *(pair for pair in pairs[1:] if pair[0] != pairs[0][0])]


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
