"""Token counts of a request's choices, and the `usage` object made of them."""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_protocol.openai import CompletionTokensDetails, PromptTokensDetails, Usage


def initial_totals(requests: Sequence[EngineCoreRequest]) -> list[GenerationOutput]:
    """Return the initial counts of each choice: those of the stream that is resumed."""
    return [
        GenerationOutput(
            index,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=len(request.resume_token_ids),
        )
        for index, request in enumerate(requests)
    ]


def update_total(total: GenerationOutput, output: GenerationOutput) -> None:
    """Copy an output's counts, without its text."""
    total.num_prompt_tokens = output.num_prompt_tokens
    total.num_cached_tokens = output.num_cached_tokens
    total.num_output_tokens = output.num_output_tokens


def usage_of(outputs: Sequence[GenerationOutput], n: int, num_reasoning_tokens: int | None = None) -> Usage:
    """Compute the usage of a request with `n` choices per prompt; each prompt counts once.

    Args:
        num_reasoning_tokens: of all choices; None at endpoints without reasoning.
    """
    prompts = outputs[::n]
    prompt_tokens = sum(output.num_prompt_tokens for output in prompts)
    completion_tokens = sum(output.num_output_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(output.num_cached_tokens for output in prompts)),
        completion_tokens_details=(
            None if num_reasoning_tokens is None else CompletionTokensDetails(num_reasoning_tokens)
        ),
    )
