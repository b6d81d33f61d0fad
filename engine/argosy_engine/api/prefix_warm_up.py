"""Warm-up of the prefix cache: a new replica computes the prefixes that are hottest at a living one.

Owns the request for them and their computation, both within one deadline. Must not know: how a peer chooses them.
Invariants: an engine that cannot be warmed up in time serves all the same; nothing is logged but counts; a prefix is
computed under the salt that it had, so that no other tenant finds it.

`http_prefixes` asks the address of all replicas (in Kubernetes the Service, which leads to those that are ready). The
first replica of a service finds none, and is refused at once.
"""

from __future__ import annotations

import asyncio
import http
import http.client
import logging
import os
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import msgspec

from argosy_engine.api.http.followed_keys import FollowedKeys
from argosy_engine.api.http_service import accepted_keys, given_keys
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_engine.errors import EngineError
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages.core_messages import ChunkEnd
from argosy_engine.params.sampling_params import SamplingParams
from argosy_protocol.hot_prefixes import (
    HOT_PREFIXES_PATH,
    MAX_TOKENS,
    MAX_WARM_UP_TOKENS,
    HotPrefix,
    HotPrefixReport,
)
from argosy_protocol.telemetry import TelemetryError, unpack_u32, unpack_u64

logger = logging.getLogger("argosy.api")

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


def report_source(options: ServerArgs, args: EngineArgs) -> GetReport | None:
    """Who tells the prefixes to warm up with; None for no warm-up. The replicas of a service have the same keys."""
    peer = options.warm_up_from or os.environ.get("ARGOSY_WARM_UP_FROM", "")
    if not peer or not args.enable_prefix_caching or not options.warm_up_timeout:
        return None
    accepted = accepted_keys(options)
    followed = accepted.found if isinstance(accepted, FollowedKeys) else ()
    admin = [*options.admin_api_key, *os.environ.get("ARGOSY_ADMIN_API_KEY", "").split(",")]
    return http_prefixes(peer, *(key for key in (*admin, *followed, *given_keys(options)) if key))


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
