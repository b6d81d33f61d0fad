"""Completions: requests to generations and back, streamed and not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from argosy_engine.api.completion_parts import CompletionParts
from argosy_engine.api.serving import (
    Serving,
    book,
    created_at,
    empty_totals,
    finished_choices,
    formatted,
    num_shown,
    usage_of,
)
from argosy_engine.frontend.processor import Prompt
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_protocol.openai import Completion, CompletionChoice, CompletionRequest, Usage


async def completion(serving: Serving, request: CompletionRequest, request_id: str, size: int) -> Completion:
    """
    Args:
        size: of the request's body, in bytes.
    """
    name = serving.check_model(request.model)
    prompts = await _prompts(serving, request, size)
    merged = await serving.generate(prompts, request)
    n = request.n or 1
    for output in merged:  # each prompt's log probabilities came with its first choice
        output.prompt_logprobs = merged[output.index // n * n].prompt_logprobs
    parts = _parts(serving, request, prompts, [()] * len(merged))
    choices = await formatted(
        sum(map(num_shown, merged)), lambda: [parts.choice(output, is_first=True) for output in merged]
    )
    return Completion(
        id=f"cmpl-{request_id}", created=int(time.time()), model=name, choices=choices, usage=usage_of(merged, n)
    )  # fmt: skip


async def completion_stream(
    serving: Serving, request: CompletionRequest, request_id: str, size: int, *, resumable: bool = False
) -> AsyncGenerator[Completion, None]:
    """
    Args:
        size: of the request's body, in bytes.
        resumable: every chunk carries the token ids by which another engine can continue the stream.
    """
    name = serving.check_model(request.model)
    prompts = await _prompts(serving, request, size)
    requests = serving.core_requests(prompts, request)
    n = request.n or 1
    resumed = [core_request.resume_token_ids for core_request in requests]
    parts = _parts(serving, request, prompts, resumed, with_ids=resumable)
    totals, finished = empty_totals(requests), finished_choices(request)
    stream_id, created, usage_options = f"cmpl-{request_id}", created_at(request), request.stream_options
    continuous = usage_options is not None and usage_options.continuous_usage_stats
    unseen = {index for index, item in enumerate(requests) if not item.resume_token_ids}
    prompt_logprobs: dict[int, list[TokenLogprobs] | None] = {}

    def chunk(choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=stream_id, created=created, model=name, choices=choices, usage=usage)

    async with aclosing(serving.llm.generate(requests, n, finished)) as stream:
        async for outputs in stream:
            for output in outputs:
                if output.index in finished:
                    book(totals[output.index], output)
                    continue
                is_first = output.index in unseen
                unseen.discard(output.index)
                if is_first:
                    leader = output.index // n * n
                    prompt_logprobs.setdefault(leader, output.prompt_logprobs)
                    output.prompt_logprobs = prompt_logprobs[leader]
                make = partial(parts.choice, output, is_first=is_first)
                choice = await formatted(num_shown(output), make)
                book(totals[output.index], output)
                if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids is not None:
                    yield chunk([choice], usage_of(totals, n) if continuous else None)
    if usage_options is not None and usage_options.include_usage:
        yield chunk([], usage_of(totals, n))


async def _prompts(serving: Serving, request: CompletionRequest, size: int) -> list[Prompt]:
    serving.llm.admission.check(request.n or 1)
    return await serving.lanes.run(size, serving.llm.processor.completion_prompts, request)


def _parts(
    serving: Serving,
    request: CompletionRequest,
    prompts: Sequence[Prompt],
    resumed: Sequence[Sequence[int]],
    *,
    with_ids: bool = False,
) -> CompletionParts:
    return CompletionParts(
        request, serving.llm.processor.tokenizer, prompts, resumed, with_ids=with_ids or request.return_token_ids
    )  # fmt: skip
