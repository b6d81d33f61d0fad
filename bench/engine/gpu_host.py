"""Measure what launching one step costs the host of a GPU, without a GPU.

    PYTHONPATH=generators .venv/bin/python bench/engine/gpu_host.py

The engine's model runner launches steps of published shapes on a driver that starts nothing
(`gpu_accounting.host_runner`): first kernels by Triton's launcher, then by the driver
(`triton_kernels.direct_launch`). Of torch's matrix products only the allocation of the outputs is measured. The time of
a step is the least of many, because this is about the work and not about the machine's other tenants.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from collections.abc import Iterator

from gpu_accounting.host_runner import HostRunner, count_calls
from gpu_accounting.measurement import Shape, decode_again
from gpu_accounting.models import MODELS
from gpu_accounting.stub_driver import StubDriver

SHAPES = (
    Shape("decode of 4", decodes=4),
    Shape("decode of 64", decodes=64),
    Shape("8 decodes and 512 of a prompt", decodes=8, prompts=(512,)),
    Shape("2048 of a prompt", prompts=(2048,)),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["Qwen3-0.6B", "Qwen3-30B-A3B"])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    stub = StubDriver()
    print(f"Python {platform.python_version()}, {options.layers} layers, best of {options.repeats}\n")
    print("| model | step | launches of ours | by Triton, ms | directly, ms | us per launch | calls |")
    print("|---|---|---|---|---|---|---|")
    for model in options.model:
        for line in measure(stub, model, options.layers, options.repeats):
            print(line, flush=True)
    stub.close()
    return 0


def measure(stub: StubDriver, model: str, layers: int, repeats: int) -> Iterator[str]:
    results = []
    for is_direct in (False, True):
        runner = HostRunner(stub, MODELS[model], layers, is_direct=is_direct, has_products=False)
        results.append([_step(stub, runner, shape, repeats) for shape in SHAPES])
    for shape, (by_triton, _, _), (seconds, launches, calls) in zip(SHAPES, *results, strict=True):
        yield (
            f"| {model} | {shape.name} | {launches} | {by_triton * 1e3:.2f} | {seconds * 1e3:.2f} | "
            f"{seconds * 1e6 / launches:.1f} | {calls} |"
        )


def _step(stub: StubDriver, runner: HostRunner, shape: Shape, repeats: int) -> tuple[float, int, int]:
    """Return the least seconds of launching a step, how many kernels of ours it launches, and the calls."""
    times, launches, calls = [], 0, 0
    for repeat in range(repeats + 3):
        step = runner.add(shape)
        if not shape.prompts:
            runner.execute(step).get()
            again = decode_again(step)
        else:
            again = step
        before, started = stub.num_launches, time.perf_counter()
        if repeat == repeats + 2:
            calls = sum(count_calls(lambda again=again: runner.execute(again)).values())
            runner.execute(decode_again(step)).get()
        else:
            runner.execute(again).get()
            times.append(time.perf_counter() - started)
            launches = stub.num_launches - before
        runner.finish(step)
    return min(times[2:]), launches, calls


if __name__ == "__main__":
    raise SystemExit(main())
