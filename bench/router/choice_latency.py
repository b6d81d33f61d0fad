"""Measure the time of a routing decision and the memory of the prefix index, at scale and without sockets.

    python bench/router/choice_latency.py [--replicas 4 64 512 1000] [--chunks 1000000]

For each number of replicas it builds an index with the given number of chunks and measures the time of hashing,
choosing and recording the dispatch, for prompts of 8 KB that share half of their text with one of 1000 prefixes; then
the longest pause while a replica leaves. The index is filled through the replicas' announcements. Times are the
thread's own CPU time, so that other programs on the machine hardly matter.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc

from argosy_protocol.chunk_hash import SegmentKind, chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.fleet import FleetService
from argosy_protocol.openai import decode_request
from argosy_router.fleet.replica import Member, Replica, ServiceKeys
from argosy_router.fleet.service import Service
from argosy_router.prefixes import ReplicaPrefixes, prompt_from
from argosy_router.prefixes import measure as measure_prompts
from argosy_router.simulation import unused_pool

PROMPT_BYTES = 8192
PREFIXES = 1000
DECISIONS = 3000
HOLDERS = 4
"""Number of replicas that hold each prefix of the prompts. All other chunks have one holder."""


def build(replicas: int, chunks: int, prefixes: list[bytes]) -> tuple[Service, float]:
    """Build a service with a full index; returns it with the index's bytes per chunk."""
    service = Service(FleetService(namespace="n", name="s", uid="u", model="tiny"), ServiceKeys(), chunks)
    for number in range(replicas):
        member = Member(f"r{number:03}", "", "http://unused")
        residency = ReplicaPrefixes(service.index)
        replica = Replica("n/s", member, unused_pool(member.url), residency)
        replica.link = "synced"
        replica.load.report(requests=number % 7, tokens=number * 13 % 2000, prefill_tokens_per_s=8000.0)
        service.replicas[member.name] = replica
    fleet = list(service.replicas.values())
    rng = random.Random(0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for prefix in prefixes:
        hashes = chunk_hashes([(SegmentKind.TEXT, prefix)], chain_seed(service.spec.model))
        for replica in rng.sample(fleet, min(HOLDERS, replicas)):
            replica.prefixes.stored(hashes, [64 * (position + 1) for position in range(len(hashes))])
    while len(service.index) < chunks * 0.95:
        hashes = [rng.getrandbits(64) for _ in range(4096)]
        rng.choice(fleet).prefixes.stored(hashes, range(64, 64 * 4097, 64))
    size = (tracemalloc.get_traced_memory()[0] - before) / len(service.index)
    tracemalloc.stop()
    return service, size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64, 512, 1000])
    parser.add_argument("--chunks", type=int, default=1_000_000)
    arguments = parser.parse_args()
    rng = random.Random(1)
    prefixes = [rng.randbytes(PROMPT_BYTES // 4).hex().encode() for _ in range(PREFIXES)]
    for replicas in arguments.replicas:
        measure(replicas, arguments.chunks, prefixes, rng)


def measure(replicas: int, chunks: int, prefixes: list[bytes], rng: random.Random) -> None:
    """Measure one number of replicas and print one line."""
    service, size = build(replicas, chunks, prefixes)
    hashing: list[float] = []
    choosing: list[float] = []
    recording: list[float] = []
    for _ in range(DECISIONS):
        text = rng.choice(prefixes).decode() + rng.randbytes(PROMPT_BYTES // 4).hex()
        request = decode_request("completions", b'{"prompt": "%b"}' % text.encode())
        started = time.thread_time()
        prompt = prompt_from(measure_prompts(prompt_segments(request), service.hasher.seed()))
        hashed = time.thread_time()
        choice = service.choose(prompt, 0.0, rng)
        chosen = time.thread_time()
        service.dispatched(choice, prompt, 0.0)
        recording.append(time.thread_time() - chosen)
        choosing.append(chosen - hashed)
        hashing.append(hashed - started)
    count = len(service.index)
    pauses = []
    next(iter(service.replicas.values())).prefixes.close()
    is_dirty = True
    while is_dirty:
        started = time.thread_time()
        is_dirty = service.index.scrub()
        pauses.append(time.thread_time() - started)
    print(
        f"{replicas:4} replicas  {count:9,} chunks of {size:4.0f} bytes  "
        + "  ".join(
            f"{name} p50 {at(times, 0.5):5.1f} p99 {at(times, 0.99):5.1f} us"
            for name, times in (("hash", hashing), ("choose", choosing), ("record", recording))
        )
        + f"  a leaving replica pauses {max(pauses) * 1e3:.2f} ms",
        flush=True,
    )


def at(times: list[float], share: float) -> float:
    return sorted(times)[int(share * len(times))] * 1e6


if __name__ == "__main__":
    main()
