"""`--middleware`: layers of the user's own around the server, without a socket."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse, StreamingResponse

from argosy_engine.api.app import add_http_layers
from argosy_engine.api.http.asgi_layers import CustomMiddleware
from argosy_engine.api.serve import parse_args
from argosy_engine.errors import ConfigError
from argosy_http.bounded_protocol import offer_client_connection
from argosy_protocol.headers import KeyRing

KEY = {"authorization": "Bearer k"}
LAYERS = """
class Adds:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def adding(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-layer", b"class")]
            await send(message)

        await self.app(scope, receive, adding)


class Moves:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        await self.app({**scope, "path": "/sleep"}, receive, send)


async def adds(request, call_next):
    answer = await call_next(request)
    answer.headers.append("x-layer", f"function {request.url.path} {request.app.__name__}")
    return answer


async def fails(request, call_next):
    raise ValueError("secret")


def plain(request, call_next):
    return None


class Breaks:
    def __init__(self, app):
        raise ValueError("no")
"""


async def served_app(scope: Any, receive: Any, send: Any) -> None:
    """Streams the path, in two parts."""

    async def parts() -> Any:
        yield b"path "
        yield scope["path"].encode()

    answer = StreamingResponse(parts()) if scope["method"] == "GET" else PlainTextResponse("posted")
    await answer(scope, receive, send)


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_layers.py").write_text(LAYERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_layers", raising=False)


def layered(*names: str, flags: tuple[str, ...] = ()) -> Any:
    given = [word for name in names for word in ("--middleware", f"own_layers.{name}")]
    options, _ = parse_args(["builtin://tiny", *given, *flags])
    return add_http_layers(served_app, options, KeyRing(["k"]), KeyRing(["admin"]))


def client(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://engine", headers=KEY)


async def test_the_last_layer_is_the_outermost_and_streams_pass() -> None:
    flags = ("--root-path", "/models/tiny")
    for names, expected in (
        (("Adds", "adds"), ["class", "function /v1/models served_app"]),
        (("adds", "Adds"), ["function /v1/models served_app", "class"]),
    ):
        async with client(layered(*names, flags=flags)) as http:
            answered = await http.get("/models/tiny/v1/models")
        assert answered.text == "path /v1/models"
        assert answered.headers.get_list("x-layer") == expected


async def test_a_layer_sees_refused_requests_and_cannot_evade_the_keys() -> None:
    async with client(layered("Moves", "Adds")) as http:
        refused = await http.get("/health")
        slept = await http.get("/health", headers={"authorization": "Bearer admin"})
    assert (refused.status_code, refused.headers["x-layer"]) == (401, "class")
    assert slept.text == "path /sleep"


async def test_a_layer_sees_every_piece_of_an_answer() -> None:
    """So nothing is written past it."""
    scopes: list[Any] = []

    async def inner(scope: Any, _: Any, __: Any) -> None:
        scopes.append(scope)

    scope: dict[str, Any] = {"type": "http", "path": "/"}
    offer_client_connection(scope, None)  # type: ignore[arg-type]
    assert len(scope) == 3
    await CustomMiddleware(inner, inner, ["own_layers.Adds"])(scope, None, None)  # type: ignore[arg-type]
    assert scopes == [{"type": "http", "path": "/", "app": inner}]


async def test_a_layer_that_fails_gives_an_error_of_our_shape() -> None:
    async with client(layered("fails")) as http:
        answered = await http.get("/v1/models")
    assert answered.status_code == 500
    assert answered.json()["error"]["message"] == "internal error"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Missing", "own_layers.Missing cannot be loaded: AttributeError"),
        ("inner.Missing", "own_layers.inner.Missing cannot be loaded: ModuleNotFoundError"),
        ("Breaks", "own_layers.Breaks cannot be loaded: ValueError: no; give package.module.Name"),
        ("plain", "own_layers.plain must be a class or an `async def` function"),
    ],
)
def test_a_layer_that_cannot_be_loaded_ends_the_start(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        layered(name)
    assert told in str(refused.value)
