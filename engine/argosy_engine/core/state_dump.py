"""State dump of the engine core for its log: load, requests and their ages, last steps.

It is written when the core dies and on SIGUSR1 (`osproc.describe_on_signal`). It contains no text and no token ids,
and its length is bounded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from argosy_engine.core.engine_core import EngineCore
from argosy_engine.core.request import Request
from argosy_engine.messages import SchedulerOutput

logger = logging.getLogger("argosy.core")

MAX_REQUESTS = 64
"""Maximum number of requests in each list; the rest is only counted."""

_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "logprobs")
"""Sampling parameters to list: numbers only, because stop strings, bad words and schemas are the user's text."""


def log_dump(core: EngineCore) -> None:
    """Log the state of the core. Never raises, although the state may be inconsistent."""
    try:
        logger.error("%s", describe(core))
    except Exception:
        logger.exception("the state of the engine core could not be described")


def describe(core: EngineCore, title: str = "state of the engine core at its end") -> str:
    """Describe the core in lines of `name: key=value ...`, with at most `MAX_REQUESTS` requests per list."""
    now = time.monotonic()
    config, scheduler = core.config, core.scheduler
    lines = [
        title,
        f"  engine: model={config.model_name} architecture={config.architecture} device={config.device} "
        f"dtype={config.dtype} max_model_len={config.max_model_len} block_size={config.block_size} "
        f"num_gpu_blocks={config.num_gpu_blocks} max_num_seqs={config.max_num_seqs} "
        f"max_num_batched_tokens={config.max_num_batched_tokens}",
        f"  scheduler: running={len(scheduler.running)} waiting={scheduler.num_waiting} "
        f"blocked={len(scheduler.blocked)} in_flight={len(scheduler.in_flight)} kv_cache_usage={core.kv.usage:.3f}",
        f"  grammars: {core.structured.describe()}",
        f"  step: began {now - core.step_began_at:.3f} s ago, "
        + ("not over" if core.is_stepping else f"ended {now - core.step_ended_at:.3f} s ago"),
    ]

    def aged(request: Request) -> str:
        return (
            f"{_request(request)} age={now - request.queued_at:.1f}s "
            f"still={core.watchdog.still_s(request.request_id):.1f}s"
        )

    for name, requests in (
        ("running", list(scheduler.running)),
        ("waiting", list(scheduler.waiting)),
        ("blocked", list(scheduler.blocked.values())),
    ):
        lines += _listed(name, requests, len(requests), aged)
    for step in core.last_steps:
        lines += _step(step)
    return "\n".join(lines)


def _request(request: Request) -> str:
    params = request.sampling_params
    values = " ".join(f"{name}={getattr(params, name)}" for name in _PARAMETERS if hasattr(params, name))
    return (
        f"{request.request_id}: {request.status.name} prompt={request.num_prompt_tokens} "
        f"output={request.num_output_tokens} computed={request.num_computed_tokens} "
        f"preemptions={request.num_preemptions} {values}"
    )


def _step(step: SchedulerOutput) -> list[str]:
    new = {request.request_id: request for request in step.new_requests}
    lines = [
        f"  last step: tokens={step.total_num_scheduled_tokens} requests={len(step.num_scheduled_tokens)} "
        f"new={len(new)} freed={len(step.finished_request_ids)}"
    ]

    def scheduled(item: tuple[str, int]) -> str:
        request_id, tokens = item
        first = new.get(request_id)
        known = "" if first is None else f" of {len(first.token_ids)}, {first.num_computed_tokens} computed"
        return f"{request_id}: {tokens} tokens{known}"

    return lines + _listed(
        "scheduled", step.num_scheduled_tokens.items(), len(step.num_scheduled_tokens), scheduled
    )


def _listed(name: str, items: Iterable[Any], count: int, line: Any) -> list[str]:
    lines = [f"    {line(item)}" for item in islice(items, MAX_REQUESTS)]
    if count > MAX_REQUESTS:
        lines.append(f"    and {count - MAX_REQUESTS} more")
    return [f"  {name}:", *lines] if lines else []
