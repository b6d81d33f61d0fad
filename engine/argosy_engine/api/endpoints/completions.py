"""/v1/completions: requests become generations, and outputs choices, complete or as deltas."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import pairwise

from fastapi import FastAPI, Request
from msgspec.structs import replace

from argosy_engine.api.endpoints.choice_stream import (
    ChoiceFormat,
    DirectWriter,
    EventTemplate,
    LogprobsFormat,
    Prepared,
    TextOffsets,
    created_at,
    is_sent,
    stream_choices,
    usage_of,
    whole_response,
)
from argosy_engine.api.endpoints.exchange import (
    Endpoint,
    apply_flags,
    check_resume,
    context_of,
    json_answer,
    resumption_of,
    stream_answer,
)
from argosy_engine.api.http.http_responses import WatchedResponse, read_body
from argosy_engine.api.served_engine import Engine, OpenAIServing
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_http.bounded_protocol import client_connection
from argosy_protocol.openai import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
    decode_request,
)

MAX_ECHOED_VALUES = 4096
"""Tokens and log probabilities of an echoed prompt in one event of a stream, some 150 KB."""
MAX_ECHOED_CHARS = 256 * 1024
"""Characters of an echoed prompt without log probabilities in one event."""


class CompletionFormat(ChoiceFormat[CompletionChoice, Completion, Completion]):
    """
    Args:
        model: the name to answer with.
        resumed: for each choice, the output of the run that it continues.
        with_ids: every choice carries its `token_ids`, even if the client does not ask for them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: CompletionRequest,
        request_id: str,
        model: str,
        prompts: Sequence[TokenizedPrompt],
        resumed: Sequence[Sequence[int]],
        *,
        with_ids: bool = False,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._id = f"cmpl-{request_id}"
        self._model = model
        self._created = created_at(request)
        self._prompts = prompts
        self._given = request.prompts()
        self._n = request.n or 1
        self._with_ids = request.return_token_ids or with_ids
        self._format = LogprobsFormat(tokenizer, as_token_ids=bool(request.return_tokens_as_token_ids))
        self._unopened = {choice for choice, token_ids in enumerate(resumed) if not token_ids}
        """Choices without an output so far; the first one carries what belongs to the prompt."""
        self._prompt_logprobs: dict[int, list[TokenLogprobs] | None] = {}
        """Prompt log probabilities by each prompt's first choice, with whose first output they come."""
        self._templates: dict[int, EventTemplate] = {}
        self._offsets: dict[int, TextOffsets] = {}
        """One for each choice if the request asks for log probabilities."""
        if request.logprobs is not None:
            for choice, token_ids in enumerate(resumed):
                offsets = TextOffsets(tokenizer, skip_special_tokens=request.skip_special_tokens)
                echoed = self._prompt(choice).token_ids if request.echo and token_ids else ()
                for number, token_id in enumerate(echoed):
                    offsets.advance(token_id, is_echoed=number >= self._num_hidden(choice))
                for token_id in token_ids:
                    offsets.advance(token_id)
                self._offsets[choice] = offsets

    def num_shown(self, output: GenerationOutput) -> int:
        count = super().num_shown(output)
        if output.index in self._unopened and output.prompt_logprobs is None:
            count += len(self._prompt_logprobs.get(output.index // self._n * self._n) or ())
        return count

    def opening(self, usage: Usage | None) -> None:
        return None

    def delta(self, output: GenerationOutput) -> CompletionChoice | None:
        choice = self._choice(output)
        if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids is not None:
            return choice
        return None

    def deltas(self, output: GenerationOutput) -> Sequence[CompletionChoice]:
        is_echoed = self._request.echo and output.index in self._unopened
        choice = self.delta(output)
        if choice is None:
            return ()
        ends: Sequence[CompletionChoice] = ()
        if choice.finish_reason is not None and (choice.text or is_echoed):
            ends = (_end_of(choice),)
            if is_sent(self._request, output):
                return ends
            choice = replace(choice, finish_reason=None, stop_reason=None)
        if not is_echoed:
            return (choice, *ends)
        return (*_split_echo(choice, len(choice.text) - len(output.text), len(output.logprobs)), *ends)

    def events(self, output: GenerationOutput) -> Sequence[bytes]:
        is_plain = output.index not in self._unopened and output.finish_reason is None
        if is_plain and not (self._with_ids or self._request.is_scoring or self._offsets):
            return (self._template(output.index).event(output.text),) if output.text else ()
        return super().events(output)

    def _template(self, choice: int) -> EventTemplate:
        """Return the template of events that add text to a choice, and nothing else."""
        template = self._templates.get(choice)
        if template is None:
            empty = CompletionChoice(index=choice, text="")
            template = self._templates[choice] = EventTemplate(self.chunk([empty]), "text")
        return template

    def chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def response(self, outputs: Sequence[GenerationOutput]) -> Completion:
        choices = [self._choice(output) for output in outputs]
        return Completion(
            id=self._id,
            created=int(time.time()),
            model=self._model,
            choices=choices,
            usage=usage_of(outputs, self._n),
        )

    def _choice(self, output: GenerationOutput) -> CompletionChoice:
        request, prompt = self._request, self._prompt(output.index)
        is_first = output.index in self._unopened
        prompt_logprobs = None
        if is_first:
            self._unopened.discard(output.index)
            leader = output.index // self._n * self._n
            prompt_logprobs = self._prompt_logprobs.setdefault(leader, output.prompt_logprobs)
        if request.is_scoring:
            output.text, output.token_ids, output.logprobs = "", [], []
            output.num_output_tokens, output.finish_reason, output.stop_reason = 0, "length", None
        text = output.text
        if request.echo and is_first:
            shown = prompt.token_ids[self._num_hidden(output.index) :]
            text = self._tokenizer.decode(shown, skip_special_tokens=False) + text
        wants_prompt = is_first and request.prompt_logprobs is not None
        return CompletionChoice(
            index=output.index,
            text=text,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            logprobs=self._logprobs(output, prompt, prompt_logprobs, is_first),
            token_ids=output.token_ids if self._with_ids else None,
            prompt_token_ids=prompt.token_ids if is_first and request.return_token_ids else None,
            prompt_logprobs=self._format.prompt(prompt_logprobs or []) if wants_prompt else None,
        )

    def _logprobs(
        self,
        output: GenerationOutput,
        prompt: TokenizedPrompt,
        prompt_logprobs: list[TokenLogprobs] | None,
        is_first: bool,
    ) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        offsets = self._offsets[output.index]
        if self._request.echo and is_first:
            entries = [*(prompt_logprobs or []), *output.logprobs]
            return self._format.completion(
                entries,
                offsets,
                first_token_id=prompt.token_ids[0],
                num_echoed=len(prompt_logprobs or ()),
                is_first_shown=not self._num_hidden(output.index),
            )
        return self._format.completion(output.logprobs, offsets) if output.logprobs else None

    def _num_hidden(self, choice: int) -> int:
        """Return 1 if the prompt begins with a special token that the tokenizer, not the client, put there; else 0."""
        given, first = self._given[choice // self._n], self._prompt(choice).token_ids[0]
        is_added = isinstance(given, str) and first in self._tokenizer.special_ids
        return int(is_added and not str(given).startswith(self._tokenizer.token_text(first)))

    def _prompt(self, choice: int) -> TokenizedPrompt:
        return self._prompts[choice // self._n]


def _end_of(choice: CompletionChoice) -> CompletionChoice:
    """Return the end of a choice without its text."""
    token_ids: list[int] | None = None if choice.token_ids is None else []
    return replace(
        choice, text="", logprobs=None, token_ids=token_ids, prompt_token_ids=None, prompt_logprobs=None
    )


def _split_echo(choice: CompletionChoice, num_chars: int, num_generated: int) -> Sequence[CompletionChoice]:
    """Split the first output of a choice, so that no event holds the log probabilities, or the text, of a whole prompt.

    Only the last part has token ids, so that a stream that ends before it is known to lack a part of the echo.

    Args:
        num_chars: characters of the text that belong to the prompt.
        num_generated: entries of the log probabilities that do not belong to it.
    """
    text, logprobs = choice.text, choice.logprobs
    cuts: list[tuple[int, int]] = [(0, 0)]
    """Where each part begins: the character, and the entry of the log probabilities."""
    if logprobs is None:
        cuts += [(start, 0) for start in range(MAX_ECHOED_CHARS, num_chars, MAX_ECHOED_CHARS)]
    else:
        width = max(len(best or ()) for best in logprobs.top_logprobs[:2])
        step = max(1, MAX_ECHOED_VALUES // (1 + width))
        starts = range(step, len(logprobs.tokens) - num_generated, step)
        cuts += [(min(num_chars, logprobs.text_offset[start]), start) for start in starts]
    parts = [
        replace(
            choice,
            text=text[begin:end],
            logprobs=logprobs and _entries(logprobs, start, stop),
            finish_reason=None,
            stop_reason=None,
            token_ids=None if choice.token_ids is None else [],
            prompt_token_ids=choice.prompt_token_ids if begin == 0 else None,
        )
        for (begin, start), (end, stop) in pairwise(cuts)
    ]
    if not parts:
        return (choice,)
    begin, start = cuts[-1]
    rest = logprobs and _entries(logprobs, start, len(logprobs.tokens))
    return [*parts, replace(choice, text=text[begin:], logprobs=rest, prompt_token_ids=None)]


def _entries(logprobs: CompletionLogprobs, start: int, end: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=logprobs.tokens[start:end],
        token_logprobs=logprobs.token_logprobs[start:end],
        top_logprobs=logprobs.top_logprobs[start:end],
        text_offset=logprobs.text_offset[start:end],
    )


async def completion(
    serving: OpenAIServing, request: CompletionRequest, request_id: str, size: int
) -> Completion:
    """Answer a completion request with one response.

    Args:
        size: of the request's body, in bytes.
    """
    prompts, requests, completion_format = await _prepare(serving, request, request_id, size)
    outputs, n = await serving.generate(prompts, requests, request), request.n or 1
    for output in outputs:  # each prompt's log probabilities came with its first choice
        output.prompt_logprobs = outputs[output.index // n * n].prompt_logprobs
    return await whole_response(outputs, completion_format)


def completion_stream(
    serving: OpenAIServing,
    request: CompletionRequest,
    request_id: str,
    size: int,
    *,
    resumable: bool = False,
    has_id_comments: bool = False,
    direct: DirectWriter | None = None,
) -> AsyncGenerator[bytes, None]:
    """Answer a completion request with the events of a stream of chunks; arguments are those of `chat_stream`."""
    has_id_comments = has_id_comments and not request.return_token_ids
    with_ids = resumable and not has_id_comments
    prepare = partial(_prepare, serving, request, request_id, size, with_ids=with_ids)
    return stream_choices(serving, request, prepare, has_id_comments=has_id_comments, direct=direct)


async def _prepare(
    serving: OpenAIServing, request: CompletionRequest, request_id: str, size: int, *, with_ids: bool = False
) -> Prepared[CompletionChoice, Completion, Completion]:
    model, renderer = serving.check_model(request.model), serving.llm.renderer
    prompts, requests = await serving.prepare(
        lambda asked, _: renderer.render_completion(asked), request, size
    )
    resumed: list[Sequence[int]] = [core_request.resume_token_ids for core_request in requests]
    completion_format = CompletionFormat(
        renderer.tokenizer,
        request,
        request_id,
        model,
        prompts,
        resumed or [()] * (len(prompts) * (request.n or 1)),
        with_ids=with_ids,
    )
    return Prepared(prompts, requests, completion_format)


def add_completion_routes(app: FastAPI, engine: Engine) -> Endpoint:
    """Add the route to `app`, and return its endpoint."""

    @app.post("/v1/completions")
    async def completions(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_request("completions", raw)
        assert isinstance(body, CompletionRequest)
        check_resume(request, body)
        apply_flags(engine.options, body)
        context = context_of(engine, request, body)
        if body.stream:
            chunks = completion_stream(
                context.serving,
                body,
                context.response_id,
                len(raw),
                direct=client_connection(request.scope),
                **resumption_of(request),
            )
            return stream_answer(engine, chunks, context.request_id, body)
        answer = completion(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body, request)

    return completions
