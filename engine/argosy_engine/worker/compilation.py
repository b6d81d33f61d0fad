"""Compilation: whether a worker compiles its layers, with which cache, and what became of it.

`--compilation-config '{"level": 3}'` asks for it. Where it is impossible, or fails its test, the layers run at level 0,
and a line of the log says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from argosy_engine.config import EngineArgs
from argosy_engine.layers.layer_compiler import LayerCompiler
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.models.registry import CausalLM
from argosy_engine.native.build import NativeUnavailable, find_compiler
from argosy_engine.worker.compilation_cache import CacheUnavailable, CompilationCache, cache_key, cache_root

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerCompilation:
    """The compiler of a worker's layers and its cache."""

    compiler: LayerCompiler
    cache: CompilationCache

    def prepare(
        self, model: CausalLM, dtype: torch.dtype, device: torch.device, on_part: Callable[[], None]
    ) -> bool:
        """Compile a model's layers; False if they must run at level 0.

        The model must have been made with this compiler.

        Args:
            on_part: called after each compilation.
        """
        started = time.perf_counter()
        generated = _num_generated()
        reason = self.compiler.prepare(model.layers, dtype, device, on_part)
        if reason is not None and self.cache.has_code:
            logger.warning("the cache %s may be damaged and is made anew: %s", self.cache.path, reason)
            try:
                self.cache.renew()
            except OSError as error:
                reason = f"{reason}; the cache {self.cache.path} cannot be removed: {error.strerror}"
            else:
                self.compiler.forget()
                reason = self.compiler.prepare(model.layers, dtype, device, on_part)
        if reason is None and not self.compiler.num_compilations:
            reason = "this model has no layers that can be compiled"
        if reason is not None:
            self.cache.close()
            _log_refusal(reason)
            return False
        logger.info(
            "compiled parts of the layers: %d graphs, %d of them not in the cache %s, in %.1f s",
            self.compiler.num_compilations,
            _num_generated() - generated,
            self.cache.path,
            time.perf_counter() - started,
        )
        return True


def start_compilation(
    args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device, attention_backend: str
) -> LayerCompilation | None:
    """Return what compiles a model's layers. None: it is not asked for, or impossible, which is logged."""
    if args.compilation_config.level == 0:
        return None
    reason = _refusal(args, config, device)
    if reason is None:
        settings = (
            repr(config),
            str(dtype),
            attention_backend,
            f"tensor parallel {args.tensor_parallel_size}",
        )
        try:
            cache = CompilationCache(cache_root(), cache_key(device, settings))
        except (CacheUnavailable, OSError) as error:
            reason = str(error)
        else:
            cache.activate()
            return LayerCompilation(LayerCompiler(), cache)
    _log_refusal(reason)
    return None


def _refusal(args: EngineArgs, config: ModelConfig, device: torch.device) -> str | None:
    """Return why layers cannot be compiled, or None."""
    if args.enforce_eager:
        return "--enforce-eager wins, as in vLLM"
    if config.quantization is not None or args.quantization is not None:
        return "with quantised weights our own kernels quantise what the products read; leave level 3 out"
    if device.type == "cuda":
        return None
    try:
        find_compiler()
    except NativeUnavailable:
        return "torch.compile needs a C++ compiler on a CPU; install g++, or name one in CXX"
    return None


def _log_refusal(reason: str) -> None:
    logger.warning("layers are not compiled (--compilation-config level 0): %s", reason)


def _num_generated() -> int:
    """Return the number of graphs that Inductor has generated code for in this process, rather than read it."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return int(found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])
