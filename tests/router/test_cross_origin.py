"""Web pages of other origins: what a browser asks before it lets one call the router, and what answers tell it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from argosy_router.config import ConfigError
from argosy_router.main import build_parser, config_of

from .batch_rig import lines, stored
from .fake_engine import FakeEngine
from .harness import chat, raw, read_all, rig
from .raw_requests import answer

ORIGIN = "https://chat.example"
ALLOWED = (ORIGIN,)
FROM = "access-control-allow-origin"
CHATS = "/v1/chat/completions"
ASKS = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
KEY = {"authorization": "Bearer k"}


def page(**headers: str) -> dict[str, str]:
    return {"origin": ORIGIN, **KEY, **headers}


async def test_without_the_flag_a_preflight_request_needs_a_key_and_gets_no_header() -> None:
    async with rig([FakeEngine()], api_keys=("k",)) as r:
        asked = await r.http.options(CHATS, headers=ASKS)
        answered = await r.http.post(CHATS, json=chat(), headers=page())
    assert (asked.status_code, answered.status_code) == (401, 200)
    for each in (asked, answered):
        assert FROM not in each.headers
        assert "vary" not in each.headers


@pytest.mark.parametrize("origins", [ALLOWED, ("*",), ("https://other.example", ORIGIN)], ids=str)
@pytest.mark.parametrize("path", [CHATS, "/v1/models", "/v1/responses/resp_1", "/health"])
async def test_a_preflight_request_needs_no_key(origins: tuple[str, ...], path: str) -> None:
    async with rig([], wait=False, api_keys=("k",), allowed_origins=origins) as r:
        asked = await r.http.options(path, headers=ASKS)
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers[FROM] == ORIGIN
    assert asked.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
    assert {"GET", "POST", "DELETE"} <= set(asked.headers["access-control-allow-methods"].split(", "))
    assert "access-control-allow-credentials" not in asked.headers
    assert "Origin" in ", ".join(asked.headers.get_list("vary"))


async def test_pages_of_other_origins_are_refused_and_told_nothing() -> None:
    async with rig([FakeEngine()], api_keys=("k",), allowed_origins=ALLOWED) as r:
        for origin in ("https://chat.example.evil", "http://chat.example", "null", ORIGIN.upper()):
            asked = await r.http.options(CHATS, headers=ASKS | {"origin": origin})
            answered = await r.http.post(CHATS, json=chat(), headers=page(origin=origin))
            assert (asked.status_code, answered.status_code) == (400, 200)
            assert "--allowed-origins" in asked.json()["error"]["message"]
            for each in (asked, answered):
                assert FROM not in each.headers
                assert each.headers["vary"].startswith("Origin"), "a cache would give it to another page"


async def test_no_other_request_escapes_the_key_check() -> None:
    async with rig([FakeEngine()], api_keys=("k",), allowed_origins=ALLOWED) as r:
        plain = await r.http.options(CHATS, headers={"origin": ORIGIN})
        posted = await r.http.post(CHATS, json=chat(), headers=ASKS)
        deleted = await r.http.delete("/v1/files/file-1", headers=ASKS)
        assert [each.status_code for each in (plain, posted, deleted)] == [401, 401, 401]
        assert not [each for each in r.engines[0].requests if each.method == "POST"]
        # A page can read what went wrong.
        assert [each.headers[FROM] for each in (plain, posted, deleted)] == [ORIGIN] * 3


@pytest.mark.parametrize(
    ("body", "status"),
    [(chat(), 200), (chat(stream=True), 200), (chat(model="other"), 404), ({"model": 1}, 400)],
    ids=["unary", "stream", "unknown model", "malformed"],
)
async def test_answers_errors_and_streams_have_the_headers_once(body: Any, status: int) -> None:
    async with rig([FakeEngine()], api_keys=("k",), allowed_origins=ALLOWED) as r:
        answered = await r.http.post(CHATS, json=body, headers=page())
    assert answered.status_code == status
    assert answered.headers.get_list(FROM) == [ORIGIN]
    assert answered.headers["access-control-expose-headers"] == "*"
    assert answered.headers.get_list("vary") == ["Origin"]


async def test_a_body_that_is_too_large_is_refused_with_the_headers() -> None:
    head = f"POST {CHATS} HTTP/1.1\r\nhost: a\r\norigin: {ORIGIN}\r\nauthorization: Bearer k\r\n"
    async with rig([], wait=False, api_keys=("k",), allowed_origins=ALLOWED) as r, raw(r.router) as streams:
        streams[1].write(head.encode() + b"content-length: 99999999999\r\n\r\n")
        status, headers, _ = await answer(streams[0])
        assert (status, headers[FROM]) == (413, ORIGIN)
        assert await read_all(streams[0]) == b""


async def test_requests_of_programs_get_no_origin() -> None:
    async with rig([FakeEngine()], allowed_origins=ALLOWED) as r:
        answered = await r.http.post(CHATS, json=chat())
    assert answered.status_code == 200
    assert FROM not in answered.headers
    assert answered.headers["vary"] == "Origin"


@pytest.mark.parametrize(("origins", "status"), [(ALLOWED, 200), (("https://other.example",), 403)])
async def test_a_page_of_an_allowed_origin_may_upload(
    tmp_path: Path, origins: tuple[str, ...], status: int
) -> None:
    async with stored(tmp_path, [FakeEngine()], allowed_origins=origins) as r:
        file: Any = {"file": ("a.jsonl", lines("a"))}
        headers = {"origin": ORIGIN, "sec-fetch-site": "cross-site"}
        answered: httpx.Response = await r.http.post(
            "/v1/files", files=file, data={"purpose": "batch"}, headers=headers
        )
    assert answered.status_code == status, answered.text


def test_the_flag_takes_what_browsers_send() -> None:
    def parsed(value: str) -> tuple[str, ...]:
        flags = ["--replica", "http://a:1", "--allowed-origins", value]
        return config_of(build_parser().parse_args(flags), {}).allowed_origins

    assert parsed('["https://a.example:8443", "null", "*"]') == ("https://a.example:8443", "null", "*")
    for value in ('["http://a.example:443"]', '["https://[::1]:80"]', '["https://xn--bcher-kva.example."]'):
        assert parsed(value) == tuple(json.loads(value))
    for value in (
        *('["chat.example"]', '["https://chat.example/"]', '["HTTPS://chat.example"]'),
        *('["https://a.example:443"]', '["http://[::1]:80"]', '["https://b\u00fccher.example"]'),
        '["https://me@a.example"]',
    ):
        with pytest.raises(ConfigError, match="--allowed-origins"):
            parsed(value)
