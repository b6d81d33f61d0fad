"""Scrapes of /metrics: who may read which series, and that rendering blocks no requests."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from argosy_protocol.fleet import Endpoint, FleetDocument
from argosy_router.config import RouterConfig
from argosy_router.http.messages import Request
from argosy_router.main import build_parser
from argosy_router.metric_series import Counter, Histogram, Reading
from argosy_router.server import Router

from .fake_engine import FakeEngine
from .harness import chat, rig, service

KEYS = ("k1", "k2")


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


# who reads what


async def test_a_client_key_reads_its_own_figures_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k1 name=ann\nk2 name=bob\nk3 name=eve\n")
    async with rig([FakeEngine()], api_keys_file=file, admin_port=0) as r:
        for key, count in (("k1", 2), ("k2", 1)):
            for _ in range(count):
                answer = await r.http.post(
                    "/v1/chat/completions", json=chat(), headers={"authorization": f"Bearer {key}"}
                )
                assert answer.status_code == 200
        shown = {}
        for key in ("k1", "k2", "k3"):
            answer = await r.http.get("/metrics", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            shown[key] = answer.text
        everything = (await r.http.get(r.router.admin_url + "/metrics")).text
    own = 'argosy_router_usage_requests_total{key="%s",metered="yes",model="tiny"} %d.0'
    assert own % ("ann", 2) in lines(shown["k1"])
    assert own % ("bob", 1) in lines(shown["k2"])
    assert lines(shown["k3"]) == []
    for key, name in (("k1", "ann"), ("k2", "bob")):
        assert all(re.match(rf'argosy_router_usage_\w+{{key="{name}",', line) for line in lines(shown[key]))
        assert set(lines(shown[key])) <= set(lines(everything))
    assert "argosy_router_requests_total" in everything


class Reader:
    """A client of a router that does not listen."""

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self.said = (status, body.decode())


@pytest.mark.parametrize(("port", "told"), [(8081, "on its admin port (8081)."), (9, "on its admin port.")])
async def test_a_client_key_s_metrics_name_the_admin_port(port: int, told: str) -> None:
    """With the port where that is the documented one; another one is not its business."""
    router = Router(RouterConfig(replicas=("http://unused:1",), api_keys=("k",), admin_port=port))
    headers = [(b"host", b"x"), (b"authorization", b"Bearer k")]
    request = Request(b"GET", b"/metrics", headers, is_http10=False, keep_alive=True)
    reader = Reader()
    router.application.on_head(request)
    router.application.on_request(reader, request)  # type: ignore[arg-type]
    status, text = reader.said
    assert status == 200
    assert list(text_string_to_metric_families(text)), "the comment spoils nothing"
    assert text.startswith("# ")
    assert told in text.splitlines()[0]


async def test_without_keys_the_endpoint_has_no_metrics() -> None:
    async with rig([FakeEngine()], admin_port=0) as r:
        refused = await r.http.get("/metrics")
        assert refused.status_code == 404
        assert "admin port" in refused.json()["error"]["message"]
        assert "argosy_router_requests_total" in (await r.http.get(r.router.admin_url + "/metrics")).text


def test_no_flag_opens_them() -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--replica", "http://127.0.0.1:1", "--open-metrics"])


# scrapes and the data plane


def fleet_of(count: int) -> FleetDocument:
    """A service with replicas on which nothing listens, and some services without replicas."""
    endpoints = tuple(Endpoint(name=f"r{number}", url="http://127.0.0.1:9") for number in range(count))
    others = (service([], name=f"s{number}", model=f"m{number}") for number in range(min(count, 131)))
    return FleetDocument(services=(service([], endpoints=endpoints), *others))


async def turns_during(scrape: asyncio.Task[bytes]) -> int:
    """How often the loop came round to others until `scrape` was done."""
    turns = 0
    while not scrape.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


async def test_a_large_scrape_lets_others_run_between_slices() -> None:
    async with rig(document=fleet_of(512), wait=False) as r:
        metrics = r.router.metrics
        for number in range(512):
            for reason in range(8):
                metrics.routes.add(("tiny", f"r{number}", f"reason-{reason}", "synced"))
            metrics.ttft_error.observe(("tiny", f"r{number}"), 0.1)
        scrape = asyncio.create_task(metrics.scrape())
        turns = await turns_during(scrape)
        text = scrape.result()
        assert text.count(b'replica="r511"') > 40
        assert turns > len(text) / 40_000, "no slice makes more text than that"


async def test_scrapes_at_the_same_time_cost_one() -> None:
    router = Router(RouterConfig(replicas=("http://127.0.0.1:1",), admin_port=-1))
    first, second = await asyncio.gather(router.metrics.scrape(), router.metrics.scrape())
    assert first is second
    assert await router.metrics.scrape() is not first, "later ones see later figures"


async def test_a_scraper_that_leaves_ends_no_other_scrape() -> None:
    router = Router(RouterConfig(replicas=("http://127.0.0.1:1",), admin_port=-1))
    leaves, stays = (asyncio.create_task(router.metrics.scrape()) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    assert b"argosy_router_build_info" in await stays


async def test_a_fleet_that_changes_during_a_scrape_does_not_break_it() -> None:
    async with rig(document=fleet_of(130), wait=False) as r:
        for count, series in enumerate(r.router.metrics.series):
            parts = series.parts("")
            assert next(parts).startswith("# HELP ")
            next(parts, "")  # of 130 rows not all are read yet
            r.discovery.set(fleet_of(130 + count % 2))
            r.router.metrics.requests.add(("tiny", str(count)))
            assert "".join(parts).count("\n") >= 0, "it ends"


def test_the_exposition_is_what_prometheus_reads() -> None:
    counter = Counter("asked", 'How often.\nA "word" \\ more', ("model", "code"))
    counter.add(('a"b\\c\nd', "200"), 3)
    histogram = Histogram("seconds", "Time.", ("model",), (0.1, 1, 2.5))
    for value in (0.05, 0.5, 0.7, 99.0):
        histogram.observe(("m",), value)
    gauge = Reading("gauge", "depth", "Depth.", ("b", "a"), lambda: [(("1", "2"), 0.5), (("1", "2"), 1.0)])
    text = "".join(part for series in (counter, histogram, gauge) for part in series.parts("x_"))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {(f.name, f.type) for f in families.values()} == {
        ("x_asked", "counter"),
        ("x_seconds", "histogram"),
        ("x_depth", "gauge"),
    }
    (sample,) = families["x_asked"].samples
    assert (sample.name, sample.labels, sample.value) == (
        "x_asked_total",
        {"model": 'a"b\\c\nd', "code": "200"},
        3.0,
    )
    assert families["x_asked"].documentation == 'How often.\nA "word" \\ more'
    buckets = {s.labels["le"]: s.value for s in families["x_seconds"].samples if s.name == "x_seconds_bucket"}
    assert buckets == {"0.1": 1.0, "1": 3.0, "2.5": 3.0, "+Inf": 4.0}
    totals = {s.name: s.value for s in families["x_seconds"].samples if "le" not in s.labels}
    assert totals["x_seconds_count"] == 4.0
    assert abs(totals["x_seconds_sum"] - 100.25) < 1e-9
    (depth,) = families["x_depth"].samples
    assert (depth.labels, depth.value) == ({"a": "2", "b": "1"}, 1.5)
