"""Hedges, migrations, clients that leave, engines that die and a fleet that changes, all at once and in any order.

Engines do what a test tells them, event by event, so that requests are in all states at the same time. What then may
happen is drawn from a seed. Afterwards each client has one whole answer or an error, nothing is held or counted any
more, and no engine works on what nobody waits for.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from argosy_protocol.fleet import FleetDocument, ServiceLimits
from argosy_router import flow_control
from argosy_router.fleet.replica import Replica
from argosy_router.proxy import resilience

from .fake_engine import MODEL, Connection, Received, completion
from .harness import DEADLINE_S, Rig, StoppedClock, service
from .limited_fleet import MAX_PARALLEL_REQUESTS, limited
from .resumable_stream import events, fold, length, token

ENGINES = 3
STEPS = 80
RUNS = 12
"""Of each batch: enough for each kind of event to happen."""
ERRORS = {404, 429, 500, 502, 503, 504}


class Attempt:
    """A request at an engine, which answers as the test says."""

    def __init__(self, connection: Connection, request: Received) -> None:
        self._connection = connection
        self._is_stream = bool(request.json.get("stream"))
        self._left = events(request) if self._is_stream else []
        self.is_begun = False
        self.is_over = asyncio.Event()
        self.end: Callable[[], None] = lambda: None
        """Sends the end of the answer, after which the connection may carry another request."""

    @property
    def is_open(self) -> bool:
        """Whether the client is still there and its answer incomplete."""
        return not self.is_over.is_set() and not self._connection.writer.is_closing()

    def say(self, count: int) -> None:
        """The next events, or the whole of an answer that is no stream."""
        if not self._is_stream:
            self._finish(lambda: self._connection.answer(200, completion()))
            return
        self._begin()
        self._connection.chunk(b"".join(self._left[:count]))
        del self._left[:count]
        if not self._left:
            self._finish(self._connection.end_stream)

    def refuse(self, status: int) -> None:
        self._finish(lambda: self._connection.answer(status, b'{"error":{"message":"no"}}'))

    def die(self) -> None:
        """In the middle of an event, if it is a stream."""
        if self._is_stream:
            self._begin()
            self._connection.send(b"ff\r\n" + self._left[0][:10])
        self._connection.die()
        self.is_over.set()

    def _finish(self, end: Callable[[], None]) -> None:
        self.end = end
        self.is_over.set()

    def _begin(self) -> None:
        if not self.is_begun:
            self.is_begun = True
            self._connection.begin_stream()


class Stage:
    """A script for all engines: what they were sent and have not ended."""

    def __init__(self) -> None:
        self.attempts: dict[Attempt, None] = {}
        self.faults: list[AssertionError] = []

    async def __call__(self, connection: Connection, request: Received) -> None:
        try:
            attempt = Attempt(connection, request)
        except AssertionError as error:
            self.faults.append(error)
            raise
        self.attempts[attempt] = None
        gone = asyncio.create_task(connection.gone())
        over = asyncio.create_task(attempt.is_over.wait())
        try:
            await asyncio.wait((gone, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self.attempts[attempt]
            for task in (gone, over):
                task.cancel()
            await asyncio.gather(gone, over, return_exceptions=True)
        if connection.writer.is_closing():
            return
        if attempt.is_over.is_set():
            attempt.end()
        else:
            connection.die()


class Play:
    """One run."""

    def __init__(self, r: Rig, stage: Stage, seed: int) -> None:
        self.r = r
        self.stage = stage
        self.happened: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._clients: dict[asyncio.Task[httpx.Response], int] = {}
        """To the choices that each has asked for; zero for those of a unary answer."""
        self._endpoints = service(r.engines).endpoints
        self._present = set(range(ENGINES))
        self._uid = 1
        self.replicas: dict[Replica, None] = {}
        """All that there ever were."""

    async def perform(self) -> None:
        actions = [
            *[self._arrive] * 5,
            *[self._say] * 10,
            *[self._wait] * 5,
            *[self._leave] * 2,
            *[self._die, self._die, self._refuse, self._crash, self._scale, self._scale],
        ]
        rarely = [self._replace, self._remove]
        self._publish(self._present)
        for _ in range(STEPS):
            self.replicas |= dict.fromkeys(self.r.router.fleet.replicas())
            action = self._rng.choice(rarely if self._rng.random() < 0.05 else actions)
            self.happened[action.__name__] += 1
            await action()
            for _ in range(self._rng.randrange(6)):
                await asyncio.sleep(0)

    async def end(self) -> None:
        """Those who are left either all leave, or get to the end of their answers."""
        self._publish(set(range(ENGINES)))
        if self._rng.random() < 0.5:
            for client in self._clients:
                client.cancel()
        while not all(client.done() for client in self._clients):
            for attempt in list(self.stage.attempts):
                if attempt.is_open:
                    attempt.say(2)
            await self.r.pass_time(flow_control.TICK_S)  # a queued request learns of capacity
        for client, choices in self._clients.items():
            if not client.cancelled():
                self.happened[check(client.result(), choices)] += 1
        await self.r.until(lambda: not self.stage.attempts)  # without another word: they were reset
        assert not self.stage.faults
        await self.r.until(lambda: self.r.router.requests.inflight == 0)
        for replica in self.replicas:
            load = replica.load
            assert (load.inflight, load.inflight_sequences, load.inflight_tokens) == (0, 0, 0), replica.name
            assert not replica.inflight_attempts
        labels = f'{{model="{MODEL}",outcome='
        for outcome in ("won", "lost", "failed", "promoted", "abandoned"):
            self.happened[f"hedge {outcome}"] += int(self.r.metric(f'hedges_total{labels}"{outcome}"}}'))
        for outcome in ("resumed", "failed", "completed"):
            self.happened[f"stream {outcome}"] += int(self.r.metric(f'migrations_total{labels}"{outcome}"}}'))

    # what happens

    async def _arrive(self) -> None:
        if sum(not client.done() for client in self._clients) > MAX_PARALLEL_REQUESTS:
            return
        choices = self._rng.randrange(4)
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": str(choices)}]}
        if choices:
            body |= {"stream": True, "n": choices, "stream_options": {"include_usage": True}}
        self._clients[asyncio.create_task(self._ask(body))] = choices

    async def _ask(self, body: dict[str, Any]) -> httpx.Response:
        """As a client of its own: one that is cancelled closes its connection for sure."""
        http = self.r.http
        async with httpx.AsyncClient(
            base_url=http.base_url, headers=http.headers, verify=False, trust_env=False, timeout=DEADLINE_S
        ) as client:
            return await client.post("/v1/chat/completions", json=body)

    def _some_attempt(self) -> Attempt | None:
        attempts = [attempt for attempt in self.stage.attempts if attempt.is_open]
        return self._rng.choice(attempts) if attempts else None

    async def _say(self) -> None:
        if attempt := self._some_attempt():
            attempt.say(self._rng.randrange(1, 5))

    async def _die(self) -> None:
        if attempt := self._some_attempt():
            attempt.die()

    async def _refuse(self) -> None:
        if (attempt := self._some_attempt()) and not attempt.is_begun:
            attempt.refuse(self._rng.choice((429, 500, 503)))

    async def _leave(self) -> None:
        left = [client for client in self._clients if not client.done()]
        if left:
            self._rng.choice(left).cancel()

    async def _wait(self) -> None:
        """Until streams without an answer are overdue."""
        await self.r.pass_time(resilience.MIN_FIRST_TOKEN_S)

    async def _crash(self) -> None:
        engine = self._rng.choice(self.r.engines)
        await engine.stop()
        await engine.start()

    async def _scale(self) -> None:
        number = self._rng.randrange(ENGINES)
        self._publish(self._present ^ {number})

    async def _replace(self) -> None:
        self._uid += 1
        self._publish(self._present)

    async def _remove(self) -> None:
        self.r.discovery.set(FleetDocument())

    def _publish(self, present: set[int]) -> None:
        self._present = present
        endpoints = tuple(self._endpoints[number] for number in sorted(present))
        limits = ServiceLimits(max_inflight_per_replica=5)
        spec = service(self.r.engines, endpoints=endpoints, uid=f"uid-{self._uid}", limits=limits)
        self.r.discovery.set(FleetDocument(services=(spec,)))


def check(answer: httpx.Response, choices: int) -> str:
    """One whole answer, or the beginning of one and an error, or an error. Says which."""
    if answer.status_code != 200:
        assert answer.status_code in ERRORS
        assert "error" in answer.json()
        return "refused"
    if not choices:
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        return "answered"
    stream, error, rest = answer.content.partition(b'data: {"error":')
    if error:
        assert "message" in json.loads(b'{"error":' + rest)["error"]
        stream += b"data: [DONE]\n\n"
    if not stream.startswith(b"data: [DONE]"):
        told = fold(stream)["choices"]
        assert set(told) <= set(range(choices))
        for choice, have in told.items():
            whole = "".join(f"{choice}.{token(choice, position)} " for position in range(length(choice)))
            assert whole.startswith(have["text"])
            assert bool(have["finish"]) == (have["text"] == whole)
        if not error:
            assert len(told) == choices
            assert all(have["finish"] == ["stop"] for have in told.values())
    assert error or not stream.startswith(b"data: [DONE]")
    return "interrupted" if error else "streamed"


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.full) for batch in (1, 2))])
async def test_any_interleaving_ends_well(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resilience, "HEDGED_SHARE", 1.0)
    happened: Counter[str] = Counter()
    for seed in range(RUNS * batch, RUNS * (batch + 1)):
        stage = Stage()
        config = {"hedge_after": 1.0, "policy": "round-robin", "clock": StoppedClock()}
        async with limited(tmp_path, *[stage] * ENGINES, **config) as r:
            play = Play(r, stage, seed)
            await play.perform()
            await play.end()
            happened += play.happened
    for kind in ("hedge ", "stream ", "streamed", "answered", "refused"):
        assert sum(count for what, count in happened.items() if what.startswith(kind)), kind
