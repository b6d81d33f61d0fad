"""Headers for browsers on other origins, through all layers of the server but no socket."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, StreamingResponse

from argosy_engine.api.app import add_http_layers
from argosy_engine.api.http.asgi_layers import CorsLayer
from argosy_engine.api.serve import parse_args
from argosy_protocol.headers import KeyRing

ORIGIN = "https://chat.example"
ALLOWED = ("--allowed-origins", f'["{ORIGIN}"]')
CHATS = "/v1/chat/completions"
ASKS = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
KEY = {"authorization": "Bearer k"}
FROM = "access-control-allow-origin"


async def streaming_app(scope: Any, receive: Any, send: Any) -> None:
    """Streams an answer below /stream, and otherwise sends one that varies."""

    async def events() -> Any:
        yield b"data: 1\n\n"
        yield b"data: [DONE]\n\n"

    streams = scope["path"] == "/stream"
    answer = StreamingResponse(events()) if streams else PlainTextResponse("", headers={"vary": "Accept"})
    await answer(scope, receive, send)


def client(*flags: str) -> httpx.AsyncClient:
    options, _ = parse_args(["builtin://tiny", *flags])
    layered = add_http_layers(streaming_app, options, KeyRing(["k"]), KeyRing([]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(layered), base_url="http://engine")


async def preflight(*flags: str, path: str = CHATS, **asked: str) -> httpx.Response:
    async with client(*flags) as http:
        lines = ASKS | {f"access-control-request-{name}": value for name, value in asked.items()}
        return await http.options(path, headers=lines)


async def test_no_page_of_another_origin_may_call_by_default() -> None:
    refused = await preflight()
    assert (refused.status_code, refused.text) == (400, "Disallowed CORS origin")
    assert FROM not in refused.headers
    async with client() as http:
        answered = await http.get(CHATS, headers={**KEY, "origin": ORIGIN})
    assert answered.status_code == 200
    assert FROM not in answered.headers


async def test_a_preflight_request_needs_no_key() -> None:
    answered = await preflight(*ALLOWED)
    assert answered.status_code == 200
    assert answered.headers[FROM] == ORIGIN
    assert answered.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in answered.headers["access-control-allow-methods"].split(", ")
    assert "access-control-allow-credentials" not in answered.headers


async def test_no_other_request_escapes_the_key_check() -> None:
    async with client(*ALLOWED) as http:
        plain = await http.options(CHATS, headers={"origin": ORIGIN})
        posted = await http.post(CHATS, headers=ASKS, json={})
    assert (plain.status_code, posted.status_code) == (401, 401)


async def test_errors_and_streams_have_the_headers() -> None:
    async with client(*ALLOWED) as http:
        refused = await http.post(CHATS, headers={"origin": ORIGIN}, json={})
        too_large = await http.post(CHATS, headers={**KEY, "origin": ORIGIN, "content-length": str(1 << 30)})
        streamed = await http.get("/stream", headers={**KEY, "origin": ORIGIN})
        other = await http.get("/stream", headers={**KEY, "origin": "https://other.example"})
    assert [answer.status_code for answer in (refused, too_large, streamed)] == [401, 413, 200]
    assert {answer.headers[FROM] for answer in (refused, too_large, streamed)} == {ORIGIN}
    assert streamed.text.endswith("[DONE]\n\n")
    assert FROM not in other.headers


async def test_caches_are_told_that_answers_depend_on_the_origin() -> None:
    async with client(*ALLOWED) as http:
        answered = await http.get("/", headers={**KEY, "origin": ORIGIN})
    assert answered.headers["vary"] == "Accept, Origin"


@pytest.mark.parametrize(
    ("flags", "asked", "expected"),
    [
        (("--allowed-methods", '["GET"]'), {"method": "POST"}, "Disallowed CORS method"),
        (("--allowed-methods", '["GET"]'), {"method": "GET"}, "OK"),
        (
            ("--allowed-headers", '["authorization"]'),
            {"headers": "authorization,x-a"},
            "Disallowed CORS headers",
        ),
        (("--allowed-headers", '["Authorization"]'), {"headers": "authorization"}, "OK"),
        (("--allowed-headers", "[]"), {"headers": "authorization"}, "Disallowed CORS headers"),
    ],
)
async def test_methods_and_headers_may_be_restricted(
    flags: tuple[str, ...], asked: dict[str, str], expected: str
) -> None:
    answered = await preflight(*ALLOWED, *flags, **asked)
    assert answered.text == expected
    assert answered.status_code == (200 if expected == "OK" else 400)


async def test_every_origin_may_be_allowed_and_credentials_name_it() -> None:
    everyone = ("--allowed-origins", '["*"]')
    async with client(*everyone) as http:
        answered = await http.get("/", headers={**KEY, "origin": ORIGIN})
    assert answered.headers[FROM] == "*"
    async with client(*everyone, "--allow-credentials") as http:
        answered = await http.get("/", headers={**KEY, "origin": ORIGIN})
    assert answered.headers[FROM] == ORIGIN
    assert answered.headers["access-control-allow-credentials"] == "true"


async def test_a_preflight_request_passes_the_prefix_and_gets_an_id() -> None:
    flags = (*ALLOWED, "--root-path", "/models/tiny", "--enable-request-id-headers")
    answered = await preflight(*flags, path=f"/models/tiny{CHATS}")
    assert answered.status_code == 200
    assert len(answered.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--allowed-origins", ORIGIN), "--allowed-origins is not JSON"),
        (("--allowed-origins", f'["{ORIGIN}/"]'), "write scheme://host or scheme://host:port"),
        (("--allowed-origins", '["https://Chat.example"]'), "in small letters"),
        (("--allowed-origins", '["chat.example"]'), "'chat.example' is no origin"),
        (("--allowed-methods", '["GET, POST"]'), "--allowed-methods: 'GET, POST' is no HTTP name"),
        (("--allowed-headers", '["a\\r\\nb"]'), "--allowed-headers:"),
        (("--allowed-headers", '"*"'), "--allowed-headers: Expected `array`"),
    ],
)
def test_what_no_browser_sends_is_refused(
    flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_args(["builtin://tiny", *flags])
    assert left.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "origin", [[], [(b"origin", ORIGIN.encode())], [(b"origin", b"https://other.example")]]
)
@pytest.mark.parametrize(
    "sent",
    [[], [(b"content-type", b"a")], [(b"vary", b"Accept")], [(b"Vary", b"A"), (b"x", b"y"), (b"vary", b"B")]],
)
@pytest.mark.parametrize("allowed", [["*"], [ORIGIN]])
async def test_every_answer_has_starlettes_headers(
    origin: list[tuple[bytes, bytes]], sent: list[tuple[bytes, bytes]], allowed: list[str]
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(sent)})
        await send({"type": "http.response.body", "body": b""})

    messages: dict[type, list[Any]] = {}
    for layer in (CorsLayer, CORSMiddleware):
        got: list[Any] = []

        async def keep(message: Any, got: list[Any] = got) -> None:
            got.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"x"), *origin]}
        await layer(app, allow_origins=allowed)(scope, keep, keep)
        start = got[0]
        start["headers"] = sorted((name.lower(), value) for name, value in start["headers"])
        messages[layer] = got
    assert messages[CorsLayer] == messages[CORSMiddleware]
