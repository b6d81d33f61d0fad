"""Check and measure the engine on one GPU, in under ten minutes and without a network. Run it with bench/gpu.sh.

    tokens       a small random checkpoint in float32: each of our greedy tokens must be transformers' best one
    kernels      each Triton kernel against torch, then its share of the memory's speed, which a copy reaches
    decode       a random model of Qwen3-0.6B's shape in bfloat16 at 1k context: share of the roofline (`gpu_steps`)
    prefill      the same model, prompts of 1k tokens
    eager        the same decodes with --enforce-eager, if the engine has CUDA graphs
    waits        no launch of a step waits for the device (torch.cuda.set_sync_debug_mode)
    breakdown    the kernels that take the time of decode steps
    dense, fp8, experts
                 decodes and prompts of larger published shapes with random weights (`gpu_models`)
    serving      `argosy serve` of the dense one with few tokens, measured by `argosy bench serve`
    transformers `generate` with a static cache on the same model and prompts as decode

Sections print as they end. One that fails, or for which no time is left, says "not measured" and why. The exit status
is 1 if a token or a kernel is wrong, or a launch waits. `--device cpu` only tries the script, with small settings.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
SECONDS = 560.0
"""Time for all sections; gpu.sh ends the program a little later."""
DECODE_LENGTH = 64


@dataclass
class Bench:
    """What the sections share: the device, the models, and the engine that most of them use."""

    options: argparse.Namespace
    started: float = field(default_factory=time.monotonic)
    is_wrong: bool = False
    _llm: Any = None

    def __post_init__(self) -> None:
        from gpu_device import Device

        self.device = Device(self.options.device)
        is_cuda = self.device.is_cuda
        self.batches = (1, 8, 64, 256) if is_cuda else (1, 2)
        self.context, self.length = (1024, DECODE_LENGTH) if is_cuda else (40, 4)
        self.bandwidth = self.device.copy_bytes_per_s()
        self.flops = self.device.matmul_flops_per_s()

    @property
    def left(self) -> float:
        """Seconds left."""
        return SECONDS - (time.monotonic() - self.started)

    def model(self) -> Path:
        from random_model import write

        shape = "q06" if self.device.is_cuda else "tiny"
        return write(self.options.models / shape, shape)

    def llm(self) -> Any:
        from gpu_steps import start

        if self._llm is None:
            self._llm = start(self.model(), self.device)
        return self._llm

    def release(self) -> None:
        """Free the engine's memory on the device, including what torch's allocator caches."""
        if self._llm is not None:
            free(self._llm, self.device.is_cuda)
            self._llm = None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS))
    parser.add_argument(
        "--missing", action="store_true", help="name what would have to be installed, and stop"
    )
    options = parser.parse_args()
    if options.missing:
        print(" ".join(name for module, name in NEEDED.items() if find_spec(module) is None))
        return 0
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    print(versions(options.device), flush=True)
    bench = Bench(options)
    print(
        f"copies of 1 GiB: {bench.bandwidth / 1e9:.0f} GB/s; matrix product: {bench.flops / 1e12:.0f} TFLOP/s"
    )
    for name in options.only:
        print(f"\n## {name}\n", flush=True)
        section, least_s = SECTIONS[name]
        if bench.left < least_s:
            print(f"not measured: {bench.left:.0f} s are left, and it takes up to {least_s} s", flush=True)
            continue
        before = time.monotonic()
        try:
            for line in section(bench):
                print(line, flush=True)
        except Exception as error:  # the other sections are worth having
            print(f"not measured: {type(error).__name__}: {error}", flush=True)
            bench.is_wrong |= name in ("tokens", "kernels", "waits")
        print(f"\n({time.monotonic() - before:.0f} s)", flush=True)
    return int(bench.is_wrong)


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


def free(llm: Any, is_cuda: bool) -> None:
    import gc

    import torch

    llm.close()
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()


def tokens(bench: Bench) -> Iterator[str]:
    """Compare greedy tokens for a batch of prompts of different lengths, then again with cached prefixes."""
    import torch
    from gpu_steps import draw_prompts
    from random_model import write
    from transformers import AutoModelForCausalLM

    from argosy_engine import LLM, SamplingParams

    device = bench.options.device
    model = write(bench.options.models / "tiny", "tiny")
    llm = LLM(str(model), device=device, dtype="float32", gpu_memory_utilization=0.3)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    batch = [prompt[: 5 + 37 * index] for index, prompt in enumerate(draw_prompts("check", 12, 500))]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    wrong = checked = 0
    with torch.inference_mode():
        for _ in range(2):
            for prompt, result in zip(batch, llm.generate(batch, params, use_tqdm=False), strict=True):
                output = list(result.outputs[0].token_ids)
                ids = torch.tensor([prompt + output], device=device)
                logits = hf(ids).logits[0, len(prompt) - 1 : -1]
                chosen = logits.gather(1, ids[0, len(prompt) :].unsqueeze(1)).squeeze(1)
                wrong += int((logits.max(-1).values - chosen > TIE).sum())
                checked += len(output)
    free(llm, bench.device.is_cuda)
    bench.is_wrong |= wrong > 0
    yield f"{checked - wrong} of {checked} tokens are transformers' choice"


def kernels(bench: Bench) -> Iterator[str]:
    from gpu_kernels import bandwidths, check

    for name, fault in check(bench.device):
        bench.is_wrong |= fault is not None
        yield f"{'wrong' if fault else 'right'}: {name}{': ' + fault if fault else ''}"
    yield "\n| kernel | us | GB/s | share of a copy |\n|---|---|---|---|"
    for name, seconds, speed in bandwidths(bench.device):
        yield f"| {name} | {seconds * 1e6:.1f} | {speed / 1e9:.1f} | {speed / bench.bandwidth:.0%} |"


def decode(bench: Bench) -> Iterator[str]:
    yield from _decodes(bench, bench.llm())


def _decodes(bench: Bench, llm: Any) -> Iterator[str]:
    from gpu_steps import Shape, decodes

    yield f"| batch, at {bench.context} tokens | ms per step | tok/s | share of the roofline |\n|---|---|---|---|"
    shape = Shape.of(bench.model())
    for count, seconds, share in decodes(
        llm, shape, bench.device, bench.bandwidth, bench.batches, bench.context, bench.length
    ):
        yield f"| {count} | {seconds * 1e3:.2f} | {count / seconds:.0f} | {share:.0%} |"


def prefill(bench: Bench) -> Iterator[str]:
    from gpu_steps import Shape
    from gpu_steps import prefill as measure

    speed, share = measure(
        bench.llm(),
        Shape.of(bench.model()),
        bench.device,
        bench.flops,
        16 if bench.device.is_cuda else 2,
        bench.context,
    )
    yield f"{speed:.0f} prompt tok/s, {share:.0%} of the roofline"


def eager(bench: Bench) -> Iterator[str]:
    from gpu_steps import start

    from argosy_engine.config import EngineArgs

    if "compilation_config" not in EngineArgs.__struct_fields__:
        yield "not measured: this engine has no CUDA graphs, so that the decodes above are eager"
        return
    bench.release()
    llm = start(bench.model(), bench.device, enforce_eager=True)
    try:
        yield from _decodes(bench, llm)
    finally:
        free(llm, bench.device.is_cuda)


def waits(bench: Bench) -> Iterator[str]:
    from gpu_steps import launch_waits

    fault = launch_waits(bench.llm(), bench.device)
    bench.is_wrong |= fault is not None
    yield "no launch of a step waits for the device" if fault is None else f"a launch waits: {fault}"


def breakdown(bench: Bench) -> Iterator[str]:
    from gpu_steps import breakdown as measure

    for count in (1, bench.batches[-2]):
        yield f"\n| batch {count} | calls | share of the busy time |\n|---|---|---|"
        for name, calls, share in measure(bench.llm(), bench.device, count, bench.context):
            yield f"| {name} | {calls} | {share:.1%} |"


def published(name: str) -> Callable[[Bench], Iterator[str]]:
    """Return the section that measures a shape of `gpu_models.MODELS`."""

    def section(bench: Bench) -> Iterator[str]:
        from gpu_models import MODELS, measure, start

        if not bench.device.is_cuda:
            yield "not measured: the model is too large for a CPU"
            return
        bench.release()
        llm = start(MODELS[name], config_folder(bench, MODELS[name]), bench.device)
        try:
            yield from measure(llm, MODELS[name], bench.device, bench.bandwidth, bench.flops)
        finally:
            free(llm, is_cuda=True)

    return section


def config_folder(bench: Bench, model: Any) -> Path:
    from random_model import write

    return model.write(bench.options.models, write(bench.options.models / "tiny", "tiny"))


def serving(bench: Bench) -> Iterator[str]:
    from gpu_models import SERVED, serve

    if not bench.device.is_cuda:
        yield "not measured: the model is too large for a CPU"
        return
    bench.release()
    yield from serve(config_folder(bench, SERVED), ("8", "32", "inf"))


def transformers(bench: Bench) -> Iterator[str]:
    from gpu_steps import transformers_decodes

    bench.release()
    yield f"| batch, at {bench.context} tokens | ms per step | tok/s |\n|---|---|---|"
    for count, seconds in transformers_decodes(
        bench.model(), bench.device, bench.batches[:-1], bench.context, bench.length
    ):
        yield f"| {count} | {seconds * 1e3:.2f} | {count / seconds:.0f} |"


SECTIONS: dict[str, tuple[Callable[[Bench], Iterator[str]], float]] = {
    "tokens": (tokens, 60),
    "kernels": (kernels, 60),
    "decode": (decode, 60),
    "prefill": (prefill, 10),
    "waits": (waits, 10),
    "breakdown": (breakdown, 15),
    "eager": (eager, 60),
    "dense": (published("dense"), 60),
    "fp8": (published("fp8"), 60),
    "experts": (published("experts"), 70),
    "serving": (serving, 90),
    "transformers": (transformers, 60),
}
"""Sections by name, and the seconds that must be left for one to start."""


if __name__ == "__main__":
    raise SystemExit(main())
