"""A proxy between the operator and the API server that notes every write, and misbehaves on request.

Owns the faults of a connection: cut, refused, silent, unavailable; watches that end, expire or lose deletions; lists
from an earlier moment. Must not know what the operator is expected to do. The operator speaks to it without TLS; its
token goes through, so that its rights are those of the chart.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import aiohttp
from aiohttp import web

Mode = Literal["open", "refused", "silent", "unavailable"]
_HOP_BY_HOP: Final = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
_GONE: Final = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "reason": "Expired",
    "message": "too old resource version",
    "code": 410,
}


@dataclass(frozen=True)
class Write:
    """One write, after the API server has answered it."""

    method: str
    path: str
    status: int

    @property
    def is_lease(self) -> bool:
        return "/leases/" in self.path or self.path.endswith("/leases")

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.status}"


class FaultyProxy:
    """Its faults are attributes that may be set at any time."""

    def __init__(self, upstream: str, context: ssl.SSLContext | None) -> None:
        self._upstream = upstream
        self._context = context
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.mode: Mode = "open"
        self.on_write: Callable[[Write], None] | None = None
        """Called between the API server's answer to a write and its way to the operator."""
        self.expired_watches = 0
        """Watches that are still to be answered with 410."""
        self.lose_deletions = False
        """Leave DELETED out of watches."""
        self.stale: dict[str, bytes] | None = None
        """Answers to lists to give instead of the API server's, by path; watches are silent then."""
        self.writes: list[Write] = []
        self.failed = 0
        """Requests that were made to fail."""
        self.cut = 0
        self.expired = 0
        self.lost = 0
        self.stale_answers = 0
        self._lists: dict[str, bytes] = {}
        self._watches: dict[int, web.Request] = {}

    async def start(self, port: int) -> None:
        connector = aiohttp.TCPConnector(ssl=self._context or True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    @property
    def watches(self) -> int:
        """Watches that are open now."""
        return len(self._watches)

    @property
    def changes(self) -> int:
        """Writes so far, renewals of the lease left out."""
        return sum(not write.is_lease for write in self.writes)

    def cut_watches(self) -> int:
        """Cut every open watch; returns how many there were."""
        count = 0
        for request in list(self._watches.values()):
            if request.transport is not None:
                request.transport.abort()
                count += 1
        self.cut += count
        return count

    def remember_lists(self) -> dict[str, bytes]:
        """The last answer to every list so far, for `stale`."""
        return dict(self._lists)

    def heal(self) -> None:
        """End every fault."""
        self.mode = "open"
        self.on_write = None
        self.expired_watches = 0
        self.lose_deletions = False
        self.stale = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        await self._fail_if_told(request)
        is_watch = request.query.get("watch") in ("1", "true", "True")
        is_list = request.method == "GET" and not is_watch
        if is_watch and self.expired_watches > 0:
            self.expired_watches -= 1
            self.expired += 1
            return web.json_response(_GONE, status=410)
        if self.stale is not None and is_list and request.path in self.stale:
            self.stale_answers += 1
            return web.Response(body=self.stale[request.path], content_type="application/json")
        if is_watch and self.stale is not None:
            return await self._silent_watch(request)
        body = await request.read()
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP_BY_HOP}
        headers["Accept-Encoding"] = "identity"
        assert self._session
        try:
            async with self._session.request(
                request.method,
                f"{self._upstream}{request.rel_url}",
                data=body or None,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None if is_watch else 60),
            ) as answer:
                if is_watch:
                    return await self._relay_watch(request, answer)
                content = await answer.read()
                status, kind = answer.status, answer.content_type
        except (aiohttp.ClientError, TimeoutError, OSError) as error:  # the API server is away
            self._abort(request)
            raise web.HTTPBadGateway from error
        if is_list and status == 200 and "continue" not in request.query:
            self._lists[request.path] = content
        if request.method not in ("GET", "HEAD") and "dryRun" not in request.query:
            write = Write(request.method, request.path, status)
            self.writes.append(write)
            if self.on_write is not None:
                self.on_write(write)
        return web.Response(body=content, status=status, content_type=kind)

    async def _fail_if_told(self, request: web.Request) -> None:
        if self.mode == "open":
            return
        self.failed += 1
        if self.mode == "unavailable":
            raise web.HTTPServiceUnavailable(text=json.dumps({"kind": "Status", "code": 503}))
        if self.mode == "silent":
            while self.mode == "silent":  # until the client gives up, or the fault ends
                await asyncio.sleep(0.1)
                if request.transport is None or request.transport.is_closing():
                    break
        self._abort(request)
        raise web.HTTPBadGateway

    def _abort(self, request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()

    async def _silent_watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._watches[id(request)] = request
        try:
            while self.stale is not None and request.transport and not request.transport.is_closing():
                await asyncio.sleep(0.1)
        finally:
            self._watches.pop(id(request), None)
        return response

    async def _relay_watch(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        await response.prepare(request)
        self._watches[id(request)] = request
        rest = b""
        try:
            async for chunk in answer.content.iter_any():
                if self.mode != "open":
                    self._abort(request)
                    break
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                for line in lines:
                    if self.lose_deletions and line.startswith(b'{"type":"DELETED"'):
                        self.lost += 1
                        continue
                    await response.write(line + b"\n")
        except (ConnectionError, aiohttp.ClientError):
            self._abort(request)
        finally:
            self._watches.pop(id(request), None)
        return response
