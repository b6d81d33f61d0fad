"""/v1/responses: create, retrieve, delete, cancel, and list the input items of responses, stored or in background.

A response is a `ResponseJob` from its request to its end. Invariants: a response's id cannot be guessed, and only its
owner finds it. A background run's record is stored before it begins, when it begins to generate, and when it ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Literal

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from argosy_engine.api.endpoints.chat import ChatFormat
from argosy_engine.api.endpoints.choice_stream import formatted
from argosy_engine.api.endpoints.exchange import (
    accepted_answer,
    add_unseen_images,
    apply_flags,
    client_key,
    context_of,
    report_skipped,
    request_id_of,
    serving_of,
    translated_error,
)
from argosy_engine.api.endpoints.response_events import RawMessages, ResponseEvents
from argosy_engine.api.http.http_responses import RESPONSES_STREAM, event_stream, json_response, read_body
from argosy_engine.api.served_engine import Engine, OpenAIServing
from argosy_engine.frontend.input_processor import num_logprobs
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.messages import EngineCoreRequest
from argosy_protocol import headers
from argosy_protocol.errors import ApiError, BadRequest, PayloadTooLarge
from argosy_protocol.response_history import (
    DEFAULT_PAGE,
    MAX_PAGE,
    StoredResponse,
    identified_items,
    page_of_items,
    referenced_responses,
    resolved_items,
    response_not_found,
)
from argosy_protocol.responses import (
    ID_PREFIX,
    DeletedResponse,
    InputTokenCount,
    ResponseItem,
    ResponseObject,
    ResponsesRequest,
    begun_response,
    compaction_not_supported,
    decode_responses_request,
)
from argosy_protocol.responses_chat import (
    TranslatedResponse,
    input_items,
    name_responses_field,
    translated_response,
)

logger = logging.getLogger("argosy.api")

MAX_EVENT_BYTES = 128 << 20
"""About half a million events of a token each."""

MAX_RUNS = 4096
"""Runs whose events are kept, also of those that have ended."""


_ID_BYTES = 24

_MAX_NUMBER = 1 << 40

_TRUE = frozenset(("true", "True", "1"))

_FALSE = frozenset(("false", "False", "0", ""))


@dataclass(frozen=True)
class StoreLimits:
    ttl_s: float = 3600.0 * 24
    """Seconds after which a record is dropped."""
    max_records: int = 10_000
    max_bytes: int = 256 << 20
    """Of all records together; they stay in this process's memory."""
    max_records_of_owner: int = 2_500
    max_bytes_of_owner: int = 64 << 20
    """A quarter of all, so that no owner displaces all others."""


@dataclass
class _Kept:
    record: StoredResponse
    size: int
    expires: float


class ResponseStore:
    """Keeps responses for their owners in the memory of one engine, so that later requests can read and continue them.

    An owner is a client as far as the server can tell clients apart: its key, or the tenant that a router names.
    Whoever asks for another owner's response learns the same as about one that does not exist. Behind a router the
    router stores responses, where all routers find them.

    Invariant: neither an owner nor all of them together have more records or bytes than the bounds; the oldest ones go.

    Args:
        now: a monotonic clock.
    """

    def __init__(
        self, limits: StoreLimits | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or StoreLimits()
        self._now = now
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        """Oldest first."""
        self._by_owner: dict[str, OrderedDict[str, None]] = {}
        """Ids of each owner, oldest first."""
        self._num_bytes = 0
        self._bytes_of: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def check(self, size: int) -> None:
        """Check that a record of a size in bytes may be stored.

        Raises:
            PayloadTooLarge: it is larger than all records of one owner may be.
        """
        limit = self._limits.max_bytes_of_owner
        if size > limit:
            raise PayloadTooLarge(
                f"the conversation has {size} bytes; one that is stored may have {limit}; send store: false",
                param="store",
            )

    async def put(self, owner: str, response_id: str, record: StoredResponse) -> None:
        """Keep a record, in place of an earlier one of that id.

        Raises:
            PayloadTooLarge: it is larger than all records of one owner may be.
        """
        size, limits = record.size, self._limits
        self.check(size)
        self._drop(owner, response_id)
        self._drop_expired()
        self._kept[owner, response_id] = _Kept(record, size, self._now() + limits.ttl_s)
        ids = self._by_owner.setdefault(owner, OrderedDict())
        ids[response_id] = None
        self._num_bytes += size
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
        while len(ids) > limits.max_records_of_owner or self._bytes_of[owner] > limits.max_bytes_of_owner:
            self._drop(owner, next(iter(ids)))
        while len(self._kept) > limits.max_records or self._num_bytes > limits.max_bytes:
            self._drop(*next(iter(self._kept)))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a record; None if there is none, or it is another owner's."""
        self._drop_expired()
        kept = self._kept.get((owner, response_id))
        return None if kept is None else kept.record

    async def delete(self, owner: str, response_id: str) -> bool:
        """Drop a record. Returns whether there was one."""
        self._drop_expired()
        return self._drop(owner, response_id)

    def _drop_expired(self) -> None:
        now = self._now()
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.expires > now:
                return
            self._drop(*key)

    def _drop(self, owner: str, response_id: str) -> bool:
        kept = self._kept.pop((owner, response_id), None)
        if kept is None:
            return False
        self._num_bytes -= kept.size
        self._bytes_of[owner] -= kept.size
        ids = self._by_owner[owner]
        del ids[response_id]
        if not ids:
            del self._by_owner[owner], self._bytes_of[owner]
        return True


class ResponseJob:
    """One response.

    Args:
        requests: what the core is asked for: one sequence.
        events: formats its outputs.
        items: the conversation before it, encoded (`response_history`); empty if it is not stored.
    """

    def __init__(
        self,
        serving: OpenAIServing,
        requests: list[EngineCoreRequest],
        events: ResponseEvents,
        items: list[msgspec.Raw],
    ) -> None:
        self._llm = serving.llm
        self._requests = requests
        self._items = items
        self.events = events

    @classmethod
    async def prepare(
        cls,
        serving: OpenAIServing,
        request: ResponsesRequest,
        translated: TranslatedResponse,
        response_id: str,
        size: int,
        items: list[msgspec.Raw],
    ) -> ResponseJob:
        """Render the chat.

        Args:
            translated: what `request` stands for.
            response_id: also the ids of items and calls derive from it; clients expect 64 characters at most.
            size: of the request's body and of the conversation that it continues, in bytes.

        Raises:
            ApiError, EngineError: see `exchange.to_api_error`.
        """
        chat = translated.chat
        model = serving.check_model(chat.model)
        num_logprobs("top_logprobs", request.top_logprobs, serving.llm.config)  # even if none are asked for
        prompt, requests = await serving.prepare_bounded_chat(chat, size)
        renderer = serving.llm.renderer
        chat_format = ChatFormat(
            renderer,
            chat,
            response_id.removeprefix(ID_PREFIX),
            model,
            prompt,
            1,
            report_tools=serving.tool_report(chat, "responses", is_stream=request.stream),
        )
        params = requests[0].sampling_params
        begun = begun_response(
            request, response_id, model, int(time.time()), params.temperature, params.top_p
        )
        raw = None
        if request.enable_response_messages:
            raw = RawMessages(renderer.tokenizer)
            begun = msgspec.structs.replace(begun, input_messages=[raw.message(prompt.token_ids)])
        return cls(serving, requests, ResponseEvents(chat_format, begun, translated.tools, raw), items)

    @property
    def response(self) -> ResponseObject:
        return self.events.response

    def record(self) -> StoredResponse:
        """Return what is stored of the response as it is by now."""
        return StoredResponse(msgspec.Raw(msgspec.json.encode(self.response)), self._items)

    async def complete(self) -> ResponseObject:
        """Generate the response, and return it.

        Raises:
            EngineError: see `AsyncLLM.generate`.
        """
        if self._requests[0].sampling_params.logprobs is not None:  # which only deltas assign to texts
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    await self._formatted(output)
            return self.response
        (output,) = await self._llm.collect(self._requests)
        await self._formatted(output)
        return self.response

    async def stream(
        self, to_api_error: Callable[[Exception], ApiError]
    ) -> AsyncGenerator[Sequence[bytes], None]:
        """Generate the response, and yield its events, those of one output together.

        The first ones come with the first output: until then an error is raised, and has a status. Afterwards an error
        ends the response, and its last event tells of it.

        Args:
            to_api_error: translates errors for clients.
        """
        has_begun = False
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    if not has_begun:
                        has_begun = True
                        yield self.events.begin()
                    added = await self._formatted(output)
                    if added:
                        yield added
        except Exception as error:
            if not has_begun:
                raise
            if self.events.is_over:
                return
            failed = self.events.failed(to_api_error(error))
        else:
            return
        yield failed

    async def _outputs(self) -> AsyncGenerator[GenerationOutput, None]:
        async with aclosing(self._llm.generate(self._requests)) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    async def _formatted(self, output: GenerationOutput) -> list[bytes]:
        return await formatted(len(output.token_ids) + len(output.logprobs), self.events.of, output)


class _Run:
    """One run and its readers."""

    def __init__(self, job: ResponseJob, is_streamed: bool) -> None:
        self.job: ResponseJob | None = job
        """None when it is over: a job holds its conversation, and the events of a run are kept for long."""
        self.is_streamed = is_streamed
        self.events: list[bytes] = []
        self.num_bytes = 0
        self.is_over = False
        self.is_forgotten = False
        """Whether the events were dropped to make room."""
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake the readers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait until there are more events, or the run is over."""
        await self._changed.wait()

    def end(self) -> None:
        """Let the readers end with the events that there are."""
        self.job = self.task = None  # a cancelled task refers to its job as well
        self.is_over = True
        self.notify()

    def forget(self) -> None:
        self.events, self.num_bytes, self.is_forgotten = [], 0, True
        self.notify()


class BackgroundRuns:
    """Responses that are generated while no client waits for them, and the events that they have had.

    A client that streams a run may leave and read on later, from any event; leaving does not end the run, `cancel`
    does. The events of all runs take `MAX_EVENT_BYTES` at most; the longest ago begun lose theirs first.

    Args:
        accepted: counts a run as work of the server while it lasts.
        to_api_error: translates and logs errors.
    """

    def __init__(
        self,
        store: ResponseStore,
        accepted: Callable[[], AbstractContextManager[None]],
        to_api_error: Callable[[Exception], ApiError],
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        self.store = store
        self._accepted = accepted
        self._to_api_error = to_api_error
        self._max_event_bytes = max_event_bytes
        self._num_event_bytes = 0
        self._runs: OrderedDict[tuple[str, str], _Run] = OrderedDict()
        """Longest ago begun first."""

    async def start(self, owner: str, job: ResponseJob, *, is_streamed: bool) -> bytes:
        """Begin to generate a response, and return it, queued, as JSON."""
        run = _Run(job, is_streamed)
        record = job.record()
        await self.store.put(owner, job.response.id, record)
        key = (owner, job.response.id)
        self._runs[key] = run
        self._make_room()
        run.task = asyncio.create_task(self._work(key, run, job), name="background response")
        return bytes(record.response)

    async def cancel(self, owner: str, response_id: str) -> None:
        """End a run, if it has not ended, and store its response as cancelled."""
        run = self._runs.get((owner, response_id))
        if run is None or run.task is None or (job := run.job) is None:
            return
        run.task.cancel()
        await asyncio.wait([run.task])
        if not job.events.is_over:  # it did not end meanwhile
            job.events.cancelled()
            await self.keep(owner, job)
            run.end()

    def forget(self, owner: str, response_id: str) -> None:
        """Drop the events of a run."""
        run = self._runs.pop((owner, response_id), None)
        if run is not None:
            self._num_event_bytes -= run.num_bytes
            run.forget()

    def events(self, owner: str, response_id: str, starting_after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events of a run, past ones first, until it is over.

        Args:
            starting_after: number of the last event that the client has.

        Raises:
            BadRequest: the run was not asked to stream, or its events are not kept any more.
        """
        run = self._runs.get((owner, response_id))
        if run is None or not run.is_streamed or run.is_forgotten:
            raise BadRequest(
                "only a response that was created with background and stream can be streamed, while its events are "
                "kept; retrieve it without stream",
                param="stream",
            )
        return _follow(run, starting_after + 1)

    async def close(self) -> None:
        """End all runs."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, key: tuple[str, str], run: _Run, job: ResponseJob) -> None:
        try:
            with self._accepted():
                await (self._stream(key, run, job) if run.is_streamed else self._complete(key, job))
        except Exception as error:
            if not job.events.is_over:
                self._add(run, job.events.failed(self._to_api_error(error)))
        await self.keep(key[0], job)
        run.end()
        if not run.is_streamed:
            self._runs.pop(key, None)

    async def _complete(self, key: tuple[str, str], job: ResponseJob) -> None:
        job.events.begin()
        await self.keep(key[0], job)
        await job.complete()

    async def _stream(self, key: tuple[str, str], run: _Run, job: ResponseJob) -> None:
        is_stored = False
        async with aclosing(job.stream(self._to_api_error)) as stream:
            async for events in stream:
                if not is_stored or job.events.is_over:  # who reads the last event may continue at once
                    is_stored = True
                    await self.keep(key[0], job)
                self._add(run, events)

    async def keep(self, owner: str, job: ResponseJob) -> None:
        """Store a response as it is by now; one that has become too large is not."""
        try:
            await self.store.put(owner, job.response.id, job.record())
        except PayloadTooLarge as error:
            logger.warning("a response is not stored: %s", error.message)

    def _add(self, run: _Run, events: Sequence[bytes]) -> None:
        if not run.is_streamed or run.is_forgotten:
            return
        size = sum(map(len, events))
        run.events += events
        run.num_bytes += size
        self._num_event_bytes += size
        self._make_room()
        run.notify()

    def _make_room(self) -> None:
        """Forget the events of the runs begun longest ago; runs that go on lose only their events."""
        if self._has_room():
            return
        for key, run in list(self._runs.items()):
            self._num_event_bytes -= run.num_bytes
            run.forget()
            if run.is_over:
                del self._runs[key]
            if self._has_room():
                return

    def _has_room(self) -> bool:
        return self._num_event_bytes <= self._max_event_bytes and len(self._runs) <= MAX_RUNS


async def _follow(run: _Run, start: int) -> AsyncGenerator[bytes, None]:
    position = start
    while True:
        if run.is_forgotten:
            return
        while position < len(run.events):
            position += 1
            yield run.events[position - 1]
        if run.is_over or run.is_forgotten:
            return
        await run.wait()


def add_response_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`."""
    runs = BackgroundRuns(ResponseStore(), engine.accepted, translated_error)
    engine.on_close(runs.close)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        raw = await read_body(request)
        body = decode_responses_request(raw)
        return await _create(engine, runs, request, body, len(raw))

    @app.post("/v1/responses/input_tokens")
    async def counted_input_tokens(request: Request) -> Response:
        raw = await read_body(request)
        body = decode_responses_request(raw)
        return await _count(engine, runs.store, request, body, len(raw))

    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compacted_response() -> Response:
        raise compaction_not_supported()

    @app.get("/v1/responses/{name}")
    async def response(request: Request, name: str) -> Response:
        owner, query = owner_of(request), request.query_params
        record = await _stored(runs.store, owner, name)
        if _truth(query.get("stream"), "stream"):
            after = _number(query.get("starting_after"), "starting_after", -1, _MAX_NUMBER)
            events = runs.events(owner, name, after)
            return event_stream(events, {}, translated_error, RESPONSES_STREAM)
        return Response(bytes(record.response), media_type="application/json")

    @app.delete("/v1/responses/{name}")
    async def deleted_response(request: Request, name: str) -> Response:
        owner = owner_of(request)
        await _stored(runs.store, owner, name)
        await runs.cancel(owner, name)
        runs.forget(owner, name)
        await runs.store.delete(owner, name)
        return _json(DeletedResponse(id=name))

    @app.post("/v1/responses/{name}/cancel")
    async def cancelled_response(request: Request, name: str) -> Response:
        owner = owner_of(request)
        record = await _stored(runs.store, owner, name)
        if not record.state().background:
            raise BadRequest("Cannot cancel a synchronous response.", param="response_id")
        await runs.cancel(owner, name)
        record = await _stored(runs.store, owner, name)
        return Response(bytes(record.response), media_type="application/json")

    @app.get("/v1/responses/{name}/input_items")
    async def listed_items(request: Request, name: str) -> Response:
        query = request.query_params
        limit = _number(query.get("limit"), "limit", DEFAULT_PAGE, MAX_PAGE, minimum=1)
        order = _order(query.get("order", "desc"))
        record = await _stored(runs.store, owner_of(request), name)
        return _json(page_of_items(record, after=query.get("after"), limit=limit, order=order))


def owner_of(request: Request) -> str:
    """Return whose responses a request may read: its tenant's, if a router names one, else its key's."""
    tenant = request.headers.get(headers.TENANT)
    if tenant:
        return f"tenant {tenant}"
    key = client_key(request)
    return f"key {hashlib.sha256(key.encode()).hexdigest()}" if key else ""


async def _create(
    engine: Engine, runs: BackgroundRuns, request: Request, body: ResponsesRequest, size: int
) -> Response:
    owner = owner_of(request)
    is_resolved = headers.RESOLVED in request.headers
    conversation = input_items(body)
    if not is_resolved:
        conversation, num_bytes = await _conversation(runs.store, owner, body)
        size += num_bytes
    translation = translated_response(body, conversation)
    chat = translation.chat
    add_unseen_images(engine, translation.skipped, chat, "input_image")
    apply_flags(engine.options, chat)
    context = context_of(engine, request, chat)
    given_id = context.given_response_id if is_resolved else None
    response_id = ID_PREFIX + (given_id or secrets.token_hex(_ID_BYTES))
    is_stored = body.store and not is_resolved
    items = identified_items(conversation, response_id) if is_stored else []
    runs.store.check(sum(len(bytes(item)) for item in items))

    def named(error: ApiError) -> ApiError:
        return name_responses_field(error, body, translation.tools)

    def translated(error: Exception) -> ApiError:
        return named(translated_error(error))

    async def prepared() -> ResponseJob:
        return await ResponseJob.prepare(context.serving, body, translation, response_id, size, items)

    async def answer() -> ResponseObject:
        job = await prepared()
        await job.complete()
        if is_stored:
            await runs.keep(owner, job)
        return job.response

    async def events() -> AsyncGenerator[bytes, None]:
        with engine.accepted():
            job = await prepared()
            async with aclosing(job.stream(translated)) as stream:
                async for added in stream:
                    if is_stored and job.events.is_over:  # who reads the last event may continue at once
                        await runs.keep(owner, job)
                    yield b"".join(added)

    async def background() -> Response:
        try:
            with engine.accepted():
                job = await prepared()
                queued = await runs.start(owner, job, is_streamed=body.stream)
        except Exception as error:
            raise translated(error) from error
        if body.stream:
            return event_stream(runs.events(owner, response_id), lines, translated, RESPONSES_STREAM)
        return Response(queued, 200, lines, "application/json")

    lines = {
        headers.REQUEST_ID: context.request_id,
        **report_skipped(engine, "responses", translation.skipped),
    }
    if body.background and not is_resolved:  # a router waits itself
        return await background()
    if body.stream:
        return event_stream(events(), lines, translated, RESPONSES_STREAM)
    return json_response(accepted_answer(engine, answer(), named), lines)


async def _count(
    engine: Engine, store: ResponseStore, request: Request, body: ResponsesRequest, size: int
) -> Response:
    """Count the tokens of the prompt that a response would be generated from."""
    conversation = input_items(body)
    if headers.RESOLVED not in request.headers:
        conversation, num_bytes = await _conversation(store, owner_of(request), body)
        size += num_bytes
    translation = translated_response(body, conversation)
    chat = translation.chat
    add_unseen_images(engine, translation.skipped, chat, "input_image")
    apply_flags(engine.options, chat)
    serving = serving_of(engine, request)

    def named(error: ApiError) -> ApiError:
        return name_responses_field(error, body, translation.tools)

    async def answer() -> InputTokenCount:
        return InputTokenCount(input_tokens=await serving.count_tokens(chat, size))

    lines = {
        headers.REQUEST_ID: request_id_of(request, None),
        **report_skipped(engine, "responses", translation.skipped),
    }
    return json_response(accepted_answer(engine, answer(), named), lines)


async def _conversation(
    store: ResponseStore, owner: str, body: ResponsesRequest
) -> tuple[list[ResponseItem], int]:
    """Return the whole conversation, and how many bytes of it were stored."""
    found: dict[str, StoredResponse] = {}
    for response_id in referenced_responses(body):
        record = await store.get(owner, response_id)
        if record is not None:
            found[response_id] = record
    return resolved_items(body, found), sum(record.size for record in found.values())


async def _stored(store: ResponseStore, owner: str, response_id: str) -> StoredResponse:
    record = await store.get(owner, response_id)
    if record is None:
        raise response_not_found(response_id)
    return record


def _truth(value: str | None, name: str) -> bool:
    if value is None or value in _FALSE:
        return False
    if value not in _TRUE:
        raise BadRequest(f"{name} must be true or false", param=name)
    return True


def _number(value: str | None, name: str, default: int, maximum: int, *, minimum: int = 0) -> int:
    if value is None:
        return default
    is_number = value.isascii() and value.isdigit() and len(value) <= len(str(maximum))
    if not is_number or not minimum <= int(value) <= maximum:
        raise BadRequest(
            f"{name} must be a number from {minimum} to {maximum}, not {value[:64]!r}", param=name
        )
    return int(value)


def _order(value: str) -> Literal["asc", "desc"]:
    if value == "asc":
        return "asc"
    if value == "desc":
        return "desc"
    raise BadRequest("order must be asc or desc", param="order")


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
