"""Counts what the compiled parts of layers launch on a GPU, from the code that Inductor generates for it. No GPU is
needed: the code is not compiled, and the device's properties are those of an H100."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from argosy_engine.layers.layer_compiler import INDUCTOR_OPTIONS, CompilableLayer, LayerFunction
from argosy_engine.layers.norms import plain_operations

_CAPABILITY = (9, 0)
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100", type="cuda", index=0, major=9, minor=0, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    total_memory=80 << 30, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip
_LAUNCH = re.compile(
    r"^\s+(?:\w+ = )?((?:triton_\w+)\.run|extern_kernels\.\w+|torch\.ops\.\S+?)\(", re.MULTILINE
)


def generated_launches(
    mode: FakeTensorMode, function: LayerFunction, layer: CompilableLayer, inputs: list[torch.Tensor]
) -> list[str]:
    """Return the launches of a part, in order: the names of generated kernels and of library calls.

    Args:
        mode: within which the layer and its inputs were made, on `cuda`.
    """
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    holders = list(_tensors(layer, set()))
    weights = [getattr(*holder) for holder in holders]

    def traced(*arguments: torch.Tensor) -> torch.Tensor:
        for holder, weight in zip(holders, arguments, strict=False):
            setattr(*holder, weight)
        return function(layer, *arguments[len(holders) :])

    arguments = (*weights, *inputs)
    with _device(), plain_operations():
        try:
            functional = torch.func.functionalize(traced, remove="mutations")
            graph = make_fx(functional, decomposition_table=select_decomp_table())(*arguments)
        finally:
            for holder, weight in zip(holders, weights, strict=True):
                setattr(*holder, weight)
        lowering = GraphLowering(graph, shape_env=mode.shape_env, example_inputs=arguments)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            lowering.run(*arguments)
            code: Any = lowering.codegen()[0]
    return _LAUNCH.findall(code.value)


def _tensors(owner: Any, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """Yield the attributes, as (object, name), that are tensors of a layer or of a module in it."""
    seen.add(id(owner))
    for name, value in vars(owner).items():
        if isinstance(value, torch.Tensor):
            yield owner, name
        elif (
            type(value).__module__.startswith(("argosy_engine.layers", "argosy_engine.models"))
            and hasattr(value, "__dict__")
            and id(value) not in seen
        ):
            yield from _tensors(value, seen)


class _Driver:
    """Triton's driver of a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * _CAPABILITY[0] + _CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextmanager
def _device() -> Iterator[None]:
    import torch._inductor.config as inductor
    from torch._dynamo.device_interface import CudaInterface

    found: dict[Any, dict[str, Callable[..., Any]]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "get_device_properties": lambda *_: _PROPERTIES,
            "get_device_capability": lambda *_: _CAPABILITY,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
        },
        CudaInterface: {
            "is_available": staticmethod(lambda: True),
            "get_device_properties": staticmethod(lambda *_: _PROPERTIES),
            "get_compute_capability": staticmethod(lambda *_: 90),
        },
        CudaInterface.Worker: {
            "get_device_properties": staticmethod(lambda *_: _PROPERTIES),
            "current_device": staticmethod(lambda: 0),
        },
    }
    with ExitStack() as stack:
        for owner, functions in found.items():
            for name, function in functions.items():
                stack.enter_context(patch.object(owner, name, function))
        # Several threads start processes that import torch, for code that is not compiled.
        stack.enter_context(inductor.patch({**INDUCTOR_OPTIONS, "compile_threads": 1}))
        active = triton.runtime.driver
        stack.enter_context(patch.object(active, "_active", _Driver()))
        yield
