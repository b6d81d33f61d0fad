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

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.models.config import ModelConfig, load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.models.source import resolve_model
from argosy_engine.worker.memory import CPU_SHARE, available_cpu_memory, num_kv_blocks
from argosy_engine.worker.model_runner import ModelRunner
from argosy_engine.worker.step import ModelRunnerOutput, SchedulerOutput

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GPU_ACTIVATION_RESERVE = 1 << 30


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """What the worker settled on."""

    model_path: str
    model_fingerprint: str
    config: ModelConfig
    device: str
    dtype: str
    max_model_len: int
    num_blocks: int
    kv_cache_bytes: int
    weights_bytes: int
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
        with self._phase("config"):
            path = resolve_model(args.model)
            config = load_model_config(path)
            dtype = _choose_dtype(args, config, device)
            max_model_len = _choose_max_model_len(args, config)
        with self._phase("weights"):
            loaded = load_model(
                path,
                config,
                dtype=dtype,
                device=device,
                max_positions=max_model_len + 1,
                load_format=args.load_format,
                seed=args.seed,
            )
        with self._phase("kv cache"):
            block_bytes = (
                2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
                * dtype.itemsize * args.block_size
            )  # fmt: skip
            num_blocks = num_kv_blocks(
                args,
                block_bytes=block_bytes,
                free_bytes=_free_bytes(args, device),
                max_model_len=max_model_len,
            )
            runner = ModelRunner(
                loaded.model,
                config,
                num_blocks=num_blocks,
                block_size=args.block_size,
                max_num_seqs=args.max_num_seqs,
                max_model_len=max_model_len,
                dtype=dtype,
                device=device,
            )
        self._runner = runner
        return WorkerInfo(
            model_path=str(path),
            model_fingerprint=_fingerprint(path, config, str(dtype), args),
            config=config,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            kv_cache_bytes=num_blocks * block_bytes,
            weights_bytes=loaded.num_bytes,
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


def _choose_dtype(args: EngineArgs, config: ModelConfig, device: torch.device) -> torch.dtype:
    if args.dtype != "auto":
        return _DTYPES[args.dtype]
    dtype = _DTYPES.get(config.dtype, torch.float32)
    if device.type != "cpu" or dtype is torch.float32:
        return dtype
    return torch.bfloat16 if _has_bf16_instructions() else torch.float32


def _has_bf16_instructions() -> bool:
    """Whether the CPU multiplies bf16 natively. Without, oneDNN emulates it, several times slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _choose_max_model_len(args: EngineArgs, config: ModelConfig) -> int:
    if args.max_model_len is None:
        return config.max_position_embeddings
    if args.max_model_len > config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {args.max_model_len} exceeds the model's {config.max_position_embeddings} positions"
        )
    return args.max_model_len


def _free_bytes(args: EngineArgs, device: torch.device) -> int:
    if device.type == "cpu":
        return int(available_cpu_memory() * CPU_SHARE)
    free, total = torch.cuda.mem_get_info(device)
    return max(int(free - total * (1.0 - args.gpu_memory_utilization)) - _GPU_ACTIVATION_RESERVE, 0)


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
