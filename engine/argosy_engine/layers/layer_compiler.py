"""LayerCompiler: torch.compile of parts of decoder layers, `--compilation-config '{"level": 3}'`.

A layer is cut around attention, experts and sums over ranks, so that what is compiled has no graph breaks, exchanges
nothing and launches none of our kernels: a norm with the addition before it and the matrix products that follow. Such a
part is a function of a layer and of activations [T, width]. It is compiled once for one token and once for any larger
number of tokens, and serves all layers of a kind, because their weights are inputs of the compiled code.

All of this happens in `prepare`. Afterwards nothing is compiled any more: a call that no compiled code fits runs the
function as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from argosy_engine.layers.norms import plain_operations

logger = logging.getLogger(__name__)

LayerFunction = Callable[..., torch.Tensor]
"""Maps a layer and activations [T, width], which it may change in place, to activations."""
GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]
"""A backend of torch.compile."""

_NUM_TOKENS = 64
"""Of the step that code for several tokens is generated from; it serves any number."""
_MAX_VARIANTS = 64
"""Of one function, over all kinds of layers."""
_MAX_ERROR_RATIO = 2.0
"""How many times torch's error in the same dtype the error of compiled code may be."""
_FLOOR = 1e-4
"""Error that is always allowed, as a share of the largest value; torch in float32 has none against itself."""
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class CompilablePart(NamedTuple):
    """A part of a layer that its model has made with `LayerCompiler.part`."""

    function: LayerFunction
    widths: tuple[int, ...]
    """Of the activations that the function takes."""


class CompilableLayer(Protocol):
    """A decoder layer, as far as it can be compiled."""

    def parts_to_compile(self) -> Sequence[CompilablePart]:
        """Return the layer's parts; none if torch.compile gains nothing or does not support the layer."""
        ...


class LayerCompiler:
    """Compiles the layers of one model, also if it is loaded again.

    Args:
        compile_graph: a backend of torch.compile; default: Inductor.
    """

    def __init__(self, compile_graph: GraphCompiler | None = None) -> None:
        self._compile_graph = compile_graph or _inductor
        self._parts: dict[LayerFunction, CompiledPart] = {}
        self.num_compilations = 0
        """Graphs that were given to the backend, which may find them in its cache."""

    def part(self, function: LayerFunction) -> CompiledPart:
        """Return a function that computes the same, by compiled code after `prepare`."""
        if function not in self._parts:
            self._parts[function] = CompiledPart(function, self._count_and_compile)
        return self._parts[function]

    @property
    def num_plain_calls(self) -> int:
        """Calls since `prepare` that no compiled code fitted."""
        return sum(part.num_plain_calls for part in self._parts.values())

    @torch.inference_mode()
    def prepare(
        self,
        layers: Sequence[CompilableLayer],
        dtype: torch.dtype,
        device: torch.device,
        on_part: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Compile everything, and compare each compilation with torch in float32.

        Args:
            on_part: called after each compilation.

        Returns:
            Why compiled code must not be used; then no part uses any. Otherwise None.
        """
        generator = torch.Generator().manual_seed(0)
        with _static_weights():
            for index, layer in enumerate(layers):
                for function, widths in layer.parts_to_compile():
                    part = self._parts[_original(function)]
                    for num_tokens in (_NUM_TOKENS, 1):
                        inputs = [
                            torch.randn(num_tokens, width, generator=generator).to(device, dtype)
                            for width in widths
                        ]
                        if (reason := self._prepare(part, layer, inputs)) is not None:
                            self.stop()
                            return f"{part.name} of layer {index}, for {num_tokens} tokens: {reason}"
                        on_part()
        for part in self._parts.values():
            part.start()
        return None

    def stop(self) -> None:
        """Use no compiled code from now on."""
        for part in self._parts.values():
            part.stop()

    def forget(self) -> None:
        """Forget all that was compiled, in this process, not on disk."""
        from torch._inductor.utils import clear_caches

        torch.compiler.reset()
        clear_caches()
        self.num_compilations = 0
        for part in self._parts.values():
            part.forget()

    def _prepare(self, part: CompiledPart, layer: CompilableLayer, inputs: list[torch.Tensor]) -> str | None:
        before = self.num_compilations
        given = [each.clone() for each in inputs]
        try:
            found = part.compiled(layer, *given)
            if found.device.type == "cuda":
                torch.cuda.synchronize(found.device)  # a kernel's fault shows here
        except Exception as error:  # whatever a compiler or a driver raise
            cause = getattr(error, "inner_exception", error)  # what a backend has raised
            return f"torch.compile failed with {type(cause).__name__}: {str(cause).strip()[:300]}"
        if self.num_compilations == before:  # the code of another layer, which was tested
            return None
        return _fault([found, *given], part.function, layer, inputs)

    def _count_and_compile(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> Callable[..., Any]:
        self.num_compilations += 1
        return self._compile_graph(graph, inputs)


class CompiledPart:
    """A part of the layers of a model."""

    def __init__(self, function: LayerFunction, compile_graph: GraphCompiler) -> None:
        self.function = function
        self.name = function.__qualname__
        self.num_plain_calls = 0
        """See `LayerCompiler`."""

        def call(layer: CompilableLayer, *inputs: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                self._note_plain_call(inputs)
            return function(layer, *inputs)

        # torch.compile keeps what it has compiled with the code object, which functions made here would share.
        call = FunctionType(call.__code__.replace(), call.__globals__, self.name, None, call.__closure__)
        self._traced: LayerFunction = call
        self._compile_graph = compile_graph
        self._compiled: LayerFunction | None = None
        self._call: LayerFunction = function

    def compiled(self, layer: CompilableLayer, *inputs: torch.Tensor) -> torch.Tensor:
        """Run compiled code, which is made if there is none that fits."""
        if self._compiled is None:  # here, because it imports for seconds
            self._compiled = torch.compile(self._traced, fullgraph=True, backend=self._compile_graph)
        for each in inputs:
            if len(each) > 1:
                torch._dynamo.mark_dynamic(each, 0, min=2)
        return self._compiled(layer, *inputs)

    def start(self) -> None:
        """Use compiled code, as far as there is any."""
        if self._compiled is not None:
            self._call = torch._dynamo.run(self._compiled)

    def stop(self) -> None:
        self._call = self.function

    def forget(self) -> None:
        self.stop()
        self._compiled = None

    def __call__(self, layer: CompilableLayer, *inputs: torch.Tensor) -> torch.Tensor:
        return self._call(layer, *inputs)

    def _note_plain_call(self, inputs: Sequence[torch.Tensor]) -> None:
        if not self.num_plain_calls:
            shapes = ", ".join(str(list(each.shape)) for each in inputs)
            logger.warning("no compiled code of %s fits %s; it runs uncompiled", self.name, shapes)
        self.num_plain_calls += 1


def _original(function: LayerFunction) -> LayerFunction:
    return function.function if isinstance(function, CompiledPart) else function


@contextmanager
def _static_weights() -> Iterator[None]:
    """Let only the number of tokens vary: a layer of another size is compiled anew."""
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, recompile_limit=_MAX_VARIANTS, accumulated_recompile_limit=1 << 14
    ):
        yield


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled = compile_fx(graph, list(inputs), config_patches=INDUCTOR_OPTIONS)
    return cast(Callable[..., Any], compiled)


INDUCTOR_OPTIONS = {"split_reductions": False, "cpp_cache_precompile_headers": False}
"""One launch for the sum over a row, as our kernels do it: layers are narrow, and a step has many rows or no time.
Precompiled headers, for CPUs, would be kept in a folder of /tmp that others may have made."""


def _fault(
    found: Sequence[torch.Tensor],
    function: LayerFunction,
    layer: CompilableLayer,
    inputs: Sequence[torch.Tensor],
) -> str | None:
    """Return how far results differ from torch's in float32, if by more than twice the error of torch's in the inputs'
    dtype.

    Args:
        found: the result of compiled code, and the inputs after it.
    """
    with plain_operations():
        theirs = [each.clone() for each in inputs]
        theirs.insert(0, function(layer, *theirs))
        with _Float32():
            truth = [each.float() for each in inputs]
            truth.insert(0, function(layer, *truth))
    for ours, plain, exact in zip(found, theirs, truth, strict=True):
        allowed = _MAX_ERROR_RATIO * _error(plain, exact) + _FLOOR * float(exact.abs().max())
        error = _error(ours, exact)
        if not error <= allowed:  # NaN is an error, too
            return f"it is wrong by {error:.2g} where {allowed:.2g} is allowed"
    return None


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).abs().max())


class _Float32(TorchDispatchMode):
    """Computes in float32 what is asked for in another dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _LOW_PRECISION:
        return value.float()
    return torch.float32 if value in _LOW_PRECISION else value
