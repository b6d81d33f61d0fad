"""Several routers over the same engines choose alike, and a restarted one learns what the others know."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.openai import decode_request
from argosy_protocol.telemetry import Frame, FrameReader
from argosy_router.fleet import telemetry

from .fake_engine import MODEL, Connection, FakeEngine, Received, completion
from .harness import Rig, rig, until

ROUTERS, ENGINES = 3, 4
TOKENS_PER_CHUNK = 60
FRAMES_TO_BE_WARM = 3
"""Hello, one slice of a snapshot of this size, load."""


class Caching(FakeEngine):
    """Keeps and announces every prompt it is sent, as a prefix cache does."""

    def __init__(self, **fields: object) -> None:
        super().__init__(script=self.compute, **fields)  # type: ignore[arg-type]

    async def compute(self, connection: Connection, request: Received) -> None:
        hashes = chunk_hashes(
            prompt_segments(decode_request("chat/completions", request.body))[0], chain_seed(MODEL)
        )
        known = sum(chunk in self.resident for chunk in hashes)
        self.store({chunk: TOKENS_PER_CHUNK * (n + 1) for n, chunk in enumerate(hashes)})
        connection.answer(200, completion(cached=known * TOKENS_PER_CHUNK))


@contextlib.asynccontextmanager
async def routers(engines: Sequence[FakeEngine], **config: object) -> AsyncIterator[list[Rig]]:
    """As many routers as production would have, each with connections and knowledge of its own."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        yield [await stack.enter_async_context(rig(engines, **config)) for _ in range(ROUTERS)]  # type: ignore[arg-type]


def prompt(number: int, question: str = "") -> str:
    return f"{number} is the number of this document. " * 60 + question


async def replica_of(r: Rig, content: str, **headers: str) -> str:
    answer = await r.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": content}]},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )
    assert answer.status_code == 200
    return str(answer.headers["x-argosy-replica"])


async def until_all_have_heard(fleet: Sequence[Rig], engines: Sequence[FakeEngine]) -> None:
    """Returns once everything announced so far has reached every router."""
    stored = sum(len(engine.resident) for engine in engines)
    await until(lambda: all(r.metric("index_chunks") >= stored for r in fleet))


async def test_a_new_prefix_lives_where_every_router_would_put_it() -> None:
    """Nothing is announced: what they agree by is the rule alone."""
    async with routers([FakeEngine() for _ in range(ENGINES)]) as fleet:
        homes = [[await replica_of(r, prompt(number)) for r in fleet] for number in range(24)]
        assert sum(len(set(home)) == 1 for home in homes) >= 22, homes
        assert len({home[0] for home in homes}) == ENGINES, "and not all in one place"


async def test_a_prefix_that_one_router_placed_is_found_by_all() -> None:
    engines = [Caching() for _ in range(ENGINES)]
    async with routers(engines) as fleet:
        for number in range(12):
            home = await replica_of(fleet[number % ROUTERS], prompt(number))
            await until_all_have_heard(fleet, engines)
            for turn in range(2):
                assert {await replica_of(r, prompt(number, f"question {turn}")) for r in fleet} == {home}
        hits = Counter(bool(r.metric("actual_cached_tokens_total")) for r in fleet)
        assert hits == {True: ROUTERS}


async def test_sessions_live_in_the_same_place_for_all() -> None:
    async with routers([FakeEngine() for _ in range(ENGINES)], policy="session") as fleet:
        homes = [
            [await replica_of(r, f"turn {turn}", x_session_id=f"session {number}") for r in fleet]
            for number in range(16)
            for turn in range(2)
        ]
        assert all(len(set(home)) == 1 for home in homes), homes
        assert len({home[0] for home in homes}) > 1


@pytest.mark.parametrize("prefixes", [4, 60])
async def test_a_restarted_router_is_warm_from_its_snapshots(
    prefixes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [Caching() for _ in range(ENGINES)]
    async with routers(engines) as fleet:
        homes = [await replica_of(fleet[0], prompt(number)) for number in range(prefixes)]
        await until_all_have_heard(fleet, engines)
        frames: list[Frame] = []

        class Recording(FrameReader):
            def feed(self, data: bytes) -> Iterator[Frame]:
                for frame in super().feed(data):
                    frames.append(frame)
                    yield frame

        monkeypatch.setattr(telemetry, "FrameReader", Recording)
        async with rig(engines) as restarted:
            await restarted.until(lambda: len(frames) == ENGINES * FRAMES_TO_BE_WARM)
            for number, home in enumerate(homes):
                assert await replica_of(restarted, prompt(number)) == home
            reasons = {record.reason for record in restarted.router.accounting.attempt_log.latest(prefixes)}
            assert reasons == {"cached"}
            assert restarted.metric("index_chunks") == sum(len(engine.resident) for engine in engines)
