"""Simulated engines that answer by the clock, so that a fleet of them shares a machine without slowing each other down.

    python bench/router/simulated_engine_server.py PORT[,PORT...]
        [--prefill-tokens-per-s 8000] [--kv-cache-tokens 12288]

Each is the simulation's engine (`argosy_router.simulation.simulated_engine`: speed, batch, prefix cache with LRU
eviction) on the event loop's clock, behind HTTP and our telemetry. Its events have absolute due times that are computed
from one another, so a busy machine may delay an answer by milliseconds but does not slow the engine. A token is
four bytes of the prompt. A stream has one event for the first token, when it is due, and one for all others at the end.
One process serves all ports.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

import msgspec
import uvloop
from mock_engine_http import DONE, STREAM_END, STREAM_HEAD, EngineConnection, answer, completion, event, usage
from prompts import as_trace
from telemetry_announcer import Announcer

from argosy_protocol.telemetry import Load
from argosy_router.simulation.simulated_engine import CacheChange, EngineModel, Job, SimulatedEngine

KV_CACHE_TOKENS = 12_288


class Body(msgspec.Struct):
    prompt: str
    max_tokens: int = 16
    stream: bool = False


class ClockedEngine:
    """One simulated engine and its telemetry."""

    def __init__(self, epoch: str, model: EngineModel) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = SimulatedEngine(model, self._at, self._announce)
        self.announcer = Announcer(
            epoch, self._load, kv_cache_tokens=model.kv_cache_tokens, max_num_seqs=model.max_num_seqs
        )

    def submit(self, job: Job) -> None:
        self._engine.submit(job, self._loop.time())

    def _at(self, when: float, callback: Callable[[float], None]) -> None:
        self._loop.call_at(when, callback, when)

    def _announce(self, change: CacheChange) -> None:
        self.announcer.announce(change.stored, change.tokens, change.removed)

    def _load(self) -> Load:
        engine, model = self._engine, self._engine.model
        return Load(
            core_step_age_s=0.0,
            num_running=engine.running,
            num_waiting=engine.waiting,
            queued_uncached_tokens=engine.queued_tokens,
            kv_usage=engine.kv_usage,
            prefill_tokens_per_s=model.prefill_tokens_per_s,
            decode_step_s=model.decode_step_s + model.decode_step_per_seq_s * engine.running,
        )


class Connection(EngineConnection):
    """One connection to an engine. A client that disconnects does not cancel its requests."""

    def __init__(self, engine: ClockedEngine) -> None:
        super().__init__(engine.announcer)
        self._engine = engine

    def complete(self, body: bytes) -> None:
        request = msgspec.json.decode(body, type=Body)
        prompt = as_trace(request.prompt, request.max_tokens)
        if request.stream:
            self._engine.submit(Job(prompt, self._begin, self._end))
        else:
            self._engine.submit(Job(prompt, lambda job, now: None, self._answer))

    def _begin(self, job: Job, now: float) -> None:
        self._write(STREAM_HEAD + event(completion(" hello", None)))

    def _end(self, job: Job, now: float) -> None:
        rest = completion(" hello" * (job.request.output_tokens - 1), "length")
        last = {**completion("", None), "choices": [], "usage": _usage(job)}
        self._write(event(rest) + event(last) + DONE + STREAM_END)

    def _answer(self, job: Job, now: float) -> None:
        self._write(answer(completion(" hello" * job.request.output_tokens, "length", usage=_usage(job))))

    def _write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)


def _usage(job: Job) -> dict[str, object]:
    return usage(job.request.input_tokens, job.request.output_tokens, job.cached_tokens)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ports")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=EngineModel().prefill_tokens_per_s)
    parser.add_argument("--kv-cache-tokens", type=int, default=KV_CACHE_TOKENS)
    arguments = parser.parse_args()
    model = EngineModel(
        prefill_tokens_per_s=arguments.prefill_tokens_per_s, kv_cache_tokens=arguments.kv_cache_tokens
    )
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for port in arguments.ports.split(","):
            engine = ClockedEngine(port, model)
            tasks.create_task(engine.announcer.report_load())
            await loop.create_server(lambda engine=engine: Connection(engine), "127.0.0.1", int(port))
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
