"""Load generator: sends the requests of a run as their arrivals say, at most so many at once.

Owns: pacing, the limit of requests that run at once, and the clock of the run. Must not know: flags and figures.
Invariant: a request that fails ends nothing else; all outputs are returned, in the order of the requests.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from argosy_engine.benchmarks.endpoint_request import RequestFuncOutput, RequestTemplate, send_request
from argosy_engine.benchmarks.prompt_datasets import SampleRequest
from argosy_engine.benchmarks.streaming_http import StreamingHttp


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Outputs of a run, in the order of its requests."""

    outputs: list[RequestFuncOutput]
    duration: float
    """Seconds from the first arrival to the last answer."""
    client_cpu_s: float
    """CPU seconds that this process spent on them, in all threads."""


async def run_load(
    client: StreamingHttp,
    template: RequestTemplate,
    samples: Sequence[SampleRequest],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    models: Sequence[str] = (),
    on_done: Callable[[RequestFuncOutput], None] = lambda _: None,
) -> LoadResult:
    """Send each request at its time and wait for all answers.

    Args:
        arrivals: seconds after the start, ascending, one per sample.
        max_concurrency: requests that run at once; others wait here. None: no limit.
        models: one name per sample, instead of the template's model; empty: none.
        on_done: called with each output when it is complete.
    """
    names = models or [template.model] * len(samples)
    # Made before the clock starts, which a large prompt's JSON would hold up.
    bodies = [template.body(sample, name) for sample, name in zip(samples, names, strict=True)]
    limit: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    )

    async def send(sample: SampleRequest, body: bytes, arrival: float) -> RequestFuncOutput:
        async with limit:
            output = await send_request(client, template, sample, body)
        output.client_queue_time = output.start_time - arrival
        on_done(output)
        return output

    gc.freeze()  # or the collector would stop the clock to look through all prompts
    tasks: list[asyncio.Task[RequestFuncOutput]] = []
    cpu_before, started = time.process_time(), time.perf_counter()
    try:
        for sample, body, arrival in zip(samples, bodies, arrivals, strict=True):
            wait_s = started + arrival - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(send(sample, body, time.perf_counter())))
        outputs = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        gc.unfreeze()
    return LoadResult(outputs, time.perf_counter() - started, time.process_time() - cpu_before)
