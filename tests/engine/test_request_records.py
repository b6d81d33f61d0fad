"""Requests as the log and a collector of spans see them (`--access-log`, `--otlp-traces-endpoint`)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from argosy_engine.api.observability.request_records import RequestRecords, line_of
from argosy_engine.api.observability.request_spans import RequestSpans
from argosy_engine.api.serve import parse_args
from argosy_engine.frontend.observer import RequestRecord, RequestTimings, current_record
from processes import Server, free_port, running, wait_until
from served_engine import FOREVER, SECRET, SERVE_TINY
from span_collector import Collector, values_of

pytestmark = pytest.mark.timeout(300)

KEY = "sk-secret-key"
PARENT_SPAN = "b7ad6b7169203331"
PROMPT = {
    "model": "tiny",
    "prompt": SECRET,
    "max_tokens": 5,
    "ignore_eos": True,
    "temperature": 0.5,
    "top_p": 0.9,
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log"
    flags = ["--access-log", "--otlp-traces-endpoint", collector.url, "--served-model-name", "tiny"]
    env = {
        "ARGOSY_API_KEY": KEY,
        "OTEL_BSP_SCHEDULE_DELAY": "20",
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
    }
    with running([*SERVE_TINY, *flags, "--port", str(port)], log, port=port, env=env) as up:
        yield up


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        yield client


class Trace:
    """A client's trace."""

    def __init__(self, collector: Collector, *, is_sampled: bool = True) -> None:
        self._collector = collector
        self._id = secrets.token_hex(16)
        self.headers = {"traceparent": f"00-{self._id}-{PARENT_SPAN}-{'01' if is_sampled else '00'}"}

    @property
    def spans(self) -> list[Any]:
        return [span for span in list(self._collector.spans) if span.trace_id.hex() == self._id]

    def wait(self, count: int) -> list[Any]:
        wait_until(lambda: len(self.spans) >= count, f"{count} spans")
        return self.spans


def line(server: Server, request_id: str) -> dict[str, str]:
    """Wait for the line of a request, and return its fields."""
    found: list[str] = []

    def is_logged() -> bool:
        found[:] = [each for each in server.log.read_text().splitlines() if f"request={request_id} " in each]
        return bool(found)

    wait_until(is_logged, f"the line of {request_id}")
    (shown,) = found
    return dict(each.split("=", 1) for each in shown[shown.index("request=") :].split(" "))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_is_one_span_of_its_clients_trace_and_one_line(
    server: Server, http: httpx.Client, collector: Collector, streamed: bool
) -> None:
    trace, request_id = Trace(collector), f"one-{streamed}"
    headers = {**trace.headers, "x-request-id": request_id}
    told = http.post("/v1/completions", json={**PROMPT, "stream": streamed}, headers=headers)
    assert told.status_code == 200
    (span,) = trace.wait(1)
    assert (span.name, span.parent_span_id.hex()) == ("llm_request", PARENT_SPAN)
    assert span.end_time_unix_nano > span.start_time_unix_nano
    values = values_of(span.attributes)
    expected = {
        "gen_ai.request.id": request_id,
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.completion_tokens": 5,
    }
    assert expected.items() <= values.items()
    assert values["gen_ai.usage.prompt_tokens"] > 0
    assert values["gen_ai.latency.e2e"] >= values["gen_ai.latency.time_to_first_token"] > 0
    for part in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"):
        assert values[f"gen_ai.latency.{part}"] >= 0
    assert collector.resources[0]["service.name"] == "argosy-engine"
    fields = line(server, request_id)
    assert fields["prompt_tokens"] == str(values["gen_ai.usage.prompt_tokens"])
    expected_fields = {
        "method": "POST",
        "path": "/v1/completions",
        "status": "200",
        "model": "tiny",
        "completion_tokens": "5",
        "finish": "length",
    }
    assert expected_fields.items() <= fields.items()
    assert 0 < float(fields["ttft_ms"]) <= float(fields["duration_ms"])


def test_a_request_that_names_no_model_is_logged_with_that_which_answered(
    server: Server, http: httpx.Client
) -> None:
    body = {name: value for name, value in PROMPT.items() if name != "model"}
    http.post("/v1/completions", json=body, headers={"x-request-id": "nameless"})
    assert line(server, "nameless")["model"] == "tiny"


def test_each_choice_is_a_span_and_the_prompt_counts_once(
    server: Server, http: httpx.Client, collector: Collector
) -> None:
    trace, body = Trace(collector), {**PROMPT, "n": 3}
    told = http.post("/v1/completions", json=body, headers={**trace.headers, "x-request-id": "three"})
    usage = told.json()["usage"]
    spans = trace.wait(3)
    assert [values_of(span.attributes)["gen_ai.request.n"] for span in spans] == [3, 3, 3]
    fields = line(server, "three")
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (str(usage["prompt_tokens"]), "15")


def test_a_malformed_tracestate_is_dropped_and_not_logged(
    server: Server, http: httpx.Client, collector: Collector
) -> None:
    trace = Trace(collector)
    headers = {**trace.headers, "tracestate": "malformed state", "x-request-id": "malformed"}
    assert http.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200
    (span,) = trace.wait(1)
    assert span.parent_span_id.hex() == PARENT_SPAN
    line(server, "malformed")
    assert "malformed state" not in server.log.read_text()


class CountedHeaders(dict[str, str]):
    """Counts how often the parent is looked up."""

    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__(headers)
        self.count = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.count += key == "traceparent"
        return super().get(key, default)


def test_the_context_of_a_request_with_many_choices_is_read_once() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = RequestSpans(provider, "tiny")
    headers = CountedHeaders({"traceparent": f"00-{'a' * 32}-{PARENT_SPAN}-01"})
    token = current_record.set(RequestRecord("POST", "/v1/completions", headers))
    choices = [RequestTimings() for _ in range(3)]
    current_record.reset(token)
    for choice in choices:
        spans.on_finished(choice, 1, 1, "stop")
    parents = [span.parent for span in exporter.get_finished_spans()]
    assert [parent and parent.span_id for parent in parents] == [int(PARENT_SPAN, 16)] * 3
    assert headers.count == 1


def test_a_client_that_does_not_sample_is_obeyed(http: httpx.Client, collector: Collector) -> None:
    unsampled, sampled = Trace(collector, is_sampled=False), Trace(collector)
    for trace in (unsampled, sampled):
        assert http.post("/v1/completions", json=PROMPT, headers=trace.headers).status_code == 200
    sampled.wait(1)
    assert not unsampled.spans


def test_a_client_that_leaves_is_told_of(server: Server, http: httpx.Client, collector: Collector) -> None:
    trace = Trace(collector)
    headers = {**trace.headers, "x-request-id": "left"}
    with http.stream("POST", "/v1/completions", json={**FOREVER, "model": "tiny"}, headers=headers) as told:
        next(told.iter_bytes())
    (span,) = trace.wait(1)
    (reason,) = values_of(span.attributes)["gen_ai.response.finish_reasons"].values
    assert reason.string_value == "abort"
    fields = line(server, "left")
    assert (fields["status"], fields["finish"]) == ("200", "abort")


def test_refused_requests_have_a_line_and_probes_none(server: Server, http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    told = http.post(
        "/v1/completions", json={"model": "no such\nmodel", "prompt": "x"}, headers={"x-request-id": "no"}
    )
    assert told.status_code == 404
    wait_until(lambda: "request=no " in server.log.read_text(), "the line of the refusal")
    assert line_fields(server.log.read_text(), "request=no ") == [("404", '"no such\\nmodel"')]
    assert http.get("/v1/models", headers={"authorization": "Bearer no"}).status_code == 401
    wait_until(lambda: "status=401" in server.log.read_text(), "the line of the request without a key")
    assert "path=/health" not in server.log.read_text()


def line_fields(log: str, mark: str) -> list[tuple[str, str]]:
    """Return status and model of the lines with a mark; a model's name may have spaces."""
    lines = [each for each in log.splitlines() if mark in each]
    return [
        (each.partition("status=")[2].split(" ")[0], each.partition("model=")[2].partition(" tenant=")[0])
        for each in lines
    ]


def test_lines_have_no_prompts_and_no_keys(server: Server, http: httpx.Client) -> None:
    told = http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "secret"})
    assert told.status_code == 200
    line(server, "secret")
    log = server.log.read_text()
    assert SECRET not in log
    assert KEY not in log


async def test_a_record_is_that_of_its_request_alone() -> None:
    seen: list[RequestRecord | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current_record.get())

    layer = RequestRecords(app, is_logged=False)
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/x",
        "headers": [(b"traceparent", b"p"), (b"cookie", b"c")],
    }

    async def nothing(*_: object) -> None:
        pass

    await layer(scope, nothing, nothing)  # type: ignore[arg-type]
    assert seen[0] is not None
    assert seen[0].trace_headers == {"traceparent": "p"}
    assert current_record.get() is None


HOSTILE = ("two words", "x\nstatus=200", "\x1b[2J", "<b>", "sk-secret", "a" * 300, {"a": 1}, 400)


async def line_of_error(body: bytes, caplog: pytest.LogCaptureFixture, *, pieces: int = 1) -> dict[str, str]:
    """Answer a request with an error, and return the fields of its line."""
    sent: list[Any] = []
    size = -(-len(body) // pieces)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        for start in range(0, len(body), size):
            piece = {"type": "http.response.body", "body": body[start : start + size], "more_body": True}
            await send(piece)
            assert sent[-1] is piece, "it is passed on before the next is made"
        await send({"type": "http.response.body"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with caplog.at_level("INFO", "argosy.access"):
        await RequestRecords(app, is_logged=True)(scope, send, send)  # type: ignore[arg-type]
    (shown,) = caplog.messages
    assert b"".join(message.get("body", b"") for message in sent) == body
    return dict(each.split("=", 1) for each in shown.split(" "))


def reason_in(fields: dict[str, str]) -> tuple[str, ...]:
    return tuple(fields[name] for name in ("status", "error_type", "error_code", "error_param"))


@pytest.mark.parametrize("pieces", [1, 7])
async def test_an_error_has_its_reason_in_its_line(pieces: int, caplog: pytest.LogCaptureFixture) -> None:
    error = {"message": SECRET, "type": "invalid_request_error", "code": "unsupported", "param": "tools[0]"}
    fields = await line_of_error(json.dumps({"error": error}).encode(), caplog, pieces=pieces)
    assert reason_in(fields) == ("400", "invalid_request_error", "unsupported", "tools[0]")
    assert SECRET not in caplog.text


@pytest.mark.parametrize("value", HOSTILE)
async def test_an_error_writes_only_names_into_its_line(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    error = {"message": SECRET, "type": value, "code": value, "param": value}
    assert reason_in(await line_of_error(json.dumps({"error": error}).encode(), caplog)) == (
        "400",
        "-",
        "-",
        "-",
    )


@pytest.mark.parametrize("pieces", [1, 40])
async def test_a_long_error_is_passed_on_and_not_read(pieces: int, caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"error": {"type": "t", "message": "m" * 1_000_000}}).encode()
    assert reason_in(await line_of_error(body, caplog, pieces=pieces)) == ("400", "-", "-", "-")


def test_a_refused_request_has_its_reason_in_its_line(server: Server, http: httpx.Client) -> None:
    bad = {**PROMPT, "max_tokens": -1}
    assert http.post("/v1/completions", json=bad, headers={"x-request-id": "refused"}).status_code == 400
    fields = line(server, "refused")
    assert (fields["status"], fields["error_type"]) == ("400", "invalid_request_error")
    assert fields["error_param"] == "max_tokens"
    headers = {"authorization": "Bearer wrong"}
    assert http.post("/v1/completions", json=PROMPT, headers=headers).status_code == 401
    reason = " status=401 ", " error_type=authentication_error error_code=invalid_api_key error_param=-"
    wait_until(
        lambda: any(all(each in line for each in reason) for line in server.log.read_text().splitlines()),
        "the line of a request without a key",
    )
    assert SECRET not in server.log.read_text()


@pytest.mark.parametrize("text", ["a b", 'a"b', "a=b", "a\nb", "ü", "x" * 1000])
def test_a_clients_text_stays_one_value_of_one_line(text: str) -> None:
    record = RequestRecord("POST", "/v1/completions", {})
    record.model = text
    shown = line_of(record, record.arrived)
    assert "\n" not in shown
    assert shown.isascii()
    assert len(shown) < 1000
    assert shown.index(" tenant=") < shown.index(" prompt_tokens=")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--otlp-traces-endpoint", "grpc://collector:4317"], "by OTLP over HTTP, not by gRPC"),
        (["--collect-detailed-traces", "all"], "--collect-detailed-traces is not supported"),
    ],
)
def test_what_traces_cannot_do_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        parse_args(["builtin://tiny", *flags])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err
