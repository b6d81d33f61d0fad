"""Mock engines that answer at once, so that only the router's own cost is measured.

    python bench/router/mock_engine.py PORT[,PORT...] [--events 32] [--interval S] [--telemetry]

They answer /v1/completions with one JSON object or a stream of EVENTS events, one each INTERVAL seconds. With
`--telemetry` they announce every prompt that they get, as our engines do; without, routers see them as other engines.
One process serves all ports.
"""

from __future__ import annotations

import argparse
import asyncio

import msgspec
import uvloop
from mock_engine_http import DONE, STREAM_END, STREAM_HEAD, EngineConnection, answer, completion, event, usage
from prompts import as_trace
from telemetry_announcer import Announcer

from argosy_protocol.telemetry import Load

KV_CACHE_TOKENS = 1 << 24
"""More tokens than a run sends, so that nothing is evicted."""


class Body(msgspec.Struct):
    prompt: str


class MockEngine(EngineConnection):
    """One connection to a mock engine."""

    def __init__(self, events: int, interval_s: float, announcer: Announcer | None) -> None:
        super().__init__(announcer)
        self._interval_s = interval_s
        self._pieces = [event(completion(" hello", None))] * events + [DONE + STREAM_END]
        self._answer = answer(completion(" hello" * events, "stop", usage=usage(10, events, 0)))

    def complete(self, body: bytes) -> None:
        if self._announcer is not None:
            prompt = as_trace(msgspec.json.decode(body, type=Body).prompt, 0)
            self._announcer.announce(prompt.blocks, prompt.ends)
        if b'"stream":true' in body[-200:].replace(b" ", b""):
            self._task = asyncio.ensure_future(self._stream())
        else:
            self.transport.write(self._answer)

    async def _stream(self) -> None:
        self.transport.write(STREAM_HEAD)
        for piece in self._pieces:
            self.transport.write(piece)
            await asyncio.sleep(self._interval_s)


def idle() -> Load:
    return Load(core_step_age_s=0.0)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ports")
    parser.add_argument("--events", type=int, default=32)
    parser.add_argument("--interval", type=float, default=0.0)
    parser.add_argument("--telemetry", action="store_true")
    arguments = parser.parse_args()
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for port in arguments.ports.split(","):
            announcer = None
            if arguments.telemetry:
                announcer = Announcer(port, idle, kv_cache_tokens=KV_CACHE_TOKENS, max_num_seqs=256)
                tasks.create_task(announcer.report_load())
            await loop.create_server(
                lambda announcer=announcer: MockEngine(arguments.events, arguments.interval, announcer),
                "127.0.0.1",
                int(port),
            )
        await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
