"""OpenTelemetry spans, as a collector receives them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from argosy_protocol.headers import RESPONSE_ID
from argosy_protocol.telemetry import Load
from argosy_router.config import ConfigError, RouterConfig
from span_collector import Collector, values_of

from .fake_engine import Connection, FakeEngine, Received, completion
from .harness import Rig, chat, rig

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


async def answer(connection: Connection, _: Received) -> None:
    connection.answer(200, completion(prompt_tokens=120, cached=96))


async def send(r: Rig, **headers: str) -> dict[str, str]:
    """Headers of the request as the engine got it."""
    await r.http.post("/v1/chat/completions", json=chat(), headers=headers)
    return r.engines[0].requests[-1].headers


async def test_a_request_is_one_span_between_client_and_engine(collector: Collector) -> None:
    async with rig([FakeEngine(script=answer)], otlp_traces_endpoint=collector.url) as r:
        r.engines[0].announce(Load(core_step_age_s=0.0, prefill_tokens_per_s=500.0))
        await r.until(lambda: r.replica(0).load.measured.prefill_tokens_per_s == 500.0)
        passed_on = await send(r, traceparent=PARENT, tracestate="vendor=1")
    (span,) = collector.spans
    _, trace, own, flags = passed_on["traceparent"].split("-")
    assert (trace, flags, passed_on["tracestate"]) == (PARENT.split("-")[1], "01", "vendor=1")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, PARENT.split("-")[2])
    assert span.span_id.hex() == own
    assert span.name == "chat/completions"
    assert span.end_time_unix_nano > span.start_time_unix_nano
    values = values_of(span.attributes)
    assert values["gen_ai.response.id"] == passed_on[RESPONSE_ID]
    expected = {
        "gen_ai.request.model": "tiny",
        "argosy.replica": "r0",
        "argosy.policy": "cost",
        "argosy.route": "only",
        "argosy.attempts": 1,
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.cache_read.input_tokens": 96,
        "argosy.predicted_cached_tokens": 0,
        "http.response.status_code": 200,
    }
    assert expected.items() <= values.items()
    assert values["argosy.predicted_time_to_first_token"] > 0
    assert collector.resources[0]["service.name"] == "argosy-router"


async def test_a_context_that_is_missing_or_broken_begins_a_trace(collector: Collector) -> None:
    async with rig([FakeEngine(script=answer)], otlp_traces_endpoint=collector.url) as r:
        contexts = [
            await send(r),
            await send(r, traceparent="00-zero-1-01"),
            await send(r, traceparent=UNSAMPLED),
        ]
    assert len({context["traceparent"].split("-")[1] for context in contexts}) == 3
    assert contexts[2]["traceparent"].endswith("-00")
    assert len(collector.spans) == 2, "a client that does not sample is obeyed"
    assert not any(span.parent_span_id for span in collector.spans)


async def test_failures_are_marked(collector: Collector) -> None:
    async def die(connection: Connection, _: Received) -> None:
        connection.die()

    async with rig([FakeEngine(script=die)], otlp_traces_endpoint=collector.url) as r:
        await r.chat()
    (span,) = collector.spans
    assert span.status.code == 2
    assert values_of(span.attributes)["http.response.status_code"] == 502


async def test_without_a_collector_the_clients_context_passes_through() -> None:
    async with rig([FakeEngine(script=answer)]) as r:
        assert (await send(r, traceparent=PARENT))["traceparent"] == PARENT


def test_the_endpoint_must_be_a_url() -> None:
    with pytest.raises(ConfigError, match="otlp-traces-endpoint"):
        RouterConfig(replicas=("http://a:1",), otlp_traces_endpoint="grpc://a:4317").check()
