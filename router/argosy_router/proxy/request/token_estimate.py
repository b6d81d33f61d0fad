"""Token estimates: how many tokens a request is charged to its key's limits.

Owns: the estimate before the answer, and the ones for answers that end without reporting their usage.
Must not know: limits, queues, answers.

Before the answer: the prompts, and for each sequence that is generated its `max_tokens`, or what the key's answers
without one have taken on average. A batch has a sequence for each prompt, times `n`, or times the beam width.

After an answer that was cut: the prompts, and what the replica can have generated at its rate since the expected first
token, up to what was asked for. Of a stream that was cut, what was sent counts, and what the replica can have generated
since the last event: it may tell nothing for thousands of tokens (`stream_interval`, reasoning that is not shown). So a
client that leaves pays for what was computed, and gets the rest back.
"""

from __future__ import annotations

from typing import NamedTuple

from argosy_protocol.chat_batch import BatchChatCompletionRequest
from argosy_protocol.openai import MAX_TOKENS, ChatCompletionRequest, CompletionRequest


class TokenEstimate:
    """The tokens that one request is expected to take."""

    __slots__ = (
        "beams_per_choice",
        "has_limit",
        "output_tokens",
        "prompt_tokens",
        "sequences",
        "service_prompt_tokens",
    )

    def __init__(
        self,
        prompt_tokens: int,
        sequences: int,
        output_tokens: int,
        *,
        has_limit: bool,
        beams_per_choice: float = 1.0,
        service_prompt_tokens: int | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        """Tokens of all prompts together, by what the key's prompts usually have: for its limits."""
        self.service_prompt_tokens = prompt_tokens if service_prompt_tokens is None else service_prompt_tokens
        """The same by what all prompts of the service usually have: for comparison with those of other keys."""
        self.sequences = sequences
        """Sequences generated in parallel."""
        self.output_tokens = output_tokens
        """Expected output tokens of each sequence."""
        self.has_limit = has_limit
        """Whether the request bounds its output."""
        self.beams_per_choice = beams_per_choice
        """Sequences computed for each that is returned: a beam search may be wider than its answer."""

    @property
    def total(self) -> int:
        """Tokens to reserve."""
        return self.prompt_tokens + self.sequences * self.output_tokens

    @property
    def cost(self) -> int:
        """Tokens that the request costs the service, in the measure of all keys."""
        return self.service_prompt_tokens + self.sequences * self.output_tokens

    def used(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return the tokens that an answer with this usage counts for."""
        return prompt_tokens + int(completion_tokens * self.beams_per_choice)

    def generated_in(self, seconds: float, decode_step_s: float, max_tokens: int = MAX_TOKENS) -> int:
        """Return the tokens charged for a request that reported no usage and generated for `seconds`: at most
        `max_tokens` for each sequence. `seconds` is not positive before its first token."""
        if seconds <= 0.0:
            return self.prompt_tokens
        bound = self._bound(max_tokens)
        return self.prompt_tokens + self.sequences * min(bound, int(seconds / decode_step_s))

    def unsent_in(
        self, seconds: float, decode_step_s: float, sent: int, max_unsent: int, max_tokens: int = MAX_TOKENS
    ) -> int:
        """Return the tokens that a replica can have generated in the `seconds` since the last event of a stream.

        Args:
            sent: tokens of all sequences up to then.
            max_unsent: tokens of each sequence that the replica may have kept back.
            max_tokens: of each sequence at most.
        """
        left = max(0, self._bound(max_tokens) - sent // self.sequences)
        return self.sequences * min(left, max_unsent, int(max(0.0, seconds) / decode_step_s))

    def _bound(self, max_tokens: int) -> int:
        """Tokens of a sequence, where `max_tokens` is a replica's word: a negative one would return tokens to a key."""
        return max(0, min(self.output_tokens, max_tokens) if self.has_limit else max_tokens)


class Outputs(NamedTuple):
    """What a request asks to generate."""

    sequences: int
    """Sequences generated in parallel."""
    limit: int | None
    """Tokens of each sequence at most; None if the request does not say."""
    beams_per_choice: float
    """See `TokenEstimate`."""


def outputs_of(request: ChatCompletionRequest | CompletionRequest) -> Outputs:
    """Return what a request asks to generate.

    Raises:
        BadRequest: the prompts of a batch are of different kinds, or too many.
    """
    choices = width = request.n or 1
    prompts = 1
    limit = request.max_tokens
    if isinstance(request, CompletionRequest):
        prompts = max(1, len(request.prompts()))
        if request.best_of is not None:
            width = max(width, request.best_of)
    else:
        limit = request.max_completion_tokens or limit
        if isinstance(request, BatchChatCompletionRequest):
            prompts = len(request.messages)
    return Outputs(prompts * width, limit, width / choices)


def estimate_of(
    outputs: Outputs,
    prompt_tokens: int,
    usual_output_tokens: float,
    *,
    service_prompt_tokens: int | None = None,
) -> TokenEstimate:
    """Estimate the tokens of a request.

    Args:
        prompt_tokens: by what the key's prompts usually have.
        usual_output_tokens: of an answer without a limit.
        service_prompt_tokens: by what all prompts of the service usually have; the same if None.
    """
    return TokenEstimate(
        prompt_tokens,
        outputs.sequences,
        int(usual_output_tokens) if outputs.limit is None else outputs.limit,
        has_limit=outputs.limit is not None,
        beams_per_choice=outputs.beams_per_choice,
        service_prompt_tokens=service_prompt_tokens,
    )
