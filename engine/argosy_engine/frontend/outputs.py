"""Outputs of a generation: deltas of one choice (`GenerationOutput`), or a prompt's results (`RequestOutput`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from argosy_engine.sample.token_logprobs import TokenLogprobs

logger = logging.getLogger("argosy.frontend")


class GenerationOutput(msgspec.Struct):
    """New text and tokens of one choice since the last output; the counts are totals."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    logprobs: list[TokenLogprobs] = []
    """One per token of `token_ids`, if the request asked for them."""
    num_unshown: int = 0
    """Number of tokens, the last ones so far, of whose text nothing has come: it is held back, or ended the output."""
    resumed_text: str = ""
    """Text of the run that this one continues, with a choice's first output. The reader has it already."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log probabilities of all prompt tokens but the first, with a choice's first output, if requested."""
    embedding: list[float] | None = None
    """The prompt's vector, if requested. There are no tokens then, and this is the only output."""

    @property
    def num_values(self) -> int:
        """Tokens and log probabilities, which an event that shows this output names."""
        width = len(self.logprobs[0].token_ids) if self.logprobs else 0
        return len(self.token_ids) + width * len(self.logprobs)

    def merge(self, later: GenerationOutput) -> None:
        """Append a later output of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_prompt_tokens = later.num_prompt_tokens
        self.num_cached_tokens = later.num_cached_tokens
        self.num_output_tokens = later.num_output_tokens
        self.num_unshown = later.num_unshown
        self.resumed_text += later.resumed_text
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a `RequestOutput`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """Empty while the choice runs; `error` if the engine could not continue it."""
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, if requested."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the whole output; None without `logprobs`."""
        return sum(entry.logprobs[0] for entry in self.logprobs) if self.logprobs else None


@dataclass(slots=True)
class RequestOutput:
    """The choices of one prompt, with everything generated so far."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token, None for the first, if requested."""
    num_cached_tokens: int = 0
    error: str | None = None
    """Why a choice ended with `error`."""
    prompt: str | None = None
    """Text of the prompt, of a chat as the template made it; None if it was given as token ids."""

    @property
    def finished(self) -> bool:
        return all(output.finish_reason for output in self.outputs)

    @property
    def text(self) -> str:
        """Text of the first choice. The properties below describe the first choice, too."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason


def log_failures(errors: Sequence[str | None]) -> None:
    """Log how many results of a batch have an error, for users who look only at the texts."""
    failed = [error for error in errors if error is not None]
    if failed:
        logger.error("%d of %d requests failed, the first with: %s", len(failed), len(errors), failed[0])
