"""Queued work that a replica reports: tokens to compute, without those that its cache holds."""

from __future__ import annotations

import pytest

from argosy_engine.attention.kv_cache_spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request, RequestStatus
from argosy_engine.core.scheduler import Scheduler
from argosy_engine.messages import EngineCoreRequest, ModelRunnerOutput
from argosy_engine.params import SamplingParams

BLOCK = 4
PREFIX = list(range(100, 120))
"""Five blocks."""
KINDS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FullAttentionSpec(0),),
    "sliding": (SlidingWindowSpec(0, 8),),
    "sliding first": (SlidingWindowSpec(0, 8), FullAttentionSpec(0)),
    "chunked first": (ChunkedAttentionSpec(0, 8), FullAttentionSpec(0)),
}


def make(kind: str = "full", *, caching: bool = True) -> Scheduler:
    """One request runs at a time."""
    kv = KVCacheManager(40, BLOCK, caching, 0.0, KINDS[kind], 64)
    return Scheduler(
        kv, max_num_batched_tokens=64, max_num_seqs=1, max_model_len=64, eos_token_ids=frozenset({0})
    )


def add(
    scheduler: Scheduler, name: str, prompt: list[int], *, max_tokens: int = 1, **params: object
) -> Request:
    message = EngineCoreRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **params), 0.0)  # type: ignore[arg-type]
    request = Request(message, BLOCK, True)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> None:
    planned = scheduler.schedule()
    names = list(planned.num_scheduled_tokens)
    scheduler.update_from_output(planned, ModelRunnerOutput(names, [[9]] * len(names)))
    scheduler.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_prefix_of_a_waiting_prompt_does_not_count(kind: str) -> None:
    scheduler = make(kind)
    add(scheduler, "warm", [*PREFIX, 1])
    step(scheduler)
    assert scheduler.queued_uncached_tokens == 0
    for number in range(10):
        add(scheduler, str(number), [*PREFIX, 2, 3])
    assert scheduler.queued_uncached_tokens == 10 * 2


def test_a_prefix_that_is_not_computed_yet_counts_once() -> None:
    """The first of them computes it for all."""
    scheduler = make()
    for number in range(10):
        add(scheduler, str(number), [*PREFIX, 2, 3])
    assert scheduler.queued_uncached_tokens == len(PREFIX) + 10 * 2
    step(scheduler)
    assert scheduler.queued_uncached_tokens == 9 * 2
    scheduler.abort([str(number) for number in range(10)])
    assert scheduler.queued_uncached_tokens == 0


def test_a_prefix_that_is_evicted_while_requests_wait_counts_again() -> None:
    scheduler = make()
    add(scheduler, "warm", [*PREFIX, 1])
    step(scheduler)
    waiting = add(scheduler, "waiting", [*PREFIX, 2, 3])
    assert scheduler.queued_uncached_tokens == 2
    assert scheduler.kv.reset_prefix_cache()
    assert scheduler.queued_uncached_tokens == waiting.num_tokens


def test_the_last_token_of_a_prompt_is_computed_even_if_all_is_cached() -> None:
    scheduler = make()
    add(scheduler, "warm", PREFIX)
    step(scheduler)
    add(scheduler, "same", PREFIX)
    assert scheduler.queued_uncached_tokens == BLOCK


@pytest.mark.parametrize("reason", ["no cache", "prompt logprobs"])
def test_requests_that_bypass_the_cache_count_whole(reason: str) -> None:
    scheduler = make(caching=reason != "no cache")
    add(scheduler, "warm", [*PREFIX, 1])
    step(scheduler)
    add(scheduler, "all", [*PREFIX, 2], **({"prompt_logprobs": 1} if reason == "prompt logprobs" else {}))
    assert scheduler.queued_uncached_tokens == len(PREFIX) + 1


def test_blocked_requests_count_like_waiting_ones() -> None:
    scheduler = make()
    message = EngineCoreRequest("blocked", [*PREFIX, 2, 3], SamplingParams(max_tokens=1), 0.0)
    request = Request(message, BLOCK, True)
    request.status = RequestStatus.WAITING_FOR_GRAMMAR
    scheduler.add(request)
    assert scheduler.queued_uncached_tokens == len(PREFIX) + 2
    add(scheduler, "warm", [*PREFIX, 1])
    step(scheduler)
    assert scheduler.queued_uncached_tokens == 2
    scheduler.unblock("blocked")
    assert scheduler.queued_uncached_tokens == 2
    step(scheduler)
    assert scheduler.queued_uncached_tokens == 0
