"""Compare the engine with transformers on a GPU: greedy tokens and speed. Run it with bench/gpu.sh.

    1. tokens: a small random checkpoint in float32; each of our greedy tokens must be transformers' best one.
    2. offline: 16 x and 64 x (128 in, 128 out) of a random 449 M model in bfloat16, against `generate`.
    3. one stream: TTFT of 512 tokens, ITL, and the share of the memory bandwidth that a decode step reaches. A step
       reads all weights once; the bandwidth is that of a large copy, measured here.
    4. served: the same through `argosy serve`, 1 and 16 in flight.

Rounds alternate; the first one warms up. `--device cpu` only tests the script itself, with small settings.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NEEDED = {
    "msgspec": "msgspec", "xxhash": "xxhash", "zmq": "pyzmq", "uvloop": "uvloop", "httptools": "httptools",
    "prometheus_client": "prometheus_client", "yaml": "pyyaml", "rich": "rich", "jsonschema": "jsonschema",
    "jinja2": "jinja2", "tokenizers": "tokenizers", "safetensors": "safetensors", "fastapi": "fastapi",
    "uvicorn": "uvicorn", "celpy": "cel-python",
}  # fmt: skip
"""Maps the modules that the engine imports besides torch to their distributions."""
TIE = 1e-3
"""A token is accepted if its logit is at most this far below transformers' best one: the order of summation differs."""
GIB = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    parser.add_argument(
        "--missing", action="store_true", help="name what would have to be installed, and stop"
    )
    options = parser.parse_args()
    if options.missing:
        print(" ".join(name for module, name in NEEDED.items() if find_spec(module) is None))
        return 0
    is_small = options.device == "cpu"
    print(versions(options.device), flush=True)
    print("\n## Greedy tokens in float32\n", flush=True)
    if not check_tokens(options):
        return 1
    shape = "tiny" if is_small else "m06"
    rows = [
        *offline(options, shape, (4,) if is_small else (16, 64), 8 if is_small else 128),
        *served(options, shape),
    ]
    print(f"\n## Speed: random {shape}, bfloat16, medians of {options.rounds}\n")
    print("| | argosy | transformers | ours is |\n|---|---|---|---|")
    for name, ours, theirs in rows:
        ratio = "" if theirs is None else f"{ours / theirs:.2f}x"
        print(f"| {name} | {ours:.4g} | {'' if theirs is None else f'{theirs:.4g}'} | {ratio} |")
    return 0


def versions(device: str) -> str:
    import torch

    parts = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    parts += [f"{name} {metadata.version(name)}" for name in ("transformers", "triton") if find_spec(name)]
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        capability = f"compute capability {about.major}.{about.minor}"
        parts.insert(
            0, f"{about.name}, {about.total_memory / GIB:.0f} GiB, {capability}, CUDA {torch.version.cuda}"
        )
    else:
        parts.insert(0, "CPU: this tries the script, its figures mean nothing")
    return ", ".join(parts)


def prompts(seed: str, count: int, length: int) -> list[list[int]]:
    from random_model import VOCAB_SIZE

    rng = random.Random(seed)
    return [[rng.randrange(300, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


def engine(options: argparse.Namespace, model: Path, dtype: str) -> Any:
    from argosy_engine import LLM

    # Leaves memory for transformers' model, which is loaded at the same time.
    return LLM(str(model), device=options.device, dtype=dtype, gpu_memory_utilization=0.5)


def release(options: argparse.Namespace, llm: Any) -> None:
    """Free the engine's memory on the device, including what torch's allocator caches."""
    import torch

    llm.close()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def generate(llm: Any, batch: list[list[int]], length: int) -> list[list[int]]:
    from argosy_engine import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return [output.token_ids for output in llm.generate(batch, params, use_tqdm=False)]


def reference(options: argparse.Namespace, model: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    return loaded.to(options.device).eval()


def check_tokens(options: argparse.Namespace) -> bool:
    """Compare greedy tokens for a batch of prompts of different lengths, then again with cached prefixes."""
    import torch
    from random_model import write

    model = write(options.models / "tiny", "tiny")
    llm, hf = engine(options, model, "float32"), reference(options, model, "float32")
    batch = [prompt[: 5 + 37 * index] for index, prompt in enumerate(prompts("check", 12, 500))]
    wrong = checked = 0
    with torch.inference_mode():
        for _ in range(2):
            for prompt, output in zip(batch, generate(llm, batch, 32), strict=True):
                logits = hf(torch.tensor([prompt + output], device=options.device)).logits[
                    0, len(prompt) - 1 : -1
                ]
                chosen = logits.gather(1, torch.tensor(output, device=options.device).unsqueeze(1)).squeeze(1)
                wrong += int((logits.max(-1).values - chosen > TIE).sum())
                checked += len(output)
    release(options, llm)
    print(f"{checked - wrong} of {checked} tokens are transformers' choice", flush=True)
    return wrong == 0


def offline(
    options: argparse.Namespace, shape: str, batches: tuple[int, ...], length: int
) -> list[tuple[str, float, float | None]]:
    """Measure offline generation; returns (figure, our value, transformers' value)."""
    from random_model import write

    model = write(options.models / shape, shape)
    started = time.perf_counter()
    llm = engine(options, model, "bfloat16")
    generate(llm, [[5, 6, 7]], 1)
    start_s = time.perf_counter() - started
    hf = reference(options, model, "bfloat16")
    contenders: tuple[Callable[[list[list[int]], int], Any], ...] = (
        lambda batch, tokens: generate(llm, batch, tokens),
        lambda batch, tokens: hf_generate(options, hf, batch, tokens),
    )
    rows: list[tuple[str, float, float | None]] = [("start to first token s", start_s, None)]
    for size in batches:
        speeds = [
            [size * length / seconds for seconds in each]
            for each in timed(options, contenders, f"offline {size}", size, 128, length)
        ]
        rows.append((f"{size} x (128 in, {length} out): out tok/s", *map(statistics.median, speeds)))
    first = [statistics.median(each) for each in timed(options, contenders, "first", 1, 512, 1)]
    whole = [statistics.median(each) for each in timed(options, contenders, "whole", 1, 512, length)]
    itl = [(total - ttft) / (length - 1) for total, ttft in zip(whole, first, strict=True)]
    rows.append(("one stream: TTFT of 512 tokens ms", *(value * 1e3 for value in first)))
    rows.append(("one stream: ITL ms", *(value * 1e3 for value in itl)))
    if options.device == "cuda":
        num_bytes = sum(parameter.nbytes for parameter in hf.parameters())
        least = num_bytes / copy_bytes_per_s()
        rows.append(("one stream: share of the memory's speed", *(least / value for value in itl)))
    release(options, llm)
    return rows


def timed(
    options: argparse.Namespace,
    contenders: tuple[Callable[[list[list[int]], int], Any], ...],
    name: str,
    count: int,
    input_len: int,
    output_len: int,
) -> list[list[float]]:
    """Return the seconds of each contender's rounds. Prompts differ from round to round, so nothing is cached."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(options.rounds + 1):
        batch = prompts(f"{name} {number}", count, input_len)
        for measured, run in zip(seconds, contenders, strict=True):
            synchronize(options)
            before = time.perf_counter()
            run(batch, output_len)
            synchronize(options)
            if number:
                measured.append(time.perf_counter() - before)
    print(f"{name}: done", flush=True)
    return seconds


def hf_generate(options: argparse.Namespace, model: Any, batch: list[list[int]], length: int) -> None:
    import torch

    ids = torch.tensor(batch, device=options.device)
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip


def synchronize(options: argparse.Namespace) -> None:
    import torch

    if options.device == "cuda":
        torch.cuda.synchronize()


def copy_bytes_per_s() -> float:
    """Measure the device's memory bandwidth, reads plus writes, with copies of 1 GiB."""
    import torch

    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * GIB / min(times)


def served(options: argparse.Namespace, shape: str) -> list[tuple[str, float, float | None]]:
    """Measure streamed completions over HTTP; returns (figure, our value, None)."""
    from servers import start_argosy
    from stream_client import closed_loop

    server = start_argosy(
        str(options.models / shape), "bfloat16", options.models, 1, "--gpu-memory-utilization", "0.5",
        device=options.device,
    )  # fmt: skip
    rows: list[tuple[str, float, float | None]] = [("served: start to first token s", server.start_s, None)]
    try:
        for in_flight in (1, 16):
            figures: list[tuple[float, float, float]] = []
            for number in range(options.rounds + 1):
                batch = prompts(f"served {in_flight} {number}", 2 * in_flight, 128)
                with server.awake():
                    streams, seconds = asyncio.run(closed_loop(server.url, "bench", batch, 64, in_flight))
                ttft, itl = (
                    statistics.median(getattr(stream, name) for stream in streams) for name in ("ttft", "itl")
                )
                figures.append((ttft * 1e3, itl * 1e3, len(streams) * 64 / seconds))
            columns = zip(*figures[1:], strict=True)
            for name, values in zip(("TTFT p50 ms", "ITL p50 ms", "out tok/s"), columns, strict=True):
                rows.append((f"served, {in_flight} in flight: {name}", statistics.median(values), None))
    finally:
        server.stop()
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
