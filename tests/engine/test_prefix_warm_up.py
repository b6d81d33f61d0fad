"""Warm-up of a new replica with the hottest prefixes of a living one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from argosy_engine.api.observability.hot_prefixes import (
    MIN_TOKENS,
    RECENT_S,
    PrefixHits,
    http_prefixes,
    warm_up,
)
from argosy_engine.api.serve import report_source
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_engine.errors import InvalidRequest
from argosy_engine.messages import ChunkEnd, EngineCoreRequest
from argosy_engine.params import SamplingParams
from argosy_protocol.telemetry import (
    HOT_PREFIXES_PATH,
    MAX_PREFIXES,
    MAX_TOKENS,
    MAX_WARM_UP_TOKENS,
    HotPrefix,
    HotPrefixReport,
    pack_u32,
    pack_u64,
    unpack_u32,
    unpack_u64,
)
from processes import free_port, running
from served_engine import SERVE_TINY

# which prefixes are hot


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(
    first: int, num_tokens: int = 512, *, salt: str | None = None, shared: int = 0
) -> EngineCoreRequest:
    """A prompt of `shared` equal tokens, then tokens of its own."""
    tokens = [7] * shared + [first] * (num_tokens - shared)
    ends = [ChunkEnd(hash=first * 1000 + end, token_end=end) for end in range(128, num_tokens + 1, 128)]
    return EngineCoreRequest("id", tokens, SamplingParams(), 0.0, cache_salt=salt, chunk_ends=ends)


def first_tokens(prefixes: tuple[HotPrefix, ...]) -> list[int]:
    """The last token of each prefix, which names its request."""
    return [unpack_u32(prefix.token_ids)[-1] for prefix in prefixes]


def test_a_prefix_is_what_was_found_in_the_cache() -> None:
    hits = PrefixHits()
    hits.on_prefix_hit(request(1, salt="tenant"), 300)
    (prefix,) = hits.hottest(MAX_TOKENS)
    assert unpack_u32(prefix.token_ids).tolist() == [1] * 300
    assert prefix.cache_salt == "tenant"
    assert unpack_u32(prefix.chunk_tokens).tolist() == [128, 256]
    assert unpack_u64(prefix.chunk_hashes).tolist() == [1128, 1256]
    hits.on_prefix_hit(request(2), MIN_TOKENS - 1)
    assert len(hits.hottest(MAX_TOKENS)) == 1


def test_length_times_recent_hits_decides() -> None:
    clock = Clock()
    hits = PrefixHits(clock)
    for first, num_cached, count in ((1, 100, 2), (2, 300, 1), (3, 100, 4)):
        for _ in range(count):
            hits.on_prefix_hit(request(first), num_cached)
    assert first_tokens(hits.hottest(MAX_TOKENS)) == [3, 2, 1]
    assert first_tokens(hits.hottest(200)) == [3, 1]
    clock.now += 3 * RECENT_S
    hits.on_prefix_hit(request(1), 100)
    assert first_tokens(hits.hottest(MAX_TOKENS)) == [1, 3, 2]


def test_a_prefix_of_another_one_is_not_computed_twice() -> None:
    hits = PrefixHits()
    for _ in range(9):
        hits.on_prefix_hit(request(1, shared=256), 256)
    hits.on_prefix_hit(request(1, shared=256), 512)
    assert [len(unpack_u32(each.token_ids)) for each in hits.hottest(MAX_TOKENS)] == [512]
    assert [len(unpack_u32(each.token_ids)) for each in hits.hottest(300)] == [256]
    hits.on_prefix_hit(request(1, salt="tenant", shared=256), 256)
    assert len(hits.hottest(MAX_TOKENS)) == 2, "another salt is another prefix"


def test_a_long_conversation_leaves_others_their_place() -> None:
    hits = PrefixHits()
    for _ in range(3):
        hits.on_prefix_hit(request(1, 8192), 8192)
    for num_cached in range(20_000, 320_000, 20_000):
        hits.on_prefix_hit(request(2, 320_000), num_cached)
    long, short = hits.hottest(MAX_TOKENS)
    assert unpack_u32(long.token_ids).tolist() == [2] * MAX_WARM_UP_TOKENS
    assert max(unpack_u32(long.chunk_tokens)) == MAX_WARM_UP_TOKENS
    assert len(unpack_u32(short.token_ids)) == 8192
    assert hits.num_tokens == MAX_WARM_UP_TOKENS + 8192


def test_a_long_prefix_is_kept_in_whole_blocks() -> None:
    hits = PrefixHits(block_size=48)
    hits.on_prefix_hit(request(1, 48_000), 48_000)
    (prefix,) = hits.hottest(MAX_TOKENS)
    assert len(unpack_u32(prefix.token_ids)) == MAX_WARM_UP_TOKENS - MAX_WARM_UP_TOKENS % 48


def test_memory_is_bounded() -> None:
    hits = PrefixHits()
    hits.on_prefix_hit(request(0, 2048), 2048)
    for first in range(1, 2 * MAX_PREFIXES):
        hits.on_prefix_hit(request(first, 2048), 2048)
        hits.on_prefix_hit(request(0, 2048), 2048)
    assert hits.num_tokens <= MAX_TOKENS
    found = hits.hottest(MAX_TOKENS)
    assert len(found) <= MAX_PREFIXES
    assert first_tokens(found)[0] == 0, "the hottest stays"


# computing them


class FakeLLM:
    """An engine whose requests end when a test lets them."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.config = SimpleNamespace(
            memory_of_ranks=[SimpleNamespace(kv_cache_tokens=1000)], model_fingerprint="model"
        )
        self.renderer = SimpleNamespace(check_token_ids=self._check)
        self.input_processor = SimpleNamespace(process_inputs=self._process)
        self.computed: list[tuple[list[int], str | None]] = []
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()

    def _check(self, token_ids: list[int], name: str) -> None:
        if max(token_ids) > 100:
            raise InvalidRequest("beyond the vocabulary", param=name)

    def _process(self, prompt: Any, params: SamplingParams, *, cache_salt: str | None) -> list[Any]:
        assert params.max_tokens == 1
        return [(list(prompt.token_ids), cache_salt)]

    async def collect(self, requests: list[Any]) -> None:
        await self.gate.wait()
        self.computed += requests


def report(*prefixes: HotPrefix, fingerprint: str = "model") -> HotPrefixReport:
    return HotPrefixReport(model_fingerprint=fingerprint, prefixes=prefixes)


def prefix(*token_ids: int, salt: str | None = None) -> HotPrefix:
    return HotPrefix(
        token_ids=pack_u32(token_ids), cache_salt=salt, chunk_hashes=pack_u64([1]), chunk_tokens=pack_u32([1])
    )


async def warmed(llm: FakeLLM, found: HotPrefixReport | Exception, timeout_s: float = 30.0) -> int:
    budgets = []

    def get_report(max_tokens: int) -> HotPrefixReport:
        budgets.append(max_tokens)
        if isinstance(found, Exception):
            raise found
        return found

    count = await warm_up(llm, get_report, timeout_s)  # type: ignore[arg-type]
    assert budgets == [500], "half of the cache"
    return count


async def test_prefixes_are_computed_under_their_salts() -> None:
    llm = FakeLLM()
    assert await warmed(llm, report(prefix(1, 2), prefix(3, salt="tenant"), prefix(999))) == 2
    assert sorted(llm.computed) == [([1, 2], None), ([3], "tenant")]


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(), TimeoutError(), ValueError(), msgspec.DecodeError()], ids=repr
)
async def test_without_a_peer_the_engine_starts_cold(error: Exception) -> None:
    assert await warmed(FakeLLM(), error) == 0


async def test_prefixes_of_another_model_are_left_out() -> None:
    llm = FakeLLM()
    assert await warmed(llm, report(prefix(1), fingerprint="other")) == 0
    assert llm.computed == []


@pytest.mark.parametrize(
    "malformed",
    [HotPrefix(token_ids=b"12345"), HotPrefix(token_ids=pack_u32([1]), chunk_hashes=b"x")],
    ids=["tokens", "hashes"],
)
async def test_a_malformed_prefix_is_left_out(malformed: HotPrefix) -> None:
    llm = FakeLLM()
    assert await warmed(llm, report(malformed, prefix(1, 2))) == 1
    assert llm.computed == [([1, 2], None)]


async def test_the_deadline_ends_the_warm_up() -> None:
    llm = FakeLLM(is_open=False)
    assert await warmed(llm, report(prefix(1), prefix(2)), timeout_s=0.05) == 0


async def test_a_peer_that_hangs_does_not_delay_the_engine() -> None:
    release = threading.Event()

    def hang(max_tokens: int) -> HotPrefixReport:
        release.wait(60)
        raise TimeoutError

    try:
        assert await warm_up(FakeLLM(), hang, 0.05) == 0  # type: ignore[arg-type]
    finally:
        release.set()


# two engines


@pytest.mark.timeout(300)
def test_a_new_replica_knows_the_prompts_of_a_living_one(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    key = {"ARGOSY_API_KEY": "internal"}
    headers = {"authorization": "Bearer internal"}
    prompt = "Tell me of the sea and of ships. " * 20

    def cached(url: str, salt: str | None) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **({"cache_salt": salt} if salt else {})}
        usage = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json()["usage"]
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    with running([*SERVE_TINY, "--port", str(ports[0])], tmp_path / "first", port=ports[0], env=key) as first:
        for _ in range(2):
            hit = cached(first.url, "tenant-a")
        assert hit >= MIN_TOKENS
        assert cached(first.url, "tenant-b") == 0, "once is no hit"
        assert httpx.get(first.url + HOT_PREFIXES_PATH).status_code == 401
        with pytest.raises(ValueError, match="401"):
            http_prefixes(first.url, "wrong")(MAX_TOKENS)
        told = http_prefixes(first.url, "internal")(MAX_TOKENS)
        assert [each.cache_salt for each in told.prefixes] == ["tenant-a"]
        assert len(unpack_u32(told.prefixes[0].token_ids)) == hit
        keys = tmp_path / "keys"
        keys.write_text("newer\ninternal\n")
        source = report_source(
            ServerArgs(warm_up_from=first.url, api_keys_file=keys), EngineArgs(model="tiny")
        )
        assert source is not None
        assert source(MAX_TOKENS) == told, "the keys of a file count as those of the environment do"
        command = [*SERVE_TINY, "--port", str(ports[1]), "--warm-up-from", first.url]
        with running(command, tmp_path / "second", port=ports[1], env=key) as second:
            assert cached(second.url, "tenant-a") == hit
            assert cached(second.url, "tenant-b") == 0
            assert cached(second.url, None) == 0
    log = (tmp_path / "second").read_text()
    assert "computed 1 prefixes" in log
    assert "sea" not in log
