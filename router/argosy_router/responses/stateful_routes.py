"""The routes below /v1/responses of a router that stores responses.

Owns: which stored responses a request needs, paths and methods, the tasks that answer.
Must not know: how a request is routed, how the storage works.
Invariant: each request is answered once, unless its client has disconnected.

What answers a request writes through up to two wrappers of its client:

    `Answer` -> `StoringClient`, if the response is stored -> `_EndingClient`, if it continues others -> connection
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal
from urllib.parse import parse_qsl

import msgspec

from argosy_protocol.batch_program import PIECE_BYTES, pieces
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    InternalError,
    PayloadTooLarge,
    Unavailable,
)
from argosy_protocol.json_limits import Steps
from argosy_protocol.program.process import OwnerSlots, in_turns
from argosy_protocol.response_history import (
    DEFAULT_PAGE,
    MAX_PAGE,
    STEP_BYTES,
    StoredResponse,
    identifying,
    paging_items,
    referenced_responses,
    resolved_items,
    resolving,
    response_not_found,
)
from argosy_protocol.responses import (
    DeletedResponse,
    ResponseItem,
    ResponsesRequest,
    begun_response,
    decode_responses_request,
    decoding_responses_request,
    with_status,
)
from argosy_protocol.responses_chat import responses_as_chat
from argosy_router.batch import PendingAnswer, Refuse
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.http.messages import Client, ClientListener, Request
from argosy_router.proxy.answer import id_headers
from argosy_router.proxy.call import account_of, no_route, require_json, require_method
from argosy_router.proxy.ended_response import Find
from argosy_router.proxy.request_body import takes_long, with_fields
from argosy_router.responses.background_responses import BackgroundResponses
from argosy_router.responses.response_store import ResponseStore, StoringClient

log = logging.getLogger(__name__)


MAX_PENDING: Final = 4096
"""Requests that wait for the storage at a time. Owners share them (`OwnerSlots`)."""
_TRUE: Final = frozenset(("true", "True", "1"))
_JSON: Final = b"content-type: application/json\r\n"
_COUNT: Final = b"/v1/responses/input_tokens"
_PATH: Final = re.compile(rb"/v1/responses(?:/([^/]{1,256})(?:/(cancel|input_items))?)?")

Send = Callable[[Client, Request, bytes], None]
"""Routes a request: its client, itself, and the id of its response."""


class _EndingClient:
    """Wraps a client, and calls `on_end` once, when the request has been answered or its client has disconnected. A
    `Client`, and the `ClientListener` of the one it wraps."""

    def __init__(self, client: Client, on_end: Callable[[], None]) -> None:
        self._client = client
        self._on_end: Callable[[], None] | None = on_end
        self._listener: ClientListener | None = None

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    # called by what answers

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener
        self._client.attach(self)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self._end()
        self._client.respond(status, headers, body)

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self._client.start(status, headers, first)

    def send(self, data: bytes) -> None:
        self._client.send(data)

    def finish(self) -> None:
        self._end()
        self._client.finish()

    def abort(self) -> None:
        self._end()
        self._client.abort()

    # called by the client

    def on_client_lost(self) -> None:
        self._end()
        if self._listener is not None:
            self._listener.on_client_lost()

    def on_client_paused(self) -> None:
        if self._listener is not None:
            self._listener.on_client_paused()

    def on_client_resumed(self) -> None:
        if self._listener is not None:
            self._listener.on_client_resumed()


class StatefulRoutes:
    """Answers requests of the main port for responses."""

    def __init__(
        self,
        stored: ResponseStore,
        background: BackgroundResponses,
        send: Send,
        refuse: Refuse,
        max_conversation_bytes: int,
        memory: BodyMemory,
        find: Find,
    ) -> None:
        """
        Args:
            memory: of request bodies; what is loaded for a request counts in it, from before it is read until the
                request has ended, or is answered with it.
            find: finds the response in an answer.
            max_conversation_bytes: bounds what a request refers to, and the conversation that this makes.
        """
        self._stored = stored
        self._background = background
        self._send = send
        self._refuse = refuse
        self._max_conversation_bytes = max_conversation_bytes
        self._memory = memory
        self._find_response = find
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = OwnerSlots(MAX_PENDING)

    def on_head(self, request: Request) -> bool:
        """Whether the body of a request will be used, by its head."""
        return request.method == b"POST" and _PATH.fullmatch(request.path) is not None

    def on_request(self, client: Client, request: Request) -> None:
        """Answer now or later.

        Raises:
            ApiError: the request is refused.
        """
        path = _PATH.fullmatch(request.path)
        if path is None:
            raise no_route(request)
        response_id = (path[1] or b"").decode("latin-1")
        is_count = request.path == _COUNT and request.method == b"POST"
        if response_id and not is_count:
            self._later(
                client, request, lambda answer: self._respond(client, request, answer, response_id, path[2])
            )
            return
        require_method(request, b"POST")
        require_json(request)
        if takes_long(request.body):
            self._later(client, request, lambda _: self._read(client, request, is_count=is_count))
            return
        asked = decode_responses_request(request.body)
        if is_count:
            asked = _counted(asked)
        if not (asked.background or referenced_responses(asked)):
            self._create(client, request, asked, resolved_items(asked, {}))
            return
        self._later(client, request, lambda _: self._resolve(client, request, asked))

    async def close(self) -> None:
        """Cancel what has not been answered, and end what is generated in the background."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._background.close()
        await self._stored.close()

    def _later(
        self, client: Client, request: Request, work: Callable[[PendingAnswer], Coroutine[Any, Any, None]]
    ) -> None:
        """Answer in a task, which ends with the client's connection."""
        owner = account_of(request).name
        if not self._slots.take(owner):
            raise Unavailable("too many requests wait for the router's storage; retry", retry_after_s=1.0)
        answer = PendingAnswer(client)

        async def run() -> None:
            try:
                await work(answer)
            except ApiError as error:
                self._refuse(client, request, error)
            except Exception:
                log.exception("request %s failed", request.id.decode())
                self._refuse(client, request, InternalError("internal error"))

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._slots.release(owner)

        task = asyncio.create_task(run(), name="responses")
        answer.on_lost = task.cancel
        self._tasks.add(task)
        task.add_done_callback(on_done)

    # creation

    def _create(
        self, client: Client, request: Request, asked: ResponsesRequest, conversation: list[ResponseItem]
    ) -> None:
        """Route a request whose input is the whole conversation."""
        response_id = self._stored.new_id()
        if asked.store:
            owner = account_of(request).name

            async def store(response: msgspec.Raw) -> None:
                items = await in_turns(identifying(conversation, response_id))
                record = StoredResponse(response, items)
                await self._stored.keep(owner, response_id, record)

            client = StoringClient(
                client,
                response_id,
                store,
                BodyReservation(self._memory, request.account, request.body_bytes),
                self._stored.count_unstored,
                self._find_response,
                owner,
            )
        self._send(client, request, response_id.encode())

    async def _read(self, client: Client, request: Request, *, is_count: bool) -> None:
        """Read a large body in steps, and answer as its request asks."""
        asked = await in_turns(decoding_responses_request(request.body))
        await self._resolve(client, request, _counted(asked) if is_count else asked)

    async def _resolve(self, client: Client, request: Request, asked: ResponsesRequest) -> None:
        """Put the conversation into a request's input, and route it."""
        reserved = BodyReservation(self._memory, request.account, request.body_bytes)
        try:
            found = await self._found(account_of(request).name, asked, reserved)
            conversation = await in_turns(resolving(asked, found))
            if found:
                request.body = with_fields(
                    request.body, {"input": await in_turns(self._encoding(conversation, reserved))}
                )
            if asked.background:
                # The client is answered at once, and then what is reserved for the body as received is released.
                reserved.grow(request.body_bytes)
                await self._begin(client, request, asked, conversation, reserved)
            else:
                client = _EndingClient(client, reserved.release)
                self._create(client, request, asked, conversation)
        except BaseException:
            reserved.release()
            raise

    async def _found(
        self, owner: str, asked: ResponsesRequest, reserved: BodyReservation
    ) -> dict[str, StoredResponse]:
        """Return those of the responses that a request refers to that exist, by id."""
        found: dict[str, StoredResponse] = {}
        size = 0
        for response_id in referenced_responses(asked):
            record = await self._stored.find(owner, response_id, reserved.grow, has_output=True)
            if record is not None:
                size += record.size
                self._bound(size)
                found[response_id] = record
        return found

    def _encoding(self, conversation: list[ResponseItem], reserved: BodyReservation) -> Steps[msgspec.Raw]:
        """Encode a conversation item by item: many items may refer to one large one."""
        encoded: list[bytes] = []
        size = step = 0
        for item in conversation:
            encoded.append(msgspec.json.encode(item))
            size += len(encoded[-1]) + 1
            self._bound(size)
            reserved.grow(len(encoded[-1]))
            step += len(encoded[-1])
            if step >= STEP_BYTES:
                step = 0
                yield
        return msgspec.Raw(b"[%b]" % b",".join(encoded))

    def _bound(self, size: int) -> None:
        if size > self._max_conversation_bytes:
            raise PayloadTooLarge(
                f"the conversation that the request continues or refers to exceeds the limit of "
                f"{self._max_conversation_bytes} bytes; begin a new one with what is needed of it"
            )

    async def _begin(
        self,
        client: Client,
        request: Request,
        asked: ResponsesRequest,
        conversation: list[ResponseItem],
        reserved: BodyReservation,
    ) -> None:
        """Generate a response in the background."""
        owner, response_id = account_of(request).name, self._stored.new_id()
        if not takes_long(request.body):
            responses_as_chat(asked, conversation)  # its client is told of errors while it waits
        queued = msgspec.json.encode(
            begun_response(asked, response_id, asked.model, int(time.time()), asked.temperature, asked.top_p)
        )
        items = await in_turns(identifying(conversation, response_id))
        record = StoredResponse(msgspec.Raw(queued), items)

        def send(run: Client) -> None:
            self._send(run, request, response_id.encode())

        await self._background.start(owner, response_id, record, asked.stream, reserved, send)
        ids = id_headers(request.id, request.path)
        if asked.stream:
            self._background.follow(client, owner, response_id, 0, ids)
        else:
            client.respond(200, _JSON + ids, queued)

    # stored responses

    async def _respond(
        self,
        client: Client,
        request: Request,
        pending: PendingAnswer,
        response_id: str,
        action: bytes | None,
    ) -> None:
        owner, ids = account_of(request).name, id_headers(request.id, request.path)
        reserved = BodyReservation(self._memory, request.account, request.body_bytes)
        try:
            query = _query(request)
            if action is None and request.method == b"GET" and query.get("stream") in _TRUE:
                await self._find(owner, response_id, reserved)
                position = _position(query.get("starting_after"))
                self._background.follow(client, owner, response_id, position, ids)
            else:
                answer = await self._answer(owner, response_id, action, request, reserved)
                if len(answer) <= PIECE_BYTES:
                    client.respond(200, _JSON + ids, answer)
                else:  # returns once what is left is in the connection's own buffer
                    await pending.stream(_JSON + ids, pieces(answer))
        finally:
            reserved.release()

    async def _answer(
        self, owner: str, response_id: str, action: bytes | None, request: Request, reserved: BodyReservation
    ) -> bytes:
        if action == b"cancel":
            require_method(request, b"POST")
            return await self._cancel(owner, response_id, reserved)
        if action == b"input_items":
            require_method(request, b"GET")
            return await self._list(owner, response_id, _query(request), reserved)
        if require_method(request, b"GET", b"DELETE") == b"GET":
            return bytes((await self._find(owner, response_id, reserved)).response)
        if not await self._stored.remove(owner, response_id):
            raise response_not_found(response_id)
        self._background.end(owner, response_id)
        return msgspec.json.encode(DeletedResponse(id=response_id))

    async def _find(self, owner: str, response_id: str, reserved: BodyReservation) -> StoredResponse:
        record = await self._stored.find(owner, response_id, reserved.grow)
        if record is None:
            raise response_not_found(response_id)
        return record

    async def _cancel(self, owner: str, response_id: str, reserved: BodyReservation) -> bytes:
        record = await self._find(owner, response_id, reserved)
        state = record.state()
        if not state.background:
            raise BadRequest("Cannot cancel a synchronous response.", param="response_id")
        response = bytes(record.response)
        if state.is_finished:
            if state.status == "cancelled":
                self._background.end(owner, response_id)
            return response
        found = await self._find_response(owner, response, False, {"status": b'"cancelled"'})
        cancelled = msgspec.Raw(found.own or with_status(response, "cancelled"))
        now = await self._stored.finish(owner, response_id, StoredResponse(cancelled, record.items))
        if now is None:
            raise response_not_found(response_id)
        if now.state().status == "cancelled":
            self._background.end(owner, response_id)
        return bytes(now.response)

    async def _list(
        self, owner: str, response_id: str, query: dict[str, str], reserved: BodyReservation
    ) -> bytes:
        given, order = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc")
        limit = int(given) if given.isascii() and given.isdigit() and len(given) < 4 else 0
        if not 1 <= limit <= MAX_PAGE:
            raise BadRequest(f"limit must be a number from 1 to {MAX_PAGE}", param="limit")
        if order not in ("asc", "desc"):
            raise BadRequest("order must be asc or desc", param="order")
        direction: Literal["asc", "desc"] = "asc" if order == "asc" else "desc"
        record = await self._find(owner, response_id, reserved)
        paging = paging_items(record, after=query.get("after"), limit=limit, order=direction)
        return msgspec.json.encode(await in_turns(paging))


def _counted(asked: ResponsesRequest) -> ResponsesRequest:
    """A request whose tokens are to be counted: nothing of it is stored."""
    return msgspec.structs.replace(asked, background=False, store=False)


def _position(starting_after: str | None) -> int:
    """Return the number of the first event to send."""
    if starting_after is None:
        return 0
    if not (starting_after.isascii() and starting_after.isdigit() and len(starting_after) <= 12):
        raise BadRequest("starting_after must be the number of an event", param="starting_after")
    return int(starting_after) + 1


def _query(request: Request) -> dict[str, str]:
    text = request.target.partition(b"?")[2].decode("latin-1")
    return dict(parse_qsl(text, max_num_fields=32)) if text.count("&") < 32 else {}
