"""Simulated engines that answer by the clock, so that a fleet of them shares a machine without slowing each other down.

    python bench/router/simulated_engine_server.py PORT[,PORT...]
        [--prefill-tokens-per-s 8000] [--kv-cache-tokens 12288] [--warm-up-from PORT]

Each is the simulation's engine (`argosy_router.simulation`: speed, batch, prefix cache with LRU
eviction) on the event loop's clock, behind HTTP and our telemetry. Its events have absolute due times that are computed
from one another, so a busy machine may delay an answer by milliseconds but does not slow the engine. A token is
four bytes of the prompt. A stream has one event for the first token, when it is due, and one for all others at the end.
One process serves all ports.

With `--warm-up-from` it computes the hottest prefixes of the engine at that port first, within the limits of a real
engine's defaults, and listens only then: what is not routable yet refuses connections here.
"""

from __future__ import annotations

import argparse
import asyncio
import urllib.request
from collections.abc import Callable, Sequence
from urllib.parse import parse_qs, urlsplit

import msgspec
import uvloop
from mock_engine_http import DONE, STREAM_END, STREAM_HEAD, EngineConnection, answer, completion, event, usage
from prompts import as_trace
from telemetry_announcer import Announcer

from argosy_protocol.telemetry import (
    HOT_PREFIXES_PATH,
    MAX_TOKENS,
    MAX_WARM_UP_TOKENS,
    HotPrefix,
    HotPrefixReport,
    Load,
    pack_u32,
    pack_u64,
    unpack_u32,
    unpack_u64,
)
from argosy_router.observability.lines import TraceRequest
from argosy_router.simulation import CacheChange, EngineModel, Job, SimulatedEngine

KV_CACHE_TOKENS = 12_288
WARM_UP_S = 5.0
"""As `argosy serve --warm-up-timeout`."""


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

    def hot_prefixes(self, max_tokens: int) -> HotPrefixReport:
        """What a real engine tells a new one, with token ids that mean nothing."""
        hottest = self._engine.hottest(max_tokens)
        return HotPrefixReport(model_fingerprint="bench", prefixes=tuple(map(_told, hottest)))

    async def warm_up(self, prefixes: Sequence[HotPrefix]) -> None:
        """Compute prefixes, one after another, for at most WARM_UP_S."""
        try:
            async with asyncio.timeout(WARM_UP_S):
                for prefix in prefixes:
                    ended = self._loop.create_future()

                    def end(job: Job, now: float, ended: asyncio.Future[None] = ended) -> None:
                        if not ended.done():
                            ended.set_result(None)

                    self.submit(Job(_heard(prefix), lambda job, now: None, end))
                    await ended
        except TimeoutError:
            pass  # it serves with what it has

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

    def _handle(self, path: str, body: bytes) -> None:
        parts = urlsplit(path)
        if parts.path != HOT_PREFIXES_PATH:
            super()._handle(path, body)
            return
        max_tokens = int(parse_qs(parts.query).get("max_tokens", [str(MAX_TOKENS)])[0])
        data = msgspec.msgpack.encode(self._engine.hot_prefixes(max_tokens))
        self._write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)

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


def _told(prefix: TraceRequest) -> HotPrefix:
    return HotPrefix(
        token_ids=bytes(4 * prefix.input_tokens),
        chunk_hashes=pack_u64(prefix.blocks),
        chunk_tokens=pack_u32(prefix.ends),
    )


def _heard(prefix: HotPrefix) -> TraceRequest:
    blocks, ends = tuple(unpack_u64(prefix.chunk_hashes)), tuple(unpack_u32(prefix.chunk_tokens))
    return TraceRequest(0.0, len(prefix.token_ids) // 4, 1, blocks, ends)


def hottest_of(port: int, max_tokens: int) -> tuple[HotPrefix, ...]:
    """The hottest prefixes of the engine at a port of this machine."""
    url = f"http://127.0.0.1:{port}{HOT_PREFIXES_PATH}?max_tokens={max_tokens}"
    with urllib.request.urlopen(url, timeout=WARM_UP_S) as response:
        return msgspec.msgpack.decode(response.read(), type=HotPrefixReport).prefixes


def _usage(job: Job) -> dict[str, object]:
    return usage(job.request.input_tokens, job.request.output_tokens, job.cached_tokens)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ports")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=EngineModel().prefill_tokens_per_s)
    parser.add_argument("--kv-cache-tokens", type=int, default=KV_CACHE_TOKENS)
    parser.add_argument("--warm-up-from", type=int, metavar="PORT")
    arguments = parser.parse_args()
    model = EngineModel(
        prefill_tokens_per_s=arguments.prefill_tokens_per_s, kv_cache_tokens=arguments.kv_cache_tokens
    )
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for port in arguments.ports.split(","):
            engine = ClockedEngine(port, model)
            tasks.create_task(engine.announcer.report_load())
            if arguments.warm_up_from is not None:
                budget = min(MAX_WARM_UP_TOKENS, model.kv_cache_tokens // 2)  # as a real engine's
                await engine.warm_up(await asyncio.to_thread(hottest_of, arguments.warm_up_from, budget))
            await loop.create_server(lambda engine=engine: Connection(engine), "127.0.0.1", int(port))
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
