"""Streaming of choices as chunks, for chat completions and completions, and what the forms of both have in common.

`stream_choices` runs the generation and decides when a chunk is sent; a beam search is sent once it has ended. A
`ChoiceFormat` per endpoint decides what it looks like. Neither knows HTTP, beyond the form of server-sent events.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from argosy_engine.api.served_engine import OpenAIServing
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_protocol.headers import ID_COMMENT
from argosy_protocol.openai import (
    ChatLogprobs,
    CompletionLogprobs,
    CompletionTokensDetails,
    GenerationRequest,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)

MAX_INLINE_TOKENS = 256
"""Limit on tokens that are formatted on the event loop, in a few milliseconds. More are formatted in a thread, so that
other streams are not delayed."""

NO_TOKENS = ID_COMMENT
"""Comment of an event that adds no tokens to any choice."""


_ENCODER = msgspec.json.Encoder()


_FLOOR = -9999.0
"""Replaces minus infinity, which JSON does not have; vLLM's value."""

_Choice = TypeVar("_Choice")

_Chunk = TypeVar("_Chunk", bound=msgspec.Struct)

_Response = TypeVar("_Response")
_Given = TypeVar("_Given")


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
    """Where a stream can write events without its reader's turn (`bounded_protocol.ClientConnection`)."""

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


def _finished_choices(request: GenerationRequest) -> frozenset[int]:
    """Return the choices of a resumed stream whose end the client has seen."""
    if request.resume is None:
        return frozenset()
    return frozenset(index for index, choice in enumerate(request.resume.choices) if choice.finished)


async def whole_response(
    outputs: Sequence[GenerationOutput], choice_format: ChoiceFormat[_Choice, _Chunk, _Response]
) -> _Response:
    """Format complete outputs as the response to a request that does not stream."""
    return await formatted(sum(map(choice_format.num_shown, outputs)), choice_format.response, outputs)


async def formatted(num_shown: int, form: Callable[[_Given], _Response], given: _Given) -> _Response:
    """Return `form(given)`, made in a thread if it shows many tokens and log probabilities."""
    return form(given) if num_shown <= MAX_INLINE_TOKENS else await asyncio.to_thread(form, given)


def is_sent(request: GenerationRequest, output: GenerationOutput) -> bool:
    """Whether a resumed stream's client has all of the choice but its end: the last tokens come with the text."""
    if request.resume is None:
        return False
    token_ids = request.resume.choices[output.index].token_ids
    return bool(token_ids) and output.num_output_tokens == len(token_ids)


def created_at(request: GenerationRequest) -> int:
    """Return the `created` time of a response, in Unix seconds; a resumed stream keeps its own."""
    return int(time.time()) if request.resume is None else request.resume.created


def token_id_comment(index: int, token_ids: Sequence[int]) -> bytes:
    """Return the comment of an event that adds `token_ids` to the choice `index`, a line without its end."""
    if len(token_ids) == 1:
        return b"%b%d %d" % (ID_COMMENT, index, token_ids[0])
    return b"%b%d %b" % (ID_COMMENT, index, b",".join(b"%d" % token_id for token_id in token_ids))


class EventTemplate:
    """The bytes of the events of one stream that differ in one text, encoded once.

    Almost every event of a stream adds a piece of text to one choice, and all of its other fields are those of the
    event before. So an event costs the encoding of one string.

    Args:
        chunk: an event in which the field `name`, and no other of this name, has an empty text.
    """

    def __init__(self, chunk: msgspec.Struct, name: str) -> None:
        field = b'"%b":' % name.encode()
        # No string can contain this, since quotes within strings are escaped.
        head, _, tail = encode_event(chunk).partition(field + b'""')
        self._head = head + field
        self._tail = tail

    def event(self, text: str) -> bytes:
        """Return the event, with its end, that has this text."""
        return b"%b%b%b" % (self._head, _ENCODER.encode(text), self._tail)


def encode_event(chunk: msgspec.Struct) -> bytes:
    """Return a server-sent event, with its end."""
    return b"data: %b\n\n" % _ENCODER.encode(chunk)


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
