"""Measure how much the client of `argosy bench serve` can take: its CPU time per token, and tokens per second.

    python bench/engine/client_ceiling.py [--vllm-python VENV/bin/python]

A mock engine in a process of its own answers each completion at once with a stream of EVENTS tokens. It writes them one
by one, so that most arrive alone. CPU time is the client's process alone; tokens per second depend on the mock as well,
which is usually the slower one, and are a lower bound. With vLLM's interpreter `vllm bench serve` meets the same mock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from argosy_engine.benchmarks.load_generator import LoadResult, RequestTemplate, run_load
from argosy_engine.benchmarks.prompt_datasets import SampleRequest
from argosy_engine.benchmarks.streaming_http import StreamingHttp

MOCK = Path(__file__).parents[1] / "router" / "mock_engine.py"
TOKENIZER = Path(__file__).parents[2] / "models" / "argosy-tiny"
VLLM_CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
START_TIMEOUT_S = 60.0


@contextmanager
def mock_engine(events: int) -> Iterator[str]:
    """Run the mock until the block ends; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(MOCK), str(port), "--events", str(events)])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                uvloop.run(load(url, 1, 1))
                break
            except RuntimeError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()


async def load(url: str, requests: int, concurrency: int) -> LoadResult:
    """
    Raises:
        RuntimeError: a request failed.
    """
    client = StreamingHttp(url)
    template = RequestTemplate(backend="openai", path="/v1/completions", model="tiny", ignore_eos=True)
    samples = [SampleRequest("word " * 128, 128, 128, f"bench-{number}") for number in range(requests)]
    try:
        result = await run_load(client, template, samples, [0.0] * requests, concurrency)
    finally:
        await client.close()
    for output in result.outputs:
        if not output.success:
            raise RuntimeError(output.error)
    return result


def ours(url: str, requests: int, concurrency: int, events: int) -> str:
    result = uvloop.run(load(url, requests, concurrency))
    tokens = sum(len(output.itl) + 1 for output in result.outputs)
    assert tokens == requests * events
    return line("argosy bench serve", tokens, requests, result.duration, result.client_cpu_s)


def theirs(python: str, url: str, requests: int, concurrency: int, events: int) -> str:
    """Run `vllm bench serve`. Its CPU time less that of a run of one request is that of its load."""
    one = vllm_run(python, url, 1, 1, events)
    many = vllm_run(python, url, requests, concurrency, events)
    cpu_s = many[1] - one[1]
    return line("vllm bench serve", requests * events, requests, many[0], cpu_s)


def vllm_run(python: str, url: str, requests: int, concurrency: int, events: int) -> tuple[float, float]:
    """Return the run's duration and the CPU seconds of its process."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [
                python, "-c", VLLM_CLIENT, "--base-url", url, "--model", "tiny", "--tokenizer", str(TOKENIZER),
                "--random-input-len", "4", "--random-output-len", str(events), "--num-prompts", str(requests),
                "--max-concurrency", str(concurrency), "--disable-tqdm", "--save-result", "--result-filename",
                f"{folder}/r.json",
            ],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        duration = json.loads((Path(folder) / "r.json").read_text())["duration"]
    return duration, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def line(name: str, tokens: int, requests: int, duration: float, cpu_s: float) -> str:
    return (
        f"{name:<20} {tokens / duration:>9.0f} tok/s {requests / duration:>7.0f} req/s "
        f"{cpu_s / tokens * 1e6:>7.2f} us CPU per token {cpu_s / duration:>6.0%} of a core"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--vllm-python", help="interpreter with vllm; left out if not given")
    options = parser.parse_args()
    with mock_engine(options.events) as url:
        for concurrency in options.concurrency:
            print(f"{concurrency} in flight")
            print(" ", ours(url, options.requests, concurrency, options.events), flush=True)
            if options.vllm_python:
                print(
                    " ",
                    theirs(options.vllm_python, url, options.requests, concurrency, options.events),
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
