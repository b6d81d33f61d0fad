"""What the fuzzer calls a finding, and that it sends the same bytes for the same seed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from .fuzzed_document import narrowed
from .raw_cases import BODIES, cases
from .raw_client import RawCase, finding, wrong_answer

OURS = b'{"error":{"message":"m","type":"t","param":null,"code":null}}'
MESSAGES = b'{"type":"error","error":{"message":"m","type":"t"}}'
COMPLETIONS = "/v1/completions"


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[int]:
    """A server that answers everything with these bytes and closes; None: it neither answers nor closes."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if answer is None:
            await gone.wait()
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        gone.set()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", None),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", None),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 400 No\r\ncontent-length: 2\r\n\r\nno",
            None,
        ),
        (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", "status 500"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", "the connection ended"),
        (b"HTTP/1.1 400 No\r\ncontent-length: 2\r\n\r\nno", "without an error in its form"),
        (b"", "the connection ended after 0 bytes"),
        (b"SSH-2.0\r\n", "no HTTP"),
    ],
)
async def test_broken_answers_are_findings(answer: bytes, expected: str | None) -> None:
    case = RawCase("a", (b"GET / HTTP/1.1\r\n\r\n",), COMPLETIONS)
    async with answering(answer) as port:
        found = await finding(port, case)
    assert (found is None) if expected is None else (found is not None and expected in found)


async def test_a_server_that_never_answers_is_a_finding() -> None:
    case = RawCase("a", (b"GET",), COMPLETIONS, has_end=False)
    async with answering(None) as port:
        assert await finding(port, case, timeout_s=0.1) == "no answer within 0 s"


async def test_an_unfinished_request_may_be_dropped() -> None:
    async with answering(b"") as port:
        assert await finding(port, RawCase("a", (b"GET",), COMPLETIONS, has_end=False)) is None


@pytest.mark.parametrize(
    ("status", "body", "path", "is_fine"),
    [
        (400, OURS, COMPLETIONS, True),
        (503, OURS, COMPLETIONS, True),
        (502, OURS, COMPLETIONS, False),
        (400, OURS, "/v1/messages", False),
        (400, MESSAGES, "/v1/messages", True),
        (400, MESSAGES, COMPLETIONS, False),
        (400, b'{"error":{"message":"m","type":"t"}}', COMPLETIONS, False),
        (400, b'{"error":"m"}', COMPLETIONS, False),
        (404, b'{"detail":"Not Found"}', COMPLETIONS, False),
        (400, MESSAGES, "", True),
    ],
)
def test_errors_have_the_form_of_their_path(status: int, body: bytes, path: str, is_fine: bool) -> None:
    assert (wrong_answer(status, body, path) is None) == is_fine


def test_the_same_seed_gives_the_same_cases() -> None:
    def some(seed: int) -> list[RawCase]:
        return list(itertools.islice(cases([*BODIES, "/v1/files"], ["tiny"], seed), 200))

    assert some(1) == some(1) != some(2)
    assert {case.path for case in some(1)} == {*BODIES, "/v1/files", ""}


def test_only_what_is_sent_is_narrowed() -> None:
    reference = {"$ref": "#/components/schemas/Chat"}
    content = {"content": {"application/json": {"schema": reference}}}
    chat = {"properties": {"model": {"type": "string"}, "type": {"type": "string"}}}
    name = {"name": "name", "in": "path", "schema": {"type": "string"}}
    document = {
        "paths": {
            "/chats": {"post": {"requestBody": content, "responses": {"200": content}}},
            "/chats/{name}": {"get": {"parameters": [name]}},
            "/sleep": {"post": {}},
        },
        "components": {"schemas": {"Chat": chat}},
    }
    result = narrowed(document, ["tiny"], {"/chats": ["chat-1"]}, "")
    operation = result["paths"]["/chats"]["post"]
    assert operation["responses"] == {"200": content}
    assert (
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        == "#/components/schemas/SentChat"
    )
    schemas = result["components"]["schemas"]
    assert schemas["Chat"] == chat
    assert schemas["SentChat"]["properties"]["model"] == {"enum": ["tiny"]}
    (parameter,) = result["paths"]["/chats/{name}"]["get"]["parameters"]
    assert parameter["schema"] == {"anyOf": [{"enum": ["chat-1"]}, {"type": "string"}]}
    assert "/sleep" not in result["paths"]


def test_events_of_streams_are_not_compared_with_a_text() -> None:
    json_schema, text = {"schema": {"type": "object"}}, {"schema": {"type": "string"}}
    content = {"application/json": json_schema, "text/event-stream": text}
    answer = {"description": "the answer", "content": content}
    operation = {"responses": {"200": answer, "204": {"description": "none"}}}
    document = {"paths": {"/chats": {"post": operation}}, "components": {"schemas": {}}}
    result = narrowed(document, ["tiny"], {}, "")["paths"]["/chats"]["post"]["responses"]
    assert result["200"] == {
        "description": "the answer",
        "content": {"application/json": json_schema, "text/event-stream": {}},
    }
    assert result["204"] == {"description": "none"}
