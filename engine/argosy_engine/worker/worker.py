"""Worker: one device from start to shutdown. Chooses device and dtype, loads weights, sizes the KV cache."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from msgspec import Struct

from argosy_engine.config import EngineArgs, MemoryBudget
from argosy_engine.errors import ConfigError
from argosy_engine.models.config import ModelConfig, load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.models.source import resolve_model
from argosy_engine.worker.device import DeviceMemory, choose_dtype, cpu_memory
from argosy_engine.worker.memory import estimate_activations, plan_memory, wanted_model_len
from argosy_engine.worker.model_runner import ModelRunner
from argosy_engine.worker.profile import measure_activations
from argosy_engine.worker.step import ModelRunnerOutput, SchedulerOutput

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """What the worker settled on."""

    model_path: str
    model_fingerprint: str
    config: ModelConfig
    device: str
    dtype: str
    memory: MemoryBudget
    phases: tuple[tuple[str, float], ...]


class Worker:
    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        self._phases: list[tuple[str, float]] = []
        self._runner: ModelRunner | None = None

    def start(self) -> WorkerInfo:
        """Loads the model and allocates the KV cache.

        Raises:
            ConfigError: see the message.
        """
        args = self.args
        with self._phase("device"):
            device = _choose_device(args)
            torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
            memory = cpu_memory() if device.type == "cpu" else _cuda_memory(device)
        with self._phase("config"):
            path = resolve_model(args.model)
            config = load_model_config(path)
            dtype = _DTYPES[choose_dtype(args.dtype, config.dtype, device.type)]
            if isinstance(args.max_model_len, int):  # tell it before the weights are read
                wanted_model_len(args, config)
        with self._phase("weights"):
            loaded = load_model(
                path,
                config,
                dtype=dtype,
                device=device,
                max_positions=wanted_model_len(args, config) + 1,
                load_format=args.load_format,
                seed=args.seed,
            )

        def runner(num_blocks: int, max_model_len: int) -> ModelRunner:
            return ModelRunner(
                loaded.model,
                config,
                num_blocks=num_blocks,
                block_size=args.block_size,
                max_num_seqs=args.max_num_seqs,
                max_model_len=max_model_len,
                dtype=dtype,
                device=device,
            )

        if device.type == "cpu":
            activation_bytes = estimate_activations(config, args, dtype.itemsize)
        else:
            with self._phase("profile"):
                activation_bytes = measure_activations(runner, args, wanted_model_len(args, config), memory)
        with self._phase("kv cache"):
            budget = plan_memory(
                args,
                config,
                memory,
                itemsize=dtype.itemsize,
                weights_bytes=loaded.num_bytes,
                activation_bytes=activation_bytes,
            )
            self._runner = runner(budget.num_blocks, budget.max_model_len)
        return WorkerInfo(
            model_path=str(path),
            model_fingerprint=_fingerprint(path, config, str(dtype), args),
            config=config,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            memory=budget,
            phases=tuple(self._phases),
        )

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        assert self._runner is not None
        return self._runner.execute(step)

    def shutdown(self) -> None:
        self._runner = None

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._phases.append((name, time.perf_counter() - started))


def _choose_device(args: EngineArgs) -> torch.device:
    has_cuda = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device auto or cpu")
    return torch.device("cuda" if has_cuda else "cpu")


def _cuda_memory(device: torch.device) -> DeviceMemory:
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory("cuda", torch.cuda.get_device_name(device), total, free)


def _fingerprint(path: Path, config: ModelConfig, dtype: str, args: EngineArgs) -> str:
    """Digest of what determines the tokens a seed gives: config, weights' identity (names, sizes), tokenizer, dtype."""
    digest = hashlib.sha256(f"{config!r}|{dtype}|{args.load_format}|{args.seed}".encode())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"|{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(1 << 16))
    tokenizer = path / "tokenizer.json"
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()[:32]
