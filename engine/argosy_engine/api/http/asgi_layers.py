"""The ASGI layers around the application, each a class: keys, browsers' origins, ids, bodies, paths, the user's own.

`AuthMiddleware` denies by default: if the engine has keys, every path but `PUBLIC_PATHS` needs one, also a path that no
route has. Paths are compared as the parser returned them, never rebuilt from headers (CVE-2026-48710). `FollowedKeys`
are the accepted keys of which some are in a file that may change while the engine serves. In which order a request
passes the layers: `api.app.add_http_layers`.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy_engine.api.http.http_responses import send_error
from argosy_engine.errors import ConfigError
from argosy_engine.fair_shares import TenantShares
from argosy_http.bounded_protocol import without_client_connection
from argosy_protocol import headers
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    InternalError,
    PayloadTooLarge,
    ResourceUnavailable,
    Unauthorized,
)
from argosy_protocol.headers import KeyRing
from argosy_protocol.telemetry import HOT_PREFIXES_PATH

logger = logging.getLogger("argosy.api")

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/metrics"})
ADMIN_PATHS = frozenset(
    {"/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/server_info", HOT_PREFIXES_PATH}
)
"""vLLM's names, which vLLM has only with VLLM_SERVER_DEV_MODE, and the prefixes of all clients' prompts."""


class AuthMiddleware:
    """Rejects requests without a valid API key before they reach a route.

    `ADMIN_PATHS` change the engine for all clients, or tell how it is set up. They need an admin key, or, if there is
    none, one of the engine's keys (in a cluster only routers have it); an engine without any key rejects them. A key
    may come as `x-api-key`, as Anthropic's clients send it, which counts if there is no `Authorization`.

    Args:
        keys: keys for all paths but `PUBLIC_PATHS`; if there are none, no key is needed.
        guard_metrics: whether /metrics needs a key, too.
        admin_keys: keys for `ADMIN_PATHS`; `keys` if there are none.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, guard_metrics: bool = False, admin_keys: KeyRing | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys or keys
        self._public = PUBLIC_PATHS - {"/metrics"} if guard_metrics else PUBLIC_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check_key(scope)
            except ApiError as error:
                await send_error(send, error, scope["path"])
                return
        await self._app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        """Check a request's key.

        Raises:
            Forbidden: the path is administrative, and the engine has no key.
            Unauthorized: the key is missing or wrong.
        """
        is_admin = scope["path"] in ADMIN_PATHS
        keys = self._admin_keys if is_admin else self._keys
        if is_admin and not keys:
            raise Forbidden(f"{scope['path']} is closed: start the engine with --admin-api-key or --api-key")
        if keys and scope["path"] not in self._public:
            headers = Headers(scope=scope)
            given = headers.get("authorization")  # the first one, as a router reads it, and `client_key`
            if given is None and "x-api-key" in headers:
                given = "Bearer " + headers["x-api-key"]
            if not keys.accepts(given):
                raise Unauthorized(
                    "missing or wrong API key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
                )


MAX_FILE_BYTES = 64 * 1024
LOOK_EVERY_S = 1.0
MAX_LINGERING = 4
"""Keys that have left the file and are still accepted; the ones that left first are refused first."""


class FollowedKeys(KeyRing):
    """The accepted bearer keys of an engine, some of them from a file that may change while it serves.

    The file is a Secret's, mounted as a directory: the kubelet replaces it as a whole. It is looked at when a request
    comes, once a second at most, so that a change needs no task of its own and costs nothing at rest. A key has left it
    when the file was written, also if nobody asked for hours.

    Invariants: a change interrupts no request, and all keys of the file are valid at once, so that a key can be
    replaced while its users still have the old one; an engine with a key file always requires a key, whatever happens
    to the file. With `linger_s` a key stays valid for that long after it has left the file, also if that cannot be
    read.

    Args:
        keys: keys that are always accepted.
        path: file with a key per line; empty lines and lines that begin with `#` are ignored.
        clock: seconds that never go back.
        linger_s: how long a key is accepted that has left the file, in seconds; 0 if it is refused at once.
        name: what the file is called in logs.
    """

    def __init__(
        self,
        keys: Iterable[str],
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        linger_s: float = 0.0,
        name: str = "--api-keys-file",
    ) -> None:
        self._fixed = tuple(keys)
        self._path = path
        self._clock = clock
        self._linger_s = linger_s
        self._name = name
        self._found: tuple[str, ...] = ()
        """The keys of the file."""
        self._left: dict[str, float] = {}
        """Keys that have left the file and still count, and when they left; in this order."""
        self._content: bytes | None = None
        self._problem = ""
        """Why no key of the file is accepted, as last logged; empty if keys are."""
        super().__init__(self._fixed)
        self._read()

    def __bool__(self) -> bool:
        return True

    @property
    def found(self) -> tuple[str, ...]:
        """The keys of the file, in its order."""
        return self._found

    def accepts(self, authorization: str | None) -> bool:
        if self._clock() >= self._next_look:
            self._read()
        return super().accepts(authorization)

    def _read(self) -> None:
        """Read the file, and accept its keys from now on if it has changed."""
        self._next_look = self._clock() + LOOK_EVERY_S
        content, problem, age_s = b"", "", 0.0
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
                age_s = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            lines = [line.strip() for line in content.decode().splitlines()]
        except (OSError, ValueError) as error:
            content, lines, problem = b"", [], f"cannot be read: {error}"
        found = [line for line in lines if line and not line.startswith("#")]
        if not found and not problem:
            problem = f"has no key: {self._path}"
        if problem and problem != self._problem:
            logger.error("no key of %s is accepted: the file %s", self._name, problem)
        self._problem = problem
        if content != self._content:
            if self._content is not None:
                logger.info("%s has changed and has %d keys now", self._name, len(found))
            self._content = content
            self._take(tuple(found), self._clock() - age_s)
        if self._left and self._expire():
            self._accept()

    def _take(self, found: tuple[str, ...], since: float) -> None:
        """Accept the keys of the file, and for a while those that have left it. Nobody may have looked since the file
        was written, at `since`."""
        if self._linger_s:
            self._left |= {key: since for key in self._found if key not in found}
        for key in found:
            self._left.pop(key, None)
        while len(self._left) > MAX_LINGERING:
            del self._left[next(iter(self._left))]
        self._found = found
        self._accept()

    def _expire(self) -> bool:
        """Drop the keys that have lingered for long enough. Returns whether there were any."""
        now = self._clock()
        gone = [key for key, left in self._left.items() if now - left >= self._linger_s]
        for key in gone:
            del self._left[key]
        return bool(gone)

    def _accept(self) -> None:
        self.replace((*self._fixed, *self._found, *self._left))


_VARY = (b"vary", b"Origin")


class CorsLayer(CORSMiddleware):
    """Starlette's CORS, with its arguments. Most requests pass quickly because they come from no page of a browser.

    A request without `Origin` gets one header, `Vary: Origin`, so that caches keep its answer apart from those for
    pages.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or any(name == b"origin" for name, _ in scope["headers"]):
            await super().__call__(scope, receive, send)
            return

        async def send_varying(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                if any(name.lower() == b"vary" for name, _ in headers):
                    await self.send(message, send, Headers(scope=scope))
                    return
                message["headers"] = [*headers, _VARY]
            await send(message)

        await self.app(scope, receive, send_varying)


class CustomMiddleware:
    """Puts the user's layers around `inner` (`--middleware`, by import path as in vLLM). If one fails before its
    answer, the client gets a 500.

    They stand in front of the check of keys: what they let through, its path as they leave it, is checked as if they
    were not there. They are made when the server starts and see HTTP requests only, no events of its start and end.

    Args:
        app: the application, which the layers find as `request.app`.
        paths: import paths `package.module.Name`, the outermost layer last. A class is called with the layer below and
            returns an ASGI application; a coroutine function takes a `Request` and `call_next`, as FastAPI's
            `middleware("http")`.

    Raises:
        ConfigError: a path cannot be imported, or is neither, or a class cannot be made.
    """

    def __init__(self, inner: ASGIApp, app: ASGIApp, paths: Sequence[str]) -> None:
        for path in paths:
            inner = _around(inner, path)
        self._inner = inner
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noting_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            seen = {**without_client_connection(scope), "app": self._app}
            await self._inner(seen, receive, noting_start)
        except Exception:
            if not has_started:
                await send_error(send, InternalError("internal error"), scope["path"])
            raise  # uvicorn logs it


def _around(inner: ASGIApp, path: str) -> ASGIApp:
    """Return the layer that an import path names, around `inner`."""
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(import_module(module), name)
        is_class = inspect.isclass(found)
        made: ASGIApp | None = cast(Callable[[ASGIApp], ASGIApp], found)(inner) if is_class else None
    except Exception as error:  # whatever the module's code raises
        raise ConfigError(
            f"--middleware {path} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}; give "
            "package.module.Name, importable from PYTHONPATH or site-packages"
        ) from error
    if made is not None:
        return made
    if inspect.iscoroutinefunction(found):
        return BaseHTTPMiddleware(inner, dispatch=found)
    raise ConfigError(f"--middleware {path} must be a class or an `async def` function")


_REQUEST_ID = re.compile(headers.REQUEST_ID_FORM)


def is_request_id(value: str | None) -> bool:
    """Return whether a client's value is used as the id of its request; another one gets an id of ours."""
    return value is not None and _REQUEST_ID.fullmatch(value) is not None


class RequestIds:
    """Adds the client's own id to a response, or a new one of 32 hexadecimal digits, unless it has one.

    Responses of endpoints that generate have it anyway, by which their logs are found; with
    `--enable-request-id-headers` also /health, /metrics and errors do.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(headers.REQUEST_ID)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                lines = MutableHeaders(scope=message)
                own = given if given is not None and is_request_id(given) else secrets.token_hex(16)
                lines.setdefault(headers.REQUEST_ID, own)
            await send(message)

        await self._app(scope, receive, send_with_id)


MAX_BODY_BYTES = 32 << 20
"""Room for a chat of four million characters; images are not accepted."""


SMALL_BODY_BYTES = 64 << 10
"""Smaller bodies do not count: of as many requests as there may be they take half a gigabyte."""
MAX_HELD_BYTES = 512 << 20
"""Bodies of the requests in flight. What was decoded of a body, up to five times its size, is kept until its request
ends."""


class RequestLimits:
    """Rejects request bodies that are too large or not JSON, and large ones while others hold too much memory.

    A request without a body needs no Content-Type.
    """

    def __init__(self, app: ASGIApp, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._app = app
        self._held = TenantShares(max_held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_body_headers(scope)
        except ApiError as error:
            await send_error(send, error, scope["path"])
            return
        tenant, total, held = "", 0, 0

        async def limited() -> Message:
            nonlocal tenant, total, held
            message = await receive()
            total += len(message.get("body", b""))  # a chunked body has no Content-Length
            if total > MAX_BODY_BYTES:
                raise PayloadTooLarge(f"request body exceeds {MAX_BODY_BYTES} bytes")
            if total > max(SMALL_BODY_BYTES, held):
                tenant = tenant or Headers(scope=scope).get(headers.TENANT, "")
                self._check_room(tenant, total - held)
                self._held.add(tenant, total - held)
                held = total
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held.remove(tenant, held)

    def _check_room(self, tenant: str, size: int) -> None:
        """
        Raises:
            ResourceUnavailable: bodies take too much memory, in all or of this tenant.
        """
        is_of_tenant = self._held.exceeds_share(tenant, size)
        if is_of_tenant or self._held.is_full(size):
            whose = "of the same key" if is_of_tenant else "in flight"
            raise ResourceUnavailable(
                f"the bodies of requests {whose} take too much memory", retry_after_s=1.0
            )


def _check_body_headers(scope: Scope) -> None:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    length = int(headers.get(b"content-length") or 0)
    if length > MAX_BODY_BYTES:
        raise PayloadTooLarge(f"request body exceeds {MAX_BODY_BYTES} bytes")
    if scope["method"] == "POST" and (length or b"transfer-encoding" in headers):
        # Browsers send other types across origins without a preflight request.
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise BadRequest("Content-Type must be application/json", code="unsupported_media_type")
        if b"content-encoding" in headers:
            raise BadRequest("Content-Encoding is not supported", code="unsupported_media_type")


class RootPath:
    """Removes the prefix that a path-based proxy puts before all paths (`--root-path`).

    It stands in front of all others, so that they compare the paths that the routes have: a prefix can hide no
    administrative path from the check of keys. Proxies that strip the prefix themselves work as well.

    Args:
        prefix: such as `/models/tiny`; empty for none.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._prefix and scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            raw = scope.get("raw_path")
            start = len(self._prefix)
            scope = {**scope, "path": scope["path"][start:]}
            if raw is not None and raw.startswith(self._prefix.encode()):
                scope["raw_path"] = raw[len(self._prefix.encode()) :]
        await self._app(scope, receive, send)
