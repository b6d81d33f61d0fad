"""Streaming of choices as chunks, for chat completions and completions.

`stream_choices` runs the generation and decides when a chunk is sent; a beam search is sent once it has ended. A
`ChoiceFormat` per endpoint decides what it looks like. Neither knows HTTP, beyond the form of server-sent events.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from argosy_engine.api.id_comments import NO_TOKENS, token_id_comment
from argosy_engine.api.openai.event_template import encode_event
from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.openai.usage import initial_totals, update_total, usage_of
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_protocol.openai import GenerationRequest, Usage

MAX_INLINE_TOKENS = 256
"""Limit on tokens that are formatted on the event loop, in a few milliseconds. More are formatted in a thread, so that
other streams are not delayed."""

_Choice = TypeVar("_Choice")
_Chunk = TypeVar("_Chunk", bound=msgspec.Struct)
_Response = TypeVar("_Response")


class ChoiceFormat(ABC, Generic[_Choice, _Chunk, _Response]):
    """Format of one request's choices at an endpoint. Calls for one choice come in the order of its outputs."""

    def num_shown(self, output: GenerationOutput) -> int:
        """Count the tokens and log probabilities to format in an output; a log probability takes 20 us or more."""
        return len(output.token_ids) + len(output.logprobs) + len(output.prompt_logprobs or ())

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens of all choices so far; None at endpoints without reasoning."""
        return None

    @abstractmethod
    def opening(self, usage: Usage | None) -> _Chunk | None:
        """Return the chunk before the first delta; None if there is none."""

    @abstractmethod
    def delta(self, output: GenerationOutput) -> _Choice | None:
        """Format what an output adds to its choice; None if it adds nothing that clients see."""

    def deltas(self, output: GenerationOutput) -> Sequence[_Choice]:
        """Format what an output adds to its choice as the contents of as many events as it takes.

        The reason why a choice has ended comes without text, in an event after the text, as in OpenAI's API.
        """
        choice = self.delta(output)
        return () if choice is None else (choice,)

    def events(self, output: GenerationOutput) -> Sequence[bytes]:
        """Encode `deltas` as events, each with its end."""
        return [encode_event(self.chunk([choice])) for choice in self.deltas(output)]

    @abstractmethod
    def chunk(self, choices: list[_Choice], usage: Usage | None = None) -> _Chunk:
        """Make an event of the stream."""

    @abstractmethod
    def response(self, outputs: Sequence[GenerationOutput]) -> _Response:
        """Make the response to a request that does not stream, from complete outputs."""


class DirectWriter(Protocol):
    """Where a stream can write events without its reader's turn (`http.direct_body`)."""

    @property
    def is_ready(self) -> bool:
        """Whether events can be written now, after those that the reader has sent."""
        ...

    def write(self, piece: bytes) -> None: ...


class Prepared(NamedTuple, Generic[_Choice, _Chunk, _Response]):
    """A request that is ready to be computed."""

    prompts: Sequence[TokenizedPrompt]
    requests: Sequence[EngineCoreRequest]
    """One for each choice; none for a beam search."""
    choice_format: ChoiceFormat[_Choice, _Chunk, _Response]


async def stream_choices(
    serving: OpenAIServing,
    request: GenerationRequest,
    prepare: Callable[[], Awaitable[Prepared[_Choice, _Chunk, _Response]]],
    *,
    has_id_comments: bool = False,
    direct: DirectWriter | None = None,
) -> AsyncGenerator[bytes, None]:
    """Generate, and yield an event for each delta; at the end one with the usage, if the request asks for it.

    Events that are ready at the same time come as one piece. While the reader waits for the next piece, events go to
    `direct` instead, if that is ready.

    Args:
        prepare: makes the prompts; called once the stream is read.
        has_id_comments: put the token ids of every output into comments, which tell a router what clients need not see.
    """
    prompts, requests, choice_format = await prepare()
    n, options = request.n or 1, request.stream_options
    with_usage = options is not None and options.include_usage
    continuous = options is not None and with_usage and options.continuous_usage_stats
    finished = _finished_choices(request)
    totals: list[GenerationOutput] = []

    def usage() -> Usage:
        return usage_of(totals, n, choice_format.num_reasoning_tokens)

    def encoded(output: GenerationOutput) -> Sequence[bytes]:
        if not continuous:
            return choice_format.events(output)
        choices = choice_format.deltas(output)
        update_total(totals[output.index], output)
        return [encode_event(choice_format.chunk([choice], usage())) for choice in choices]

    def with_ids(output: GenerationOutput, events: Sequence[bytes]) -> Sequence[bytes]:
        """Return the lines of an output's events, and of its token ids if they are asked for."""
        update_total(totals[output.index], output)
        if not has_id_comments or output.index in finished:
            return events
        # Only after the last event with text does the client have all that the ids say. The end follows it.
        num_before = max(len(events) - (1 if output.finish_reason is None else 2), 0)
        lines: list[bytes] = []
        for number, event in enumerate(events or (b"\n",)):
            token_ids = output.token_ids if number == num_before else ()
            lines += (token_id_comment(output.index, token_ids), b"\n", event)
        return lines

    def write_directly(output: GenerationOutput) -> bool:
        if direct is None or not direct.is_ready or choice_format.num_shown(output) > MAX_INLINE_TOKENS:
            return False
        if piece := b"".join(with_ids(output, encoded(output))):
            direct.write(piece)
        return True

    if request.use_beam_search:
        found = await serving.generate(prompts, requests, request)
        totals += [_counts(output) for output in found]
        generated = _at_once(found)
    else:
        totals += initial_totals(requests)
        on_delta = None if direct is None else write_directly
        generated = serving.llm.generate(requests, n, finished, on_delta)
    opening = choice_format.opening(usage() if continuous else None)
    async with aclosing(generated) as stream:
        async for outputs in stream:
            pieces: list[bytes] = []
            if opening is not None:
                # Not before the first token: until then an error has a status, and a router may still retry.
                pieces += (NO_TOKENS, b"\n") if has_id_comments else ()
                pieces.append(encode_event(opening))
                opening = None
            for output in outputs:
                events: Sequence[bytes] = ()
                if output.index in finished:
                    pass
                elif choice_format.num_shown(output) <= MAX_INLINE_TOKENS:
                    events = encoded(output)
                else:
                    events = await asyncio.to_thread(encoded, output)
                pieces += with_ids(output, events)
            if pieces:
                yield b"".join(pieces)
    if with_usage:
        yield encode_event(choice_format.chunk([], usage()))


async def _at_once(outputs: list[GenerationOutput]) -> AsyncGenerator[list[GenerationOutput]]:
    yield outputs


def _counts(output: GenerationOutput) -> GenerationOutput:
    counts = GenerationOutput(output.index)
    update_total(counts, output)
    return counts


async def whole_response(
    outputs: Sequence[GenerationOutput], choice_format: ChoiceFormat[_Choice, _Chunk, _Response]
) -> _Response:
    """Format complete outputs as the response to a request that does not stream."""
    if sum(map(choice_format.num_shown, outputs)) <= MAX_INLINE_TOKENS:
        return choice_format.response(outputs)
    return await asyncio.to_thread(choice_format.response, outputs)


def is_sent(request: GenerationRequest, output: GenerationOutput) -> bool:
    """Whether a resumed stream's client has all of the choice but its end: the last tokens come with the text."""
    if request.resume is None:
        return False
    token_ids = request.resume.choices[output.index].token_ids
    return bool(token_ids) and output.num_output_tokens == len(token_ids)


def created_at(request: GenerationRequest) -> int:
    """Return the `created` time of a response, in Unix seconds; a resumed stream keeps its own."""
    return int(time.time()) if request.resume is None else request.resume.created


def _finished_choices(request: GenerationRequest) -> frozenset[int]:
    """Return the choices of a resumed stream whose end the client has seen."""
    if request.resume is None:
        return frozenset()
    return frozenset(index for index, choice in enumerate(request.resume.choices) if choice.finished)
