"""A replica whose image is its tenant's own, and which says what it likes: what it costs other tenants' services."""

from __future__ import annotations

import asyncio
import gc
import time
import timeit
import tracemalloc
from typing import Any

import msgspec
import pytest

from argosy_protocol.headers import ID_COMMENT, internal_key
from argosy_protocol.reports import ADMIN_KEY_UID, LOAD_PATH, LoadReport
from argosy_protocol.telemetry import Cleared, Draining, Hello, Load, Stored, encode_frame, pack_u32, pack_u64
from argosy_router.fleet import telemetry
from argosy_router.fleet.foreign_engines import parse_load
from argosy_router.fleet.replica import MAX_REQUESTS, MAX_TOKENS
from argosy_router.fleet.telemetry import (
    CHUNK_BURST,
    CLEAR_BURST,
    CLEARS_PER_S,
    FRAME_BURST,
    FRAME_BURST_IN_ALL,
    FRAMES_PER_S,
    FRAMES_PER_S_IN_ALL,
    SERVICE_CHUNK_BURST,
    SERVICE_CHUNKS_PER_S,
    SERVICE_CLEAR_BURST,
    SERVICE_CLEARS_PER_S,
    SERVICE_FRAME_BURST,
    SERVICE_FRAMES_PER_S,
    FleetTelemetryBudget,
    ServiceTelemetryBudget,
    TelemetryBudget,
)
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.http.sse import READ_BYTES
from argosy_router.http.upstream import Collector
from argosy_router.proxy.answer import ModelRenaming
from argosy_router.proxy.answer_tokens import Transcript
from argosy_router.proxy.call import Renaming
from argosy_router.proxy.decoded_types import Outputs, StreamShape
from argosy_router.proxy.ended_response import AdoptedAnswer
from argosy_router.proxy.relay import StreamRelay, UnaryRelay
from argosy_router.proxy.request_body import TokenEstimate

from .fake_engine import FakeEngine
from .harness import Rig, rig

FLEET_KEY = b"0123456789abcdef"
NAN, INF = float("nan"), float("inf")


async def load_report(r: Rig) -> LoadReport:
    response = await r.http.get(
        f"{r.router.admin_url}{LOAD_PATH}",
        headers={"authorization": f"Bearer {internal_key(FLEET_KEY, ADMIN_KEY_UID)}"},
    )
    assert response.status_code == 200
    return msgspec.json.decode(response.content, type=LoadReport)


@pytest.mark.parametrize(
    "figures",
    [
        {"kv_usage": NAN},
        {"kv_usage": INF},
        {"kv_usage": 1e308},
        {"kv_usage": -1e308},
        {"num_running": 2**63 - 1, "num_waiting": 2**63 - 1, "queued_uncached_tokens": 2**63},
        {"num_running": -(2**63), "queued_uncached_tokens": -(2**63), "num_yielding": -1},
        {"prefill_tokens_per_s": 5e-324, "decode_step_s": INF, "queued_uncached_tokens": 2**63},
        {"prefill_tokens_per_s": -1.0, "decode_step_s": NAN, "longest_step_s": NAN, "kv_usage": NAN},
    ],
    ids=str,
)
async def test_no_figure_of_a_replica_spoils_the_report_of_all_services(figures: dict[str, Any]) -> None:
    engine = FakeEngine(
        key=internal_key(FLEET_KEY, "uid-1"), hello={"data_parallel_size": 2**62, "max_num_seqs": 2**62}
    )
    async with rig([engine], fleet_key=FLEET_KEY, admin_port=0) as r:
        before = r.replica(0).heard_at
        engine.announce(Load(**{"core_step_age_s": 0.0, **figures}))
        await r.until(lambda: r.replica(0).heard_at != before)
        ((replica,),) = [each.replicas for each in (await load_report(r)).services]
        assert 0.0 <= replica.kv_usage <= 1.0
        assert 0 <= replica.requests <= MAX_REQUESTS
        assert 0 <= replica.queued_tokens <= MAX_TOKENS
        assert 0.0 <= r.replica(0).load.wait_s < INF
        assert (await r.chat()).status_code == 200


@pytest.mark.parametrize(
    "exposition",
    [
        b"vllm:num_requests_running 1e30\nvllm:num_requests_waiting 1e14\nvllm:request_prompt_tokens_sum 1e15\n",
        b'vllm:num_requests_running{e="0"} 1.7e308\nvllm:num_requests_running{e="1"} 1.7e308\n'
        b"vllm:num_requests_running 1\n",
        b"vllm:num_requests_running 1\nvllm:num_requests_waiting 1e15\nvllm:request_prompt_tokens_sum 1e15\n"
        b"vllm:request_prompt_tokens_count 1e-300\n",
    ],
)
def test_metrics_of_another_engine_are_bounded(exposition: bytes) -> None:
    load = parse_load(exposition)
    assert load is None or (load.running + load.waiting <= 2 * MAX_REQUESTS)
    assert load is None or load.queued_tokens <= MAX_TOKENS


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_running{\n",
        b'vllm:num_requests_running{a="\n',
        b'vllm:num_requests_running{a="b",\n',
        b"vllm:num_requests_running 1\n",
    ],
)
def test_the_time_to_read_metrics_grows_with_their_length(line: bytes) -> None:
    """Labels without an end were read on to the end of the exposition, for each sample anew: with four megabytes a
    replica stopped its router for an hour. CPU times are compared."""

    def cpu_s(number: int) -> float:
        exposition = line * number
        return min(timeit.repeat(lambda: parse_load(exposition), timer=time.process_time, number=1, repeat=3))

    assert cpu_s(3200) < 64 * max(cpu_s(200), 0.0005)


def test_a_body_that_comes_byte_by_byte_is_not_copied_for_each() -> None:
    """A replica that sent most of four megabytes at once and then single bytes kept a core of its router busy."""

    def cpu_s(size: int) -> float:
        collector = Collector(1 << 30)
        collector.on_data(b"x" * size)

        def receive() -> None:
            for _ in range(200):
                collector.on_data(b"y")

        return min(timeit.repeat(receive, timer=time.process_time, number=1, repeat=3))

    async def compare() -> None:
        assert cpu_s(8 << 20) < 16 * max(cpu_s(1 << 10), 0.0005)

    asyncio.run(compare())


SHORT_EVENT = b'data: {"created":1,"choices":[{"index":0,"token_ids":[1]}]}\n\n'


@pytest.mark.parametrize(
    ("begin", "value", "end"),
    [
        (ID_COMMENT + b"0 ", b"1,", b'1\ndata: {"created":1,"choices":[]}\n\n'),
        (b'data: {"created":1,"choices":[', b'{"index":0},', b'{"index":0}]}\n\n'),
        (b'data: {"choices":[],"usage":{', b'"text":"",', b'"a":1}}\n\n'),
        (b'data: {"choices":[1],"x":[', b'{"usage":{"completion_tokens":1}},', b"1]}\n\n"),
        (b'data: {"choices":[1],"x":[', b'"usage",', b"1]}\n\n"),
        (b'data: {"choices":[1],"usage"', b" ", b":1}\n\n"),
        (b": ", b"\n\n: ", b"\n\n"),
        (b"", b": \n\n", SHORT_EVENT),
    ],
    ids=["ids", "choices", "texts", "usages", "names", "spaces", "events", "comments"],
)
@pytest.mark.parametrize("can_continue", [False, True])
def test_an_event_full_of_short_values_costs_a_few_searches_of_it(
    begin: bytes, value: bytes, end: bytes, can_continue: bool
) -> None:
    """CPU times are compared: one of four megabytes held the event loop for 130 ms."""

    def cpu_s(events: bytes) -> float:
        def receive() -> float:
            held = BodyReservation(BodyMemory(1 << 30), "service", 0)
            transcript = Transcript(StreamShape(1, has_usage=False)) if can_continue else None
            relay = StreamRelay(transcript, held, hides_usage=True, hides_progress=True)
            longest = 0.0
            for start in range(0, len(events), READ_BYTES):
                began = time.process_time()
                relay.feed(events[start : start + READ_BYTES])
                longest = max(longest, time.process_time() - began)
            began = time.process_time()
            assert relay.usage is None or relay.usage.completion_tokens < 2
            assert not relay.has_whole_usage
            return max(longest, time.process_time() - began)

        return min(receive() for _ in range(3))

    events = SHORT_EVENT + begin + value * ((4_000_000 if begin else READ_BYTES) // len(value)) + end
    text = b"a" * 4_000_000
    search_s = min(timeit.repeat(lambda: text.count(b"\n\n"), timer=time.process_time, number=1, repeat=5))
    assert cpu_s(events) < 20 * search_s


def test_long_events_that_a_client_has_are_not_kept() -> None:
    """Those of two reads were, for as long as their stream: eight megabytes, which counted nowhere."""
    long = b'data: {"created":1,"choices":[],"x":"%b"}\n\n' % (b"x" * 3_000_000)
    tracemalloc.start()
    try:
        relay = StreamRelay(None, BodyReservation(BodyMemory(1 << 30), "service", 0))
        for _ in range(2):
            assert relay.feed(long + b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n')
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert relay.usage is not None
    assert relay.usage.prompt_tokens == 3
    assert kept < 1 << 20


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_comes_a_few_bytes_at_a_time_takes_what_it_counts(is_stream: bool) -> None:
    """Each piece was an object of its own: of two bytes it took thirty times as many."""
    held = BodyReservation(BodyMemory(1 << 30), "service", 0)
    relay = StreamRelay(None, held) if is_stream else UnaryRelay(held)
    pieces = [b"ab" * 500, b"de" * 5000]
    tracemalloc.start()
    try:
        relay.feed(b"data: ")
        for number in range(100_000):
            relay.feed(bytes((97, 97 + number % 20)))
        for piece in pieces:
            relay.feed(piece)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    rest = relay.feed(b"end\n\n") + relay.end()
    assert len(rest) == 211_011
    assert rest.endswith(pieces[0] + pieces[1] + b"end\n\n")
    assert kept < 1 << 19


def test_an_event_full_of_names_is_renamed_up_to_a_bound() -> None:
    """Another engine's id of the response is a tenth as long as the router's: an event of 64 MiB took ten times as
    much, uncounted; and four megabytes of models a tenth of a second."""
    adopted = AdoptedAnswer("resp_" + "a" * 50)
    event = b'data: {"id":"resp_x","x":[%b1]}\n\n' % (b'"resp_x",' * 500_000)
    renamed = adopted.renamed(event)
    assert adopted.is_foreign
    assert renamed.startswith(b'data: {"id":"resp_aaa')
    assert len(renamed) < 1.1 * len(event)
    renamed = ModelRenaming(Renaming("x", "much longer")).piece(b'"model":"x",' * 100_000)
    assert renamed.startswith(b'"model":"much longer","model":"much longer",')
    assert renamed.count(b"much longer") < 50_000


@pytest.mark.parametrize("limit", [None, 5])
def test_a_negative_length_of_a_model_returns_no_tokens_to_a_key(limit: int | None) -> None:
    """An answer without usage counts by what its replica can have generated, with the length of its model at most: a
    negative one filled the bucket of the key, whose other requests went to other services."""
    estimate = TokenEstimate(Outputs(3, limit, 1.0), 10, 20.0)
    assert estimate.generated_in(1.0, 0.01, -(10**12)) == 10
    assert estimate.unsent_in(1.0, 0.01, 0, 100, -(10**12)) == 0


async def test_resets_of_a_cache_do_not_fill_the_routers_memory() -> None:
    """Each takes a slot of the index until it is scrubbed, and entries of many holders have room for all slots."""
    async with rig([FakeEngine(), FakeEngine()]) as r:
        syncs = r.replica(0).syncs
        chunk = Stored(hashes=pack_u64([7]), tokens=pack_u32([1]))
        r.engines[0].announce_raw((encode_frame(Cleared()) + encode_frame(chunk)) * 5000)
        await r.until(lambda: r.replica(0).syncs > syncs)
        assert r.replica(0).prefixes.slot <= 2 + CLEAR_BURST + 2
        assert (await r.chat()).status_code == 200


class Waiting:
    """A request at a replica that nobody else can take."""

    looks = 0

    def core_stalled(self, age_s: float, bound_s: float) -> None:
        self.looks += 1


async def test_a_stall_that_is_told_thousands_of_times_is_looked_at_once_in_a_while() -> None:
    """For each report all requests of the replica were looked at: a read of its telemetry with a thousand of them held
    the event loop for half a second."""
    async with rig([FakeEngine()]) as r:
        replica, waiting = r.replica(0), Waiting()
        replica.inflight_attempts.add(waiting)
        began = time.monotonic()
        stalled = Load(core_step_age_s=1000.0)
        last = msgspec.structs.replace(stalled, queued_uncached_tokens=7)
        r.engines[0].announce_raw(encode_frame(stalled) * 3000 + encode_frame(last))
        await r.until(lambda: replica.load.reported_tokens == 7)
        passed_s = time.monotonic() - began
        replica.inflight_attempts.discard(waiting)
        assert 1 <= waiting.looks <= 2 + 2 * passed_s


async def test_announcing_a_drain_over_and_over_changes_the_fleet_once() -> None:
    async with rig([FakeEngine(), FakeEngine()]) as r:
        before = r.router.fleet.revision
        r.engines[0].announce_raw(encode_frame(Draining()) * 2000)
        await r.until_state(0, "draining")
        await asyncio.sleep(0)
        assert r.router.fleet.revision <= before + 2


async def test_a_change_of_a_replica_leaves_the_candidates_of_other_services() -> None:
    async with rig([FakeEngine()]) as r:
        fleet = r.router.fleet
        (service,) = fleet.services.values()
        calls: list[str] = []
        other = type("Other", (), {"invalidate": lambda self: calls.append("other"), "replicas": {}})()
        fleet.services["default/other"] = other  # type: ignore[assignment]
        try:
            r.engines[0].announce(Draining())
            await r.until_state(0, "draining")
        finally:
            del fleet.services["default/other"]
        assert service is next(iter(fleet.services.values()))
        assert calls == []


@pytest.mark.parametrize("field", ["epoch", "model_fingerprint", "engine_version"])
async def test_a_long_name_is_not_kept(field: str) -> None:
    """An epoch is in every report of all replicas."""
    async with rig([FakeEngine(hello={field: "x" * 1000})], wait=False) as r:
        await r.until(lambda: r.engines[0].connections >= 2)
        assert r.replica(0).hello is None


async def test_a_second_hello_ends_the_stream() -> None:
    async with rig([FakeEngine()]) as r:
        syncs = r.replica(0).syncs
        assert r.replica(0).hello is not None
        hello = msgspec.structs.replace(r.replica(0).hello or _hello(), epoch="another")
        r.engines[0].announce(hello)
        await r.until(lambda: r.replica(0).syncs > syncs)
        assert r.replica(0).hello is not None
        assert r.replica(0).hello.epoch != "another"


async def test_streams_that_end_at_once_are_asked_for_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    async with rig([FakeEngine()]) as r:
        sleep = asyncio.sleep

        async def noted(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0.001)

        monkeypatch.setattr(telemetry.asyncio, "sleep", noted)
        for _ in range(8):
            syncs = r.replica(0).syncs
            r.engines[0].cut_telemetry()
            await r.until(lambda syncs=syncs: r.replica(0).syncs > syncs)
    assert max(pauses) >= 4 * telemetry.BACKOFF_BASE_S


def test_a_budget_lasts_and_refills() -> None:
    budget = TelemetryBudget()
    assert all(not budget.excess(100.0, chunks=0, clears=False) for _ in range(int(FRAME_BURST)))
    assert budget.excess(100.0, chunks=0, clears=False) == "frames"
    assert all(not budget.excess(101.0, chunks=0, clears=False) for _ in range(int(FRAMES_PER_S)))
    assert budget.excess(101.0, chunks=0, clears=False) == "frames"
    assert not budget.excess(102.0, chunks=int(CHUNK_BURST), clears=False)
    assert budget.excess(102.0, chunks=1, clears=False) == "chunks"
    assert all(not budget.excess(103.0, chunks=0, clears=True) for _ in range(int(CLEAR_BURST)))
    assert budget.excess(103.0, chunks=0, clears=True) == "resets of the prefix cache"
    assert not budget.excess(103.0 + 1 / CLEARS_PER_S, chunks=0, clears=True)


def sustained_frames(budget: TelemetryBudget, now: float) -> int:
    """Frames of one second that pass once the burst is used up."""
    while not budget.excess(now, chunks=0, clears=False):
        pass
    return sum(not budget.excess(now + 1, chunks=0, clears=False) for _ in range(int(FRAME_BURST)))


def test_an_engine_of_many_cores_may_send_more_frames_within_a_bound() -> None:
    budget = TelemetryBudget()
    sustained = []
    for second, cores in enumerate((1, 8, 16, 32, 10**6, 1)):
        budget.grant_cores(cores, 100.0 + 10 * second)
        sustained.append(sustained_frames(budget, 100.0 + 10 * second))
    assert sustained == [5000, 5000, 6400, 12_800, 12_800, 5000]


def test_reporting_other_numbers_of_cores_over_and_over_gives_no_further_burst() -> None:
    budget = TelemetryBudget()
    passed = 0
    for cores in range(1000):
        budget.grant_cores(1 + cores % 64, 100.0)
        passed += sum(not budget.excess(100.0, chunks=0, clears=False) for _ in range(100))
    assert passed == FRAME_BURST


async def test_the_cores_that_an_engine_reports_raise_its_budget() -> None:
    earlier = _budgets()  # kept, so that the new one gets the address of none of them
    async with rig([FakeEngine(hello={"data_parallel_size": 16})]) as r:
        await r.until(lambda: r.replica(0).load.data_parallel_size == 16)
        # A compiled client cannot be given another budget by replacing a name, so its own is looked for.
        (budget,) = [each for each in _budgets() if not any(each is one for one in earlier)]
        assert sustained_frames(budget, time.monotonic() + 10) == 6400


async def test_frames_of_unknown_types_count() -> None:
    unknown = msgspec.msgpack.encode({"type": "of a later version"})
    async with rig([FakeEngine(), FakeEngine()]) as r:
        syncs = r.replica(0).syncs
        r.engines[0].announce_raw((len(unknown).to_bytes(4, "little") + unknown) * int(2 * FRAME_BURST))
        await r.until(lambda: r.replica(0).syncs > syncs)


# of all replicas of a service, and of all services


def spend(
    budget: ServiceTelemetryBudget, now: float, frames: float = 0, chunks: float = 0, clears: float = 0
) -> float:
    return budget.spend(now, frames=int(frames), chunks=int(chunks), clears=int(clears))


def test_the_replicas_of_a_service_together_keep_to_its_rates() -> None:
    budget = ServiceTelemetryBudget(FleetTelemetryBudget())
    budget.grant_replicas(10, 100.0)
    assert spend(budget, 100.0) == 0.0
    assert spend(budget, 100.0, frames=SERVICE_FRAME_BURST) == 0.0
    assert spend(budget, 100.0, frames=SERVICE_FRAMES_PER_S) == pytest.approx(1.0)
    assert spend(budget, 100.5) == pytest.approx(0.5)
    assert spend(budget, 101.0) == 0.0
    assert spend(budget, 101.0, chunks=SERVICE_CHUNK_BURST) == 0.0
    assert spend(budget, 101.0, chunks=3 * SERVICE_CHUNKS_PER_S) == pytest.approx(3.0)
    assert spend(budget, 200.0, clears=SERVICE_CLEAR_BURST + 20) == 0.0
    assert spend(budget, 200.0, clears=SERVICE_CLEARS_PER_S) == pytest.approx(1.0)


def test_while_all_services_are_in_debt_those_within_their_share_are_read() -> None:
    fleet = FleetTelemetryBudget()
    greedy = [ServiceTelemetryBudget(fleet) for _ in range(4)]
    modest = ServiceTelemetryBudget(fleet)
    share = FRAMES_PER_S_IN_ALL / 5
    for step in range(400):
        now = 100.0 + step / 10
        waits = [spend(budget, now, frames=SERVICE_FRAMES_PER_S / 10) for budget in greedy]
        assert spend(modest, now, frames=0.9 * share / 10) == 0.0
    assert all(waits), "four take twice as much as there is"
    assert spend(modest, now, frames=2 * FRAME_BURST_IN_ALL) > 0.0


def test_one_service_may_take_what_others_leave() -> None:
    fleet = FleetTelemetryBudget()
    budgets = [ServiceTelemetryBudget(fleet) for _ in range(1000)]
    for second in range(100):
        assert spend(budgets[0], 100.0 + second, frames=SERVICE_FRAMES_PER_S) == 0.0


def test_services_that_have_gone_take_no_share() -> None:
    fleet = FleetTelemetryBudget()
    gone = [ServiceTelemetryBudget(fleet) for _ in range(999)]
    budget, other = ServiceTelemetryBudget(fleet), ServiceTelemetryBudget(fleet)
    for each in gone:
        each.close()
    spend(other, 100.0)
    spend(other, 100.0, frames=2 * FRAME_BURST_IN_ALL)
    assert spend(budget, 100.0, frames=FRAME_BURST_IN_ALL / 4) == 0.0


async def test_a_service_in_debt_is_not_read_until_that_is_paid() -> None:
    """Its engines wait meanwhile: nothing is lost, and no replica counts as silent."""
    earlier = _service_budgets()
    async with rig([FakeEngine()]) as r:
        (budget,) = [each for each in _service_budgets() if not any(each is one for one in earlier)]
        syncs = r.replica(0).syncs
        began, debt_s = time.monotonic(), 0.5
        spend(budget, began, frames=SERVICE_FRAME_BURST + debt_s * SERVICE_FRAMES_PER_S)
        for _ in range(2):  # the first is read, and nothing after it
            before = r.replica(0).heard_at
            r.engines[0].announce(Load(core_step_age_s=0.0))
            await r.until(lambda before=before: r.replica(0).heard_at != before)
        assert time.monotonic() - began >= debt_s - 0.01
        assert r.replica(0).syncs == syncs
        assert r.replica(0).state == "synced"


def _budgets() -> list[TelemetryBudget]:
    # isinstance would read __class__ of every object alive, and torch has proxies that warn when it is read.
    return [each for each in gc.get_objects() if type(each) is TelemetryBudget]


def _service_budgets() -> list[ServiceTelemetryBudget]:
    return [each for each in gc.get_objects() if type(each) is ServiceTelemetryBudget]


def _hello() -> Hello:
    return Hello(
        epoch="e",
        model="m",
        model_fingerprint="f",
        block_size=16,
        max_model_len=1,
        max_num_seqs=1,
        kv_cache_tokens=1,
    )
