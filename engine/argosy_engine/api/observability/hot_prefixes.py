"""The prefixes that requests find in the cache most often, and the warm-up of a new replica with those of a peer.

A prefix is what one request found: whole KV cache blocks from the prompt's beginning, under the request's salt; of a
longer one those within MAX_WARM_UP_TOKENS, since a new replica computes no more. Invariants of `PrefixHits`: at most
MAX_PREFIXES entries of MAX_TOKENS tokens together; a prefix that is part of another one is not reported beside it.

`warm_up` asks the address of all replicas (in Kubernetes the Service, which leads to those that are ready) and computes
what it is told, within one deadline. The first replica of a service finds none, and is refused at once. Invariants: an
engine that cannot be warmed up in time serves all the same; nothing is logged but counts; a prefix is computed under
the salt that it had, so that no other tenant finds it.
"""

from __future__ import annotations

import asyncio
import http
import http.client
import logging
import time
from array import array
from collections.abc import Callable
from math import exp
from typing import Final
from urllib.parse import urlsplit

import msgspec
from xxhash import xxh3_128_digest

from argosy_engine.errors import EngineError
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.observer import Observer
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages import ChunkEnd, EngineCoreRequest
from argosy_engine.params import SamplingParams
from argosy_protocol.telemetry import (
    HOT_PREFIXES_PATH,
    MAX_PREFIXES,
    MAX_TOKENS,
    MAX_WARM_UP_TOKENS,
    HotPrefix,
    HotPrefixReport,
    TelemetryError,
    pack_u32,
    pack_u64,
    unpack_u32,
    unpack_u64,
)

logger = logging.getLogger("argosy.api")

RECENT_S: Final = 600.0
"""Time constant with which hits lose their weight, as in the router's value of a cache."""

MIN_TOKENS: Final = 64
"""Shorter prefixes are computed in a few milliseconds."""

PEER_TIMEOUT_S: Final = 5.0

_MAX_BYTES: Final = 64 * MAX_TOKENS
"""Of an answer: tokens and, for each block of text, a hash."""

_MAX_KEYS: Final = 4
"""Keys that are tried at a peer: the internal key, and those before it that are still valid."""

_AT_ONCE: Final = 4
"""Prefixes computed side by side, so that steps are full."""

_SHARE_OF_CACHE: Final = 0.5
"""Of the KV cache: what is computed last must not evict what came first, which is hotter."""

GetReport = Callable[[int], HotPrefixReport]
"""`get_report(max_tokens)`: the hottest prefixes of a peer; called in a thread.

Raises:
    OSError, http.client.HTTPException: no peer answers.
    ValueError: the answer is no report.
"""


class _Prefix:
    """One prefix, and its decayed hits."""

    __slots__ = ("_hits", "_time", "request", "tokens")

    def __init__(self, tokens: array[int], request: HotPrefix, now: float) -> None:
        self.tokens = tokens
        self.request = request
        self._hits = 0.0
        self._time = now

    def hit(self, now: float) -> None:
        self._hits = self._hits * exp((self._time - now) / RECENT_S) + 1.0
        self._time = now

    def value(self, now: float) -> float:
        """Tokens that it saves: length times recent hits."""
        return self._hits * exp((self._time - now) / RECENT_S) * len(self.tokens)


class PrefixHits(Observer):
    """The hottest prefixes of one engine.

    Args:
        now: a monotonic clock.
        block_size: tokens of a KV cache block.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, block_size: int = 1) -> None:
        self._now = now
        self._max_kept = MAX_WARM_UP_TOKENS // block_size * block_size
        self._prefixes: dict[bytes, _Prefix] = {}
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Token ids kept."""
        return self._num_tokens

    def on_prefix_hit(self, request: EngineCoreRequest, num_cached: int) -> None:
        if num_cached < MIN_TOKENS or request.adapter or request.mm_features:
            return
        num_kept = min(num_cached, self._max_kept)
        now, tokens = self._now(), array("I", request.prompt_token_ids[:num_kept])
        key = xxh3_128_digest(tokens.tobytes() + (request.cache_salt or "").encode("utf-8", "surrogatepass"))
        prefix = self._prefixes.get(key)
        if prefix is None:
            self._make_room(len(tokens), now)
            prefix = self._prefixes[key] = _Prefix(tokens, _report(request, tokens), now)
            self._num_tokens += len(tokens)
        prefix.hit(now)

    def hottest(self, max_tokens: int) -> tuple[HotPrefix, ...]:
        """The hottest prefixes of at most `max_tokens` tokens together, hottest first."""
        now, left = self._now(), min(max_tokens, MAX_TOKENS)
        chosen: list[_Prefix] = []
        for prefix in sorted(self._prefixes.values(), key=lambda each: each.value(now), reverse=True):
            if any(_begins(other, prefix) for other in chosen):
                continue
            if len(prefix.tokens) <= left:
                covered = [other for other in chosen if _begins(prefix, other)]
                left += sum(len(other.tokens) for other in covered) - len(prefix.tokens)
                chosen = [other for other in chosen if other not in covered] + [prefix]
        return tuple(prefix.request for prefix in chosen)

    def _make_room(self, num_tokens: int, now: float) -> None:
        """Forget the prefixes of least value until one more fits."""
        while self._prefixes and (
            len(self._prefixes) >= MAX_PREFIXES or self._num_tokens + num_tokens > MAX_TOKENS
        ):
            coldest = min(self._prefixes, key=lambda key: self._prefixes[key].value(now))
            self._num_tokens -= len(self._prefixes.pop(coldest).tokens)


def _begins(longer: _Prefix, shorter: _Prefix) -> bool:
    """Whether `longer` begins with `shorter`, so that computing it computes both."""
    return (
        longer.request.cache_salt == shorter.request.cache_salt
        and len(longer.tokens) >= len(shorter.tokens)
        and longer.tokens[: len(shorter.tokens)] == shorter.tokens
    )


def _report(request: EngineCoreRequest, tokens: array[int]) -> HotPrefix:
    ends = [(end.hash, end.token_end) for end in request.chunk_ends if end.token_end <= len(tokens)]
    return HotPrefix(
        token_ids=pack_u32(tokens),
        cache_salt=request.cache_salt,
        chunk_hashes=pack_u64([each for each, _ in ends]),
        chunk_tokens=pack_u32([each for _, each in ends]),
    )


def http_prefixes(url: str, *keys: str) -> GetReport:
    """Ask the engine at `url` (scheme, host and port) with a bearer key, or with the next one if it refuses that: it
    may have seen a rotation of the internal key before or after this engine."""

    address = urlsplit(url)
    connect = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection

    def ask(max_tokens: int, key: str) -> tuple[int, bytes]:
        # Not urllib, which follows redirects and passes the key to a proxy that the environment names.
        connection = connect(address.hostname or "", address.port, timeout=PEER_TIMEOUT_S)
        try:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request("GET", f"{HOT_PREFIXES_PATH}?max_tokens={max_tokens}", headers=headers)
            response = connection.getresponse()
            return response.status, response.read(_MAX_BYTES + 1)
        finally:
            connection.close()

    def get_report(max_tokens: int) -> HotPrefixReport:
        status, body = 0, b""
        for key in keys[:_MAX_KEYS] or ("",):
            status, body = ask(max_tokens, key)
            if status != http.HTTPStatus.UNAUTHORIZED:
                break
        if status != http.HTTPStatus.OK or len(body) > _MAX_BYTES:
            raise ValueError(f"status {status}, {len(body)} bytes")
        return msgspec.msgpack.decode(body, type=HotPrefixReport)

    return get_report


async def warm_up(llm: AsyncLLM, get_report: GetReport, timeout_s: float) -> int:
    """Compute the hottest prefixes of a peer, for at most `timeout_s`. Returns the number of prefixes computed."""
    started, computed = time.perf_counter(), 0
    cache_tokens = sum(memory.kv_cache_tokens for memory in llm.config.memory_of_ranks)
    budget = min(MAX_WARM_UP_TOKENS, int(_SHARE_OF_CACHE * cache_tokens))
    try:
        async with asyncio.timeout(timeout_s):
            report = await asyncio.to_thread(get_report, budget)
            if report.model_fingerprint != llm.config.model_fingerprint:
                logger.info("no warm-up: the other replicas have another model")
                return 0
            gate = asyncio.Semaphore(_AT_ONCE)

            async def compute(prefix: HotPrefix) -> None:
                nonlocal computed
                async with gate:
                    computed += await _compute(llm, prefix)

            async with asyncio.TaskGroup() as tasks:
                for prefix in report.prefixes:
                    tasks.create_task(compute(prefix))
    except TimeoutError:
        logger.info("the warm-up ends after %g s with %d prefixes", timeout_s, computed)
    except (OSError, http.client.HTTPException, ValueError) as error:
        logger.info("no warm-up: no other replica tells its prefixes (%s)", type(error).__name__)
    else:
        if computed:
            logger.info("computed %d prefixes in %.1f s", computed, time.perf_counter() - started)
    return computed


async def _compute(llm: AsyncLLM, prefix: HotPrefix) -> bool:
    """Compute one prefix; False if this engine refuses it."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    try:
        token_ids = unpack_u32(prefix.token_ids).tolist()
        ends = zip(unpack_u64(prefix.chunk_hashes), unpack_u32(prefix.chunk_tokens), strict=False)
        prompt = TokenizedPrompt(
            token_ids, [ChunkEnd(chunk, end) for chunk, end in ends if end <= len(token_ids)]
        )
        llm.renderer.check_token_ids(token_ids, "prompt")
        requests = llm.input_processor.process_inputs(prompt, params, cache_salt=prefix.cache_salt)
        await llm.collect(requests)
    except (EngineError, TelemetryError):
        return False  # too long for this engine's context, say, or no whole number of token ids
    return True
