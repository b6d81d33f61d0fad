"""Check that a serving engine's memory does not grow over many requests of every kind.

    python bench/engine/memory.py --requests 10000

32 requests are in flight at a time, drawn from `KINDS`: streamed and not, cancelled by their client, with several
choices, log probabilities, tools, ever-new schemas, salts and prompts, and invalid ones. Nothing is sent twice, so that
anything kept per request, prompt or schema shows. The KV cache and the grammar cache are small enough to be full, and
evicting, after the warm-up.

The memory of the API process and of the core is read after the warm-up, and after each 1/25 of the requests. RSS and
PSS are shown; the anonymous part is judged, because library pages are shared with other processes. The result is the
median slope over all pairs of readings (Theil-Sen), which a jump of the allocator in the first or last third does not
change. Exits with 1 if a process grows by more than --tolerance bytes per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from results import save
from servers import Server, start_argosy

IN_FLIGHT = 32
KV_BLOCKS = 1024
"""16 k tokens, which a few hundred requests fill."""
GRAMMAR_CACHE = "2M"
"""About 60 grammars, which the warm-up fills."""
READINGS = 25
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
"""Make glibc return freed tensors at once instead of keeping a varying amount of about 10 MiB."""


class Call(NamedTuple):
    path: str
    body: dict[str, Any]
    status: int = 200
    is_cut_off: bool = False
    """Whether the client disconnects after the first bytes of the answer."""


def words(rng: random.Random, count: int) -> str:
    return " ".join(
        f"{rng.choice('bcdfgklmnprst')}{rng.choice('aeiou')}{rng.randrange(10**6)}" for _ in range(count)
    )


def completion(rng: random.Random, **fields: Any) -> Call:
    body = {"prompt": words(rng, rng.randint(1, 30)), "max_tokens": rng.randint(1, 24), **fields}
    return Call("/v1/completions", body)


def chat(rng: random.Random, **fields: Any) -> Call:
    messages = [{"role": "user", "content": words(rng, rng.randint(1, 20))}]
    return Call("/v1/chat/completions", {"messages": messages, "max_tokens": 16, **fields})


def schema(rng: random.Random) -> dict[str, Any]:
    kinds = ({"type": "integer"}, {"type": "boolean"}, {"enum": [words(rng, 1), words(rng, 1)]})
    properties = {words(rng, 1): rng.choice(kinds) for _ in range(rng.randint(1, 4))}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def json_schema(rng: random.Random) -> Call:
    return chat(
        rng, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema(rng)}}
    )


def regex(rng: random.Random) -> Call:
    return completion(rng, structured_outputs={"regex": f"({words(rng, 1)}|[0-9]{{3}})+"}, stream=True)


def tools(rng: random.Random) -> Call:
    function = {"name": f"f{rng.randrange(10**9)}", "description": words(rng, 4), "parameters": schema(rng)}
    offered = [{"type": "function", "function": function}]
    return chat(rng, tools=offered, tool_choice=rng.choice(("auto", "required")), stream=rng.random() < 0.5)


def cut_off(rng: random.Random) -> Call:
    call = rng.choice((chat, completion))(rng, stream=True, max_tokens=200, ignore_eos=True)
    return call._replace(is_cut_off=True)


def refused(rng: random.Random) -> Call:
    """Make a request that fails in the decoder, the routes, the frontend or the grammar compiler."""
    pattern = {"structured_outputs": {"regex": "(" + words(rng, 1)}}
    return rng.choice(
        (
            completion(rng, n=words(rng, 1))._replace(status=400),
            completion(rng, model=words(rng, 1))._replace(status=404),
            completion(rng, prompt=[1] * 100_000)._replace(status=400),
            completion(rng, **pattern)._replace(status=400),
            chat(rng, messages=[])._replace(status=400),
            Call("/v1/" + words(rng, 1), {}, status=404),
        )
    )


KINDS: dict[str, tuple[int, Callable[[random.Random], Call]]] = {
    "completion, streamed": (4, lambda rng: completion(rng, stream=True)),
    "completion": (2, completion),
    "chat, streamed": (4, lambda rng: chat(rng, stream=True, stream_options={"include_usage": True})),
    "chat": (2, chat),
    "cut off": (4, cut_off),
    "several choices": (2, lambda rng: completion(rng, n=3, temperature=1.0, stream=rng.random() < 0.5)),
    "log probabilities": (1, lambda rng: chat(rng, logprobs=True, top_logprobs=5)),
    "prompt log probabilities": (1, lambda rng: completion(rng, prompt_logprobs=2, logprobs=2)),
    "sampling": (
        2,
        lambda rng: chat(rng, temperature=0.8, top_p=0.9, frequency_penalty=0.5, stop=[words(rng, 1)]),
    ),
    "salted": (1, lambda rng: chat(rng, cache_salt=words(rng, 3), request_id=f"r{rng.randrange(10**12)}")),
    "JSON schema": (2, json_schema),
    "regular expression": (1, regex),
    "tools": (2, tools),
    "embedding": (1, lambda rng: Call("/v1/embeddings", {"input": words(rng, 20)})),
    "refused": (3, refused),
}
"""Maps names to their share of the requests and the function that makes one."""


async def exchange(server: Server, call: Call) -> None:
    """Send one request and read its answer.

    Raises:
        SystemExit: the answer has another status than expected.
    """
    address = urlsplit(server.url)
    body = json.dumps({"model": "bench", **call.body}).encode()
    head = (
        f"POST {call.path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(head.encode() + body)
        answer = await reader.read(2000)
        status = int(answer.split(b" ", 2)[1])
        if status != call.status:
            raise SystemExit(f"{call.path} {call.body} was answered with {answer.decode(errors='replace')}")
        while not call.is_cut_off and await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def send(server: Server, rng: random.Random, kinds: list[str], count: int, sent: Counter[str]) -> None:
    """Send `count` requests of these kinds, drawn by their shares."""
    drawn = iter(rng.choices(kinds, [KINDS[kind][0] for kind in kinds], k=count))

    async def worker() -> None:
        for kind in drawn:
            await exchange(server, KINDS[kind][1](rng))
            sent[kind] += 1

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


class Memory(NamedTuple):
    """A process's memory in bytes."""

    rss: int
    pss: int
    anonymous: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {name: int(size) << 10 for name, size, *_ in (line.split() for line in lines)}
        return cls(sizes["Rss:"], sizes["Pss:"], sizes["Anonymous:"])

    def __str__(self) -> str:
        return "anonymous {:.2f}, PSS {:.1f}, RSS {:.1f} MiB".format(
            *(size / 2**20 for size in (self.anonymous, self.pss, self.rss))
        )


def processes(server: Server) -> dict[str, int]:
    """Return the process ids of the API server and of the core that it started, by name."""
    api = server.process.pid
    (core,) = Path(f"/proc/{api}/task/{api}/children").read_text().split() or [""]
    return {"API": api, "core": int(core)}


def slope(points: list[tuple[int, int]]) -> float:
    """Return the median slope over all pairs of points (x, y)."""
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))


def measure(server: Server, options: argparse.Namespace) -> dict[str, list[tuple[int, int]]]:
    """Send all requests; returns (requests since the warm-up, anonymous bytes) per reading, by process."""
    rng, sent = random.Random(options.seed), Counter[str]()
    kinds = [options.only] if options.only else list(KINDS)
    started = time.perf_counter()
    asyncio.run(send(server, rng, kinds, options.warm_up, sent))
    pids = processes(server)
    points: dict[str, list[tuple[int, int]]] = {name: [] for name in pids}
    sent.clear()
    print(f"{options.warm_up} requests to warm up: {time.perf_counter() - started:.0f} s", flush=True)
    for reading in range(READINGS + 1):
        if reading:
            asyncio.run(send(server, rng, kinds, options.requests // READINGS, sent))
        line = f"{sent.total():>7} requests, {time.perf_counter() - started:5.0f} s"
        for name, pid in pids.items():
            memory = Memory.of(pid)
            points[name].append((sent.total(), memory.anonymous))
            line += f"   {name}: {memory}"
        print(line, flush=True)
    print("sent: " + ", ".join(f"{count} {kind}" for kind, count in sorted(sent.items())))
    return points


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin://tiny")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=2_000, help="requests before the first reading")
    parser.add_argument("--tolerance", type=float, default=200.0, help="bytes per request that are noise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="one kind of request, to find what grows")
    parser.add_argument("--json", type=Path, help="file for the slopes")
    parser.add_argument(
        "--models", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench", help="for logs"
    )
    options = parser.parse_args()
    flags = ("--num-gpu-blocks-override", str(KV_BLOCKS), "--structured-outputs-cache-bytes", GRAMMAR_CACHE)
    server = start_argosy(options.model, "float32", options.models, 1, *flags, env=ALLOCATOR)
    try:
        with server.awake():
            points = measure(server, options)
    finally:
        server.stop()
    slopes = {name: slope(readings) for name, readings in points.items()}
    for name, bytes_per_request in slopes.items():
        grown = points[name][-1][1] - points[name][0][1]
        print(f"{name}: {bytes_per_request:+.0f} bytes per request ({grown / 2**20:+.2f} MiB in all)")
    save({"argosy": {f"{name}: bytes per request": [value] for name, value in slopes.items()}}, options.json)
    has_grown = max(slopes.values()) > options.tolerance
    print(
        f"verdict: memory {'GROWS' if has_grown else 'is steady'} (tolerance {options.tolerance:g} bytes per request)"
    )
    return int(has_grown)


if __name__ == "__main__":
    raise SystemExit(main())
