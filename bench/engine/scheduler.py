"""Measure the CPU time of scheduler and KV cache: microseconds per running request and step, without a model.

A stub returns one token per request for every step, which leaves `Scheduler.schedule` and `Scheduler.update`, including
the KV cache's work, for plain requests: no grammars, no log probabilities, no outputs sent to the API process.
`core_step.py` includes these.

`decode` requests start at different lengths, so that one in 16 crosses a block boundary in each step; `boundary` is the
worst step, in which all cross one; `prefill` is a step that admits all prompts.

Times are the thread's CPU time, so that other processes hardly matter: the median over the steps of the best round.

    python bench/engine/scheduler.py [--requests 256] [--block-size 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from results import save

from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request
from argosy_engine.core.scheduler import Scheduler
from argosy_engine.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from argosy_engine.params import SamplingParams

PROMPT_TOKENS = 256
STEPS = 128


class Cost(NamedTuple):
    """Microseconds per request and step."""

    schedule: float
    update: float

    @property
    def total(self) -> float:
        return self.schedule + self.update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    rounds = [
        measure(options.requests, options.block_size, is_staggered)
        for _ in range(options.rounds)
        for is_staggered in (True, False)
    ]
    costs = {name: min(r[name] for r in rounds if name in r) for name in ("decode", "boundary", "prefill")}
    save({"argosy": {f"{name} us": [cost.total] for name, cost in costs.items()}}, options.json)
    print(f"{options.requests} running requests, block size {options.block_size}: us per request and step")
    print(f"{'step':<10}{'schedule':>10}{'update':>10}{'total':>10}")
    for name, cost in costs.items():
        print(f"{name:<10}{cost.schedule:>10.2f}{cost.update:>10.2f}{cost.total:>10.2f}")


def measure(num_requests: int, block_size: int, is_staggered: bool) -> dict[str, Cost]:
    """Measure one round. Returns `decode` if staggered, otherwise `boundary` and `prefill`."""
    scheduler = _scheduler(num_requests, block_size)
    for index in range(num_requests):
        extra = index % block_size if is_staggered else 0
        prompt = [(index * 7919 + i) % 50000 + 10 for i in range(PROMPT_TOKENS + extra)]
        params = SamplingParams(max_tokens=2 * STEPS, stop_token_ids=(2, 3), seed=1)
        scheduler.add(Request(EngineCoreRequest(f"{index:024x}", prompt, params, 0.0), block_size, True))
    gc.collect()
    gc.freeze()
    prefill = _step(scheduler)
    steps = [_step(scheduler) for _ in range(STEPS)]
    scheduler.abort(list(scheduler.requests))
    scheduler.check()
    gc.unfreeze()
    per_request = 1e6 / num_requests
    if is_staggered:
        return {"decode": _median(steps, per_request)}
    # Prompts end at a boundary: the first decode needs a new block, and every block_size-th after it.
    return {
        "boundary": _median(steps[::block_size], per_request),
        "prefill": _median([prefill], per_request),
    }


def _scheduler(num_requests: int, block_size: int) -> Scheduler:
    blocks = num_requests * ((PROMPT_TOKENS + 3 * STEPS) // block_size + 2)
    return Scheduler(
        KVCacheManager(blocks, block_size, True),
        max_num_batched_tokens=num_requests * (PROMPT_TOKENS + block_size),
        max_num_seqs=num_requests,
        max_model_len=PROMPT_TOKENS + 4 * STEPS,
        eos_token_ids=frozenset({0, 1}),
    )


def _step(scheduler: Scheduler) -> tuple[float, float]:
    """Run one step; returns the seconds spent in `schedule` and in `update`."""
    started = time.thread_time()
    step = scheduler.schedule()
    scheduled = time.thread_time()
    result = _execute(step)
    executed = time.thread_time()
    scheduler.update_from_output(step, result)
    return scheduled - started, time.thread_time() - executed


def _execute(step: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(list(step.num_scheduled_tokens), [[9] for _ in step.num_scheduled_tokens])


def _median(steps: list[tuple[float, float]], factor: float) -> Cost:
    return Cost(*(statistics.median(column) * factor for column in zip(*steps, strict=True)))


if __name__ == "__main__":
    main()
