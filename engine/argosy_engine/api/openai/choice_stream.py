"""Choices of a generation as chunks of a stream, for chat completions and completions alike.

`stream_choices` runs the generation and decides what is sent when; a `ChoiceFormat` per endpoint decides what it looks
like. Neither knows HTTP.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from argosy_engine.api.openai.usage import initial_totals, update_total, usage_of
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_protocol.openai import GenerationRequest, Usage

MAX_INLINE_TOKENS = 256
"""Formatted on the event loop, in some milliseconds; more of them in a thread, so that other streams keep flowing."""

_Choice = TypeVar("_Choice")
_Chunk = TypeVar("_Chunk")
_Response = TypeVar("_Response")


class ChoiceFormat(ABC, Generic[_Choice, _Chunk, _Response]):
    """How an endpoint writes the choices of one request. Calls for one choice come in the order of its outputs."""

    def num_shown(self, output: GenerationOutput) -> int:
        """Tokens of an output that become text, or log probabilities, which take 20 us and more each."""
        return len(output.token_ids) + len(output.logprobs) + len(output.prompt_logprobs or ())

    @abstractmethod
    def opening(self) -> _Chunk | None:
        """The chunk before the first delta; None if there is none."""

    @abstractmethod
    def delta(self, output: GenerationOutput) -> _Choice | None:
        """What an output adds to its choice; None if that is nothing to tell a client."""

    @abstractmethod
    def chunk(self, choices: list[_Choice], usage: Usage | None = None) -> _Chunk:
        """An event of the stream."""

    @abstractmethod
    def response(self, outputs: Sequence[GenerationOutput]) -> _Response:
        """The answer to a request that does not stream, of whole outputs."""


async def stream_choices(
    llm: AsyncLLM,
    request: GenerationRequest,
    prepare: Callable[
        [], Awaitable[tuple[Sequence[EngineCoreRequest], ChoiceFormat[_Choice, _Chunk, _Response]]]
    ],
) -> AsyncGenerator[_Chunk, None]:
    """Generate, and yield a chunk for each delta; at the end one with the usage, if the request asks for it.

    Args:
        prepare: makes the prompts; called once the stream is read.
    """
    requests, choice_format = await prepare()
    n, options = request.n or 1, request.stream_options
    continuous = options is not None and options.continuous_usage_stats
    totals, finished = initial_totals(requests), _finished_choices(request)
    opening = choice_format.opening()
    async with aclosing(llm.generate(requests, n, finished)) as stream:
        async for outputs in stream:
            if opening is not None:
                # Not before the first token: until then an error has a status, and a router may still retry.
                yield opening
                opening = None
            for output in outputs:
                if output.index in finished:
                    choice = None
                elif choice_format.num_shown(output) <= MAX_INLINE_TOKENS:
                    choice = choice_format.delta(output)
                else:
                    choice = await asyncio.to_thread(choice_format.delta, output)
                update_total(totals[output.index], output)
                if choice is not None:
                    yield choice_format.chunk([choice], usage_of(totals, n) if continuous else None)
    if options is not None and options.include_usage:
        yield choice_format.chunk([], usage_of(totals, n))


async def whole_response(
    outputs: Sequence[GenerationOutput], choice_format: ChoiceFormat[_Choice, _Chunk, _Response]
) -> _Response:
    """Format whole outputs as the answer to a request that does not stream."""
    if sum(map(choice_format.num_shown, outputs)) <= MAX_INLINE_TOKENS:
        return choice_format.response(outputs)
    return await asyncio.to_thread(choice_format.response, outputs)


def created_at(request: GenerationRequest) -> int:
    """Unix time for an answer's chunks; a resumed stream keeps its own."""
    return int(time.time()) if request.resume is None else request.resume.created


def _finished_choices(request: GenerationRequest) -> frozenset[int]:
    """Choices of a resumed stream whose end its reader has seen."""
    if request.resume is None:
        return frozenset()
    return frozenset(index for index, choice in enumerate(request.resume.choices) if choice.finished)
