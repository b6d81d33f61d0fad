"""The HTTP client of `argosy bench serve`: framing, kept connections and their ends."""

from __future__ import annotations

import asyncio
import socket

import pytest

from argosy_engine.benchmarks.load_generator import RequestFuncOutput, RequestTemplate, send_request
from argosy_engine.benchmarks.prompt_datasets import SampleRequest
from argosy_engine.benchmarks.streaming_http import HttpFailure, NoConnection, StreamingHttp
from mock_openai import Document, Events, MockOpenAI, Question, event

SAMPLE = SampleRequest("Hello", 1, 3, "id-1")
TEMPLATE = RequestTemplate(backend="openai", path="/v1/completions", model="mock")
CHAT = RequestTemplate(backend="openai-chat", path="/v1/chat/completions", model="mock")


def send(server: MockOpenAI, template: RequestTemplate = TEMPLATE, count: int = 1) -> list[RequestFuncOutput]:
    """Send requests one after the other."""

    async def run() -> list[RequestFuncOutput]:
        client = StreamingHttp(server.url)
        try:
            return [await send_request(client, template, SAMPLE, template.body(SAMPLE)) for _ in range(count)]
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("template", [TEMPLATE, CHAT], ids=["completions", "chat"])
def test_tokens_are_counted_and_timed(template: RequestTemplate) -> None:
    with MockOpenAI() as server:
        (output,) = send(server, template)
    assert output.error == ""
    assert output.success
    assert output.generated_text == "t0 t1 t2 "
    assert (output.output_tokens, output.prompt_len, len(output.itl)) == (3, 7, 2)
    assert 0 < output.ttft <= output.latency
    assert output.ttft + sum(output.itl) <= output.latency + 1e-6
    (question,) = server.questions
    assert question.headers["x-request-id"] == "id-1"
    assert question.body["stream"] is True
    assert question.body["stream_options"] == {"include_usage": True}


def test_a_connection_is_kept() -> None:
    with MockOpenAI() as server:
        assert all(output.success for output in send(server, count=5))
        assert server.connections == 1


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    def answer(question: Question) -> Document:
        return Document({"choices": [{"text": "a"}]}, closes=True)

    template = RequestTemplate(backend="openai-embeddings", path="/v1/embeddings", model="mock")
    with MockOpenAI(answer) as server:
        assert [output.error for output in send(server, template, 4)] == [""] * 4
        assert server.connections == 4


def test_events_may_be_split_anywhere() -> None:
    whole = (
        b"".join(
            [b": a comment\n\n", event({"choices": [{"text": "a"}]}), event({"choices": [{"text": "é"}]})]
        )
        + b'data:{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}\r\n\r\ndata: [DONE]\n\n'
    )
    for size in (1, 3, 50, len(whole)):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        with MockOpenAI(lambda _, pieces=pieces: Events(pieces)) as server:
            (output,) = send(server)
        assert output.error == ""
        assert (output.generated_text, output.output_tokens, output.prompt_len) == ("aé", 9, 4)


def test_without_usage_events_count_as_tokens() -> None:
    with MockOpenAI(lambda _: Events([event({"choices": [{"text": "a"}]})] * 5)) as server:
        (output,) = send(server)
    assert (output.output_tokens, output.prompt_len) == (5, 1)


def test_thoughts_and_calls_of_a_chat_are_tokens_and_its_frame_is_not() -> None:
    deltas: list[dict[str, object]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "yes"},
        {"tool_calls": [{"index": 0}]},
        {},
    ]
    with MockOpenAI(lambda _: Events([event({"choices": [{"delta": delta}]}) for delta in deltas])) as server:
        (output,) = send(server, CHAT)
    assert (output.output_tokens, output.generated_text) == (3, "hmyes")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Document({"error": {"message": "slow down"}}, 429), "HTTP 429: slow down"),
        (Document("oops", 502), "HTTP 502: oops"),
        (Document({"choices": [{"message": {}}]}), "the answer has no tokens"),
        (Events([event({"choices": [{"text": "a"}]})], is_whole=False), "closed the connection before"),
        (
            Events([event({"choices": [{"text": "a"}]}), event({"error": {"message": "it died"}})]),
            "the stream ended: it died",
        ),
        (Events([b"data: {nonsense\n\n"]), "an event cannot be read"),
        (Events([b"data: [DONE]\n\n"]), "the answer has no tokens"),
    ],
)
def test_a_failure_is_said_and_the_next_request_is_answered(answer: Document | Events, error: str) -> None:
    answers = iter([answer])
    good = Events([event({"choices": [{"text": "a"}]})])
    with MockOpenAI(lambda _: next(answers, good)) as server:
        failed, second = send(server, count=2)
    assert error in failed.error
    assert not failed.success
    assert second.success


def test_nobody_at_an_address_is_an_error_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = StreamingHttp(f"http://127.0.0.1:{port}")
    with pytest.raises(NoConnection):
        asyncio.run(client.request("GET", "/", lambda *_: None))


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 C\r\ncontent-length: 2\r\n\r\nok", 201, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    ],
)
def test_bodies_may_be_framed_in_any_way(raw: bytes, status: int, body: bytes) -> None:
    assert asyncio.run(_exchange(raw)) == (status, body)


@pytest.mark.parametrize("raw", [b"", b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab"])
def test_what_is_no_whole_answer_is_a_failure(raw: bytes) -> None:
    with pytest.raises(HttpFailure):
        asyncio.run(_exchange(raw))


async def _exchange(raw: bytes) -> tuple[int, bytes]:
    """Ask a server that answers with these bytes and closes the connection."""
    received = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        client = StreamingHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix")
        status = await client.request("GET", "/a", lambda _, __, data: received.append(data))
        await client.close()
    return status, b"".join(received)


@pytest.mark.parametrize("url", ["ftp://a", "localhost:8000", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an http"):
        StreamingHttp(url)


@pytest.mark.parametrize("headers", [{"a": "b\r\nc: d"}, {"a b": "c"}, {"": "c"}, {"a": "é"}])
def test_a_header_that_would_be_two_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is not a header"):
        StreamingHttp("http://a", headers)
