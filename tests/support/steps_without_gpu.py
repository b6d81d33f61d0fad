"""A program: compiles kernels for an H100 and starts none, warms a model runner up, then runs other steps.

Prints, as a line of JSON for each model, how many kernels were compiled before and after the warm-up ended, and how
many were started. Results are zeros; what counts is what Triton compiles. Each model has a process, in which nothing is
compiled yet: a copy of this one, because importing torch takes longer than the steps.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from argosy_engine.config import EngineArgs
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.params import SamplingParams
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES
from argosy_engine.worker.model_runner import ModelRunner
from argosy_engine.worker.warm_up import dummy_request, dummy_step, warm_up
from checked_copies import CheckedRuntime

ROWS, TOKENS, LENGTH, STEPS = 24, 512, 400, 40
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
)
COMPILES = "_do_compile"
"""Name of the method that is called once for each variant of a kernel. Triton's cache on disk, which it asks before it
compiles, does not change how often."""
counts = {"compiled": 0, "started": 0}


class Launcher:
    """Starts nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        counts["started"] += 1


class Driver:
    """Of an H100 that is not there."""

    launcher_cls = Launcher

    @property
    def utils(self) -> Driver:
        return self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": KNOWN_DEVICES["H100"].shared_memory}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024


def count_compilations() -> None:
    compile_kernel = getattr(JITFunction, COMPILES)

    def counted(*arguments: Any, **options: Any) -> Any:
        counts["compiled"] += 1
        return compile_kernel(*arguments, **options)

    setattr(JITFunction, COMPILES, counted)


def zeros_instead_of_anything() -> None:
    """Results that nobody computes must at least be token ids."""
    empty = torch.empty
    torch.empty = lambda *shape, **options: empty(*shape, **options).zero_()


def runner_of(path: Path, args: EngineArgs) -> ModelRunner:
    config, cpu = load_model_config(path), torch.device("cpu")
    model = load_model(
        path, config, dtype=torch.bfloat16, device=cpu, attention_backend="triton", max_positions=LENGTH + 1,
        load_format="dummy", seed=0,
    ).model  # fmt: skip
    return ModelRunner(
        model, config, num_states=2,
        num_blocks=4, block_size=16, max_num_seqs=ROWS, max_num_batched_tokens=TOKENS,
        max_model_len=LENGTH, device=cpu, runtime=CheckedRuntime(),
        sampling=SamplerOptions(vocab_size=config.vocab_size, kind="kernels"),
    )  # fmt: skip


def run_steps(runner: ModelRunner, args: EngineArgs) -> None:
    rng = random.Random(0)
    for _ in range(STEPS):
        requests, left = [], TOKENS
        for row in range(rng.randint(1, ROWS)):
            length = rng.randint(2, LENGTH - 1)
            new = min(rng.choice((1, 1, 1, rng.randint(1, 16), length)), length, left)
            if new:
                requests.append(dummy_request(runner, args, row, length, length - new, rng.choice(SAMPLING)))
                left -= new
        runner.execute(dummy_step(requests, None)).get()
        runner.execute(dummy_step([], None, [request.request_id for request in requests]))


def count(path: Path) -> None:
    args = EngineArgs.of(
        model=str(path), max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, block_size=16, max_logprobs=0
    )
    runner = runner_of(path, args)
    warm_up(runner, args, LENGTH, has_tiles=load_model_config(path).num_routed_experts > 0)
    warmed = dict(counts)
    run_steps(runner, args)
    print(json.dumps({"warmed": warmed, "after": counts}), flush=True)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    count_compilations()
    zeros_instead_of_anything()
    torch.set_num_threads(1)  # the copies have no other threads
    for path in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            count(Path(path))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            sys.exit(f"{path}: status {status}")


if __name__ == "__main__":
    main()
