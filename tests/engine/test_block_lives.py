"""Times of KV blocks in the prefix cache (`--kv-cache-metrics`)."""

from __future__ import annotations

from itertools import cycle

from prometheus_client.parser import text_string_to_metric_families

from argosy_engine.api.observability.metrics import EngineMetrics
from argosy_engine.config import EngineArgs
from argosy_engine.core.block_pool import MAX_RECORDS, MAX_USES, BlockLives, BlockPool
from argosy_engine.core.engine_core import EngineCore
from argosy_engine.core.prefix_residency import PrefixAnnouncer, PrefixResidency, WaitingTokens
from argosy_engine.messages import BlockLife, EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from argosy_engine.params import SamplingParams
from fake_executor import BLOCK, FakeExecutor


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def followed_pool(lives: BlockLives) -> BlockPool:
    return BlockPool(2, PrefixResidency(PrefixAnnouncer(), WaitingTokens(BLOCK, lambda _: False), lives))


def test_a_blocks_life_lasts_from_its_allocation_to_its_eviction() -> None:
    clock = Clock()
    lives = BlockLives(1.0, clock)
    pool = followed_pool(lives)
    (block_id,) = pool.allocate(1)
    pool.register(block_id, b"prefix")
    pool.free([block_id])
    for clock.now in (3.0, 4.0, 9.0):
        pool.share([block_id])
        pool.free([block_id])
    assert lives.take() == []
    clock.now = 11.0
    pool.allocate(1)
    assert lives.take() == [BlockLife(11.0, 2.0, [1.0, 5.0])]
    assert lives.take() == []


def test_a_block_that_no_other_request_used_is_idle_since_its_allocation() -> None:
    clock = Clock()
    lives = BlockLives(1.0, clock)
    lives.allocated(1)
    clock.now = 2.0
    lives.evicted(1)
    assert lives.take() == [BlockLife(2.0, 2.0)]


def test_a_block_that_was_never_cached_leaves_no_record_and_no_time_of_its_next_life() -> None:
    clock = Clock()
    lives = BlockLives(1.0, clock)
    pool = followed_pool(lives)
    pool.free(pool.allocate(1))
    clock.now = 5.0
    (block_id,) = pool.allocate(1)
    pool.register(block_id, b"prefix")
    pool.free([block_id])
    clock.now = 6.0
    assert pool.reset_prefix_cache()
    assert lives.take() == [BlockLife(1.0, 1.0)]


def test_only_drawn_blocks_are_followed() -> None:
    draws = cycle((0.05, 0.5))
    lives = BlockLives(0.1, Clock(), lambda: next(draws))
    for block_id in range(10):
        lives.allocated(block_id)
        lives.used(block_id)
    for block_id in range(10):
        lives.evicted(block_id)
    assert len(lives.take()) == 5


def test_uses_and_records_are_bounded() -> None:
    lives = BlockLives(1.0, Clock())
    for _ in range(MAX_RECORDS + 5):
        lives.allocated(1)
        for _ in range(MAX_USES + 5):
            lives.used(1)
        lives.evicted(1)
    records = lives.take()
    assert len(records) == MAX_RECORDS
    assert {len(life.reuse_gaps_s) for life in records} == {MAX_USES - 1}


def test_a_core_reports_the_lives_of_blocks_that_it_evicts() -> None:
    args = EngineArgs.of(
        model="builtin://tiny", block_size=BLOCK, kv_cache_metrics=True, kv_cache_metrics_sample=1.0
    )
    core = EngineCore(args, FakeExecutor())
    metrics = EngineMetrics(core.config)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for first in range(core.kv.num_blocks):
        prompt = [first, *range(2, 2 * BLOCK + 2)]
        core.add_request(EngineCoreRequest(f"request {first}", prompt, params, 0.0))
        while core.has_work:
            metrics.on_core_outputs(core.step())
    metrics.on_core_outputs(EngineCoreOutputs(stats=core.stats()))
    assert sums(metrics)["lifetime"][0] == sums(metrics)["idle_before_evict"][0] > 0


def test_the_metrics_have_the_lives_that_a_core_reports() -> None:
    args = EngineArgs.of(model="builtin://tiny", kv_cache_metrics=True)
    metrics = EngineMetrics(EngineCore(args, FakeExecutor()).config)
    stats = SchedulerStats(evicted_blocks=[BlockLife(11.0, 2.0, [1.0, 5.0])])
    metrics.on_core_outputs(EngineCoreOutputs(stats=stats))
    assert sums(metrics) == {"lifetime": (1, 11.0), "idle_before_evict": (1, 2.0), "reuse_gap": (2, 6.0)}


def sums(metrics: EngineMetrics) -> dict[str, tuple[float, float]]:
    """Count and sum of each histogram, by the middle of its name."""
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    return {
        kind: (samples[f"vllm:kv_block_{kind}_seconds_count"], samples[f"vllm:kv_block_{kind}_seconds_sum"])
        for kind in ("lifetime", "idle_before_evict", "reuse_gap")
    }
