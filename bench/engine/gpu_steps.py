"""Steps of an engine on the device: decodes and prompts against the roofline, hidden waits, and where time goes.

A decode step must read all weights, and the keys and values of its requests; the roofline is what that takes at the
speed of a copy. A prompt must multiply each token by all weights; the roofline is what that takes at the speed of one
large matrix product.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_device import Device
from random_model import VOCAB_SIZE

Prompts = list[list[int]]


class Shape(NamedTuple):
    """What of a checkpoint decides the roofline."""

    weight_bytes: int
    num_parameters: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, model: Path) -> Shape:
        from safetensors import safe_open

        from argosy_engine.models.config_file import load_model_config

        config, parameters = load_model_config(model), 0
        for file in model.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    parameters += size
        kv_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return cls(2 * parameters, parameters, kv_bytes)


def draw_prompts(seed: str, count: int, length: int) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(300, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


def start(model: Path, device: Device, **fields: Any) -> Any:
    from argosy_engine import LLM

    # Leaves memory for transformers' model.
    return LLM(
        str(model),
        device=device.torch.type,
        dtype="bfloat16",
        gpu_memory_utilization=0.6,
        max_num_seqs=256,
        **fields,
    )


def generate(llm: Any, batch: Prompts, length: int) -> None:
    from argosy_engine import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    llm.generate(batch, params, use_tqdm=False)


def token_seconds(run: Callable[[Prompts, int], None], batch: Prompts, length: int, device: Device) -> float:
    """Return the median seconds per token after the first; the batch's prompts are cached by a first run."""
    run(batch, 2)
    times: list[list[float]] = [[], []]
    for _ in range(3):
        for taken, count in zip(times, (1, length), strict=True):
            device.synchronize()
            before = time.perf_counter()
            run(batch, count)
            device.synchronize()
            taken.append(time.perf_counter() - before)
    first, whole = map(statistics.median, times)
    return (whole - first) / (length - 1)


def decodes(
    llm: Any,
    shape: Shape,
    device: Device,
    bandwidth: float,
    batches: tuple[int, ...],
    context: int,
    length: int,
) -> Iterator[tuple[int, float, float]]:
    """Yield batch sizes, seconds per step, and the share of the roofline."""
    for count in batches:
        batch = draw_prompts(f"decode {count}", count, context)
        seconds = token_seconds(lambda *run: generate(llm, *run), batch, length, device)
        kv_bytes = count * (context + length / 2) * shape.kv_bytes_per_token
        yield count, seconds, (shape.weight_bytes + kv_bytes) / bandwidth / seconds


def prefill(
    llm: Any, shape: Shape, device: Device, flops: float, count: int, length: int
) -> tuple[float, float]:
    """Return prompt tokens per second, and the share of the roofline."""
    speeds = []
    for number in range(4):
        batch = draw_prompts(f"prefill {number}", count, length)
        device.synchronize()
        before = time.perf_counter()
        generate(llm, batch, 1)
        speeds.append(count * length / (time.perf_counter() - before))
    speed = statistics.median(speeds[1:])
    return speed, speed * 2 * shape.num_parameters / flops


def transformers_decodes(
    model: Path, device: Device, batches: tuple[int, ...], context: int, length: int
) -> Iterator[tuple[int, float]]:
    """Yield batch sizes and seconds per token of `generate` with a static cache."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device.torch).eval()

    def run(batch: Prompts, count: int) -> None:
        ids = torch.tensor(batch, device=device.torch)
        with torch.inference_mode():
            hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                pad_token_id=0, cache_implementation="static",
            )  # fmt: skip

    for count in batches:
        yield count, token_seconds(run, draw_prompts(f"decode {count}", count, context), length, device)


def launch_waits(llm: Any, device: Device) -> str | None:
    """Run requests while every wait for the device within the launch of a step is an error; return the error, if any.

    Reading the tokens of a step, which is for later, is allowed.
    """
    from argosy_engine import SamplingParams

    executor = llm.client.core.executor
    execute, faults = executor.execute, []

    def watched(step: Any) -> Any:
        if device.is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(step)
        except RuntimeError as error:
            faults.append(str(error).splitlines()[0])
            raise
        finally:
            if device.is_cuda:
                torch.cuda.set_sync_debug_mode("default")

    batch = draw_prompts("waits", 4, 40)
    samplings = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1},
        {"temperature": 0.8, "presence_penalty": 0.5, "seed": 1, "logprobs": 5},
        {"temperature": 0.0, "logit_bias": {5: 1.0}, "min_tokens": 3},
    )
    params = [SamplingParams(max_tokens=8, **each) for each in samplings]
    executor.execute = watched
    try:
        llm.generate(batch, params, use_tqdm=False)
    except Exception as error:  # the core wraps what a step raised
        return faults[0] if faults else f"{type(error).__name__}: {error}"
    finally:
        executor.execute = execute
    return None


def breakdown(llm: Any, device: Device, count: int, context: int) -> list[tuple[str, int, float]]:
    """Return the kernels that took the most time in 16 decode steps: name, calls, share of the device's busy time."""
    batch = draw_prompts("breakdown", count, context)
    generate(llm, batch, 2)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device.is_cuda else activity.CPU]) as profiler:
        generate(llm, batch, 16)
        device.synchronize()
    key = "self_device_time_total" if device.is_cuda else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in events) or 1.0
    return [(event.key[:60], event.count, getattr(event, key) / total) for event in events[:12]]
