"""What the core was doing when it died, for its log: load, requests, last steps. No text, no token ids, bounded."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice
from typing import Any

from argosy_engine.core.engine_core import EngineCore
from argosy_engine.core.request import Request
from argosy_engine.worker.step import SchedulerOutput

logger = logging.getLogger("argosy.core")

MAX_REQUESTS = 64
"""Requests listed each for the queue and the last step; the rest is counted."""

_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "logprobs")
"""Numbers only: stop strings, bad words and schemas are the user's text."""


def log_dump(core: EngineCore) -> None:
    """Never raises: what is broken may be the very thing it describes."""
    try:
        logger.error("%s", describe(core))
    except Exception:
        logger.exception("the state of the engine core could not be described")


def describe(core: EngineCore) -> str:
    """Some lines of `name: key=value ...`; at most `MAX_REQUESTS` per list."""
    config, scheduler = core.config, core.scheduler
    lines = [
        "state of the engine core at its end",
        f"  engine: model={config.model_name} architecture={config.architecture} device={config.device} "
        f"dtype={config.dtype} max_model_len={config.max_model_len} block_size={config.block_size} "
        f"num_gpu_blocks={config.num_gpu_blocks} max_num_seqs={config.max_num_seqs} "
        f"max_num_batched_tokens={config.max_num_batched_tokens}",
        f"  scheduler: running={len(scheduler.running)} waiting={scheduler.num_waiting} "
        f"kv_cache_usage={core.kv.usage:.3f}",
    ]
    lines += _listed("running", scheduler.running, len(scheduler.running), _request)
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
