"""Our CPU kernels in modules of transformers: linear layers, several of one input at once, gated MLPs, norms, attention
with its rotation, and whole decoder layers.

Which linear layers a model calls, and which of them with one input, is seen while transformers' own code computes the
logits that the probe expects. Other modules are recognised by their code and the functions that it calls, which have to
be those of Llama or of another class named here.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.apertus.modeling_apertus import ApertusAttention
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
)
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from argosy_engine.attention.backend import DecoderParts, FusedDecoder
from argosy_engine.layers.linear import Linear, gated_linear_of, linear_of
from argosy_engine.layers.norms import LayerKernels, RMSNorm
from argosy_engine.models.transformers_attention import (
    CACHES,
    AttendingLayer,
    RotatingAttention,
    Step,
    running,
)

_PLAIN_ATTENTION = LlamaAttention, Qwen2Attention, MistralAttention, Gemma2Attention
_NORMED_ATTENTION = Qwen3Attention, ApertusAttention
"""Classes of attention that rotate halves of q and k; these norm each head before. What they ask the attention function
for is known from following the model."""
_BODIES = LlamaModel, MistralModel, Qwen2Model
"""Models that hand the output of each of their `layers` to the next one as it is, and the same rotations to all."""
_EAGER = frozenset({"eager_attention_forward"})
"""Functions that recognised code may have of its own, because steps never call them."""


class CalledLinears:
    """Notes which linear layers a model calls until `use_kernels`, and which of them one after another with the same
    tensor.

    Args:
        dtype: of the activations, and of the weights that kernels get.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._runs: dict[nn.Module, tuple[nn.Linear, ...]] = {}
        """By layer, what is always called with it; empty if that differs."""
        self._input: Any = None
        self._run: list[nn.Linear] = []
        self._hooks = [
            module.register_forward_pre_hook(self._note)
            for module in model.modules()
            if type(module) is nn.Linear
        ]

    def _note(self, linear: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(linear, nn.Linear)
        given = args[0] if args else None
        if given is None or given is not self._input or linear in self._run:
            self._close()
            self._input = given
        self._run.append(linear)

    def _close(self) -> None:
        run = tuple(self._run)
        for each in run:
            if (known := self._runs.setdefault(each, run)) != run:
                self._runs.update(dict.fromkeys((*known, *run), ()))
        self._run, self._input = [], None

    def use_kernels(self, attending: Sequence[AttendingLayer] = ()) -> None:
        """Replace the modules that our kernels can compute, on a CPU, and watch no more. Of linear layers that were not
        called the model may read the weight itself: they stay.

        Args:
            attending: calls of the attention function in a step of a decoder.
        """
        self._close()
        for hook in self._hooks:
            hook.remove()
        self._replace(self._model, {})
        self._runs.clear()  # whose layers keep their weights
        callers = [layer.module for layer in attending]
        for layer in attending:
            if callers.count(layer.module) == 1:
                FusedAttention.replace(layer, self._dtype)
        for module in self._model.modules():
            KernelLayers.replace(module)
        for module in list(self._model.modules()):
            KernelLayers.join(module)

    def _replace(self, parent: nn.Module, ours: dict[nn.Module, nn.Module]) -> None:
        """Replace modules below this one.

        Args:
            ours: by what they stand for.
        """
        for name, child in list(parent.named_children()):
            if child not in ours:
                ours.update(self._replacement(child, ours))
            if (kernel := ours.get(child)) is not None:
                setattr(parent, name, kernel)
            else:
                self._replace(child, ours)

    def _replacement(
        self, module: nn.Module, ours: Mapping[nn.Module, nn.Module]
    ) -> Mapping[nn.Module, nn.Module]:
        """Return what computes a module by our kernels, and others with it; empty if nothing does."""
        if (norm := _rms_norm(module, self._dtype)) is not None:
            return {module: KernelNorm(module, norm)}
        if self._is_gated_mlp(module):
            return {module: KernelMLP(module)}
        if not self._fits(module):
            return {}
        assert isinstance(module, nn.Linear)
        run = [each for each in self._runs[module] if each not in ours and self._fits(each)]
        if len(run) < 2:
            return {module: KernelLinear(module)}
        product = _SharedProduct(run)
        return {each: PartLinear(each, product, index) for index, each in enumerate(run)}

    def _fits(self, module: nn.Module) -> bool:
        if module not in self._runs or not isinstance(module, nn.Linear):
            return False
        return module.weight.device.type == "cpu" and module.weight.dtype is self._dtype

    def _is_gated_mlp(self, module: nn.Module) -> bool:
        if not _has_code_of(module, LlamaMLP.forward):
            return False
        mlp: Any = module
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        return (
            type(mlp.act_fn) in (nn.SiLU, SiLUActivation)
            and all(self._fits(each) for each in (gate, up, down))
            and self._runs[gate] == (gate, up)
            and (gate.bias is None) == (up.bias is None)
        )


class KernelLinear(nn.Module):
    """nn.Linear by our kernels, which keep the weight in a layout of their own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.detach()
        self.kernel = linear_of(linear.weight.detach(), bias)
        self.weight = _no_weight(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == self.in_features  # the kernels do not check it
        return self.kernel(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def _no_weight(linear: nn.Linear) -> torch.Tensor:
    """Return what models find that ask for the weight's dtype. The numbers are elsewhere."""
    return linear.weight.new_full((), torch.nan).expand(linear.weight.shape)


class _SharedProduct:
    """The products of several linear layers with one input, which the first of them computes."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [each.out_features for each in linears]
        self.count = len(linears)
        bias = None
        if any(each.bias is not None for each in linears):
            zeros = linears[0].weight.new_zeros
            bias = torch.cat(
                [zeros(each.out_features) if each.bias is None else each.bias.detach() for each in linears]
            )
        self.kernel = linear_of(torch.cat([each.weight.detach() for each in linears]), bias)
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = [None] * len(linears)
        """Of the product with `_input`, what has not been asked for yet."""

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the product [..., out_features] of the layer `index` for x [..., in_features]."""
        part = self._parts[index] if x is self._input else None
        if part is None:
            rows = self.kernel(x.reshape(-1, x.shape[-1])).split(self._sizes, dim=1)
            self._input, self._parts = (
                x,
                [each.contiguous().view(*x.shape[:-1], each.shape[1]) for each in rows],
            )
            part = self._parts[index]
            assert part is not None
        self._parts[index] = None
        if not any(each is not None for each in self._parts):
            self._input = None
        return part


class PartLinear(nn.Module):
    """One of several linear layers that are computed together."""

    def __init__(self, linear: nn.Linear, product: _SharedProduct, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product, self._index = product, index
        self.weight = _no_weight(linear)

    @staticmethod
    def whole(*parts: Any) -> Linear | None:
        """Return the kernel whose product is the products of these layers, one after another; None: it has others."""
        if not all(isinstance(each, PartLinear) for each in parts):
            return None
        product = parts[0]._product
        wanted = [(product, index) for index in range(product.count)]
        return product.kernel if [(each._product, each._index) for each in parts] == wanted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == self.in_features
        return self._product.part(x, self._index)


class KernelMLP(nn.Module):
    """Llama's MLP, whose activation is SiLU, by our kernels."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        gate, up = mlp.gate_proj, mlp.up_proj
        bias = None if gate.bias is None else torch.cat([gate.bias, up.bias]).detach()
        self._in_features = gate.in_features
        self.gate_up = gated_linear_of(torch.cat([gate.weight, up.weight]).detach(), bias)
        self.down_proj = KernelLinear(mlp.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == self._in_features
        inner = self.gate_up(x.reshape(-1, self._in_features))
        assert isinstance(inner, torch.Tensor)
        return self.down_proj(inner).view(*x.shape[:-1], self.down_proj.out_features)


class KernelNorm(nn.Module):
    """Llama's RMSNorm by our kernels."""

    def __init__(self, theirs: nn.Module, norm: RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self._theirs, self.norm = theirs, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = len(self.weight)
        if x.dtype is not self.weight.dtype or x.shape[-1] != width:
            computed: torch.Tensor = self._theirs(x)
            return computed
        return self.norm(x.reshape(-1, width)).view(x.shape)


def _rms_norm(module: nn.Module, dtype: torch.dtype) -> RMSNorm | None:
    """Return our norm if the module is Llama's and our kernels compute it."""
    if not _has_code_of(module, LlamaRMSNorm.forward):
        return None
    theirs: Any = module
    if theirs.weight.dtype is not dtype or theirs.weight.dim() != 1:
        return None
    norm = RMSNorm(theirs.weight.detach(), theirs.variance_epsilon, dtype, LayerKernels())
    return norm if norm.has_kernel else None


class _HeadNorms(NamedTuple):
    """Weights [head_dim] of the norms of q and k, if there are any."""

    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


class FusedAttention:
    """Llama's attention with its projections by our kernels, in place of a module's `forward`, which computes whatever
    is not a step, or is not given rotations as Llama is."""

    def __init__(
        self,
        layer: AttendingLayer,
        dtype: torch.dtype,
        qkv: Linear,
        attention: RotatingAttention,
        output: Linear,
    ) -> None:
        self.layer, self.qkv, self.attention, self.output = layer, qkv, attention, output
        self._dtype, self.head_dim = dtype, layer.attention.params.head_dim
        self._theirs: Callable[..., Any] = layer.module.forward

    @classmethod
    def replace(cls, layer: AttendingLayer, dtype: torch.dtype) -> None:
        """Replace what a module computes if its code is known."""
        module: Any = layer.module
        if (norms := _norms_of_heads(module)) is None:
            return
        projections = module.q_proj, module.k_proj, module.v_proj
        qkv, params = PartLinear.whole(*projections), layer.attention.params
        if qkv is None or type(module.o_proj) is not KernelLinear:
            return
        counts = params.num_heads, params.num_kv_heads, params.num_kv_heads
        widths = [count * params.head_dim for count in counts]
        if module.head_dim != params.head_dim or widths != [each.out_features for each in projections]:
            return
        if (attention := layer.rotating(*norms)) is not None:
            module.forward = cls(layer, dtype, qkv, attention, module.o_proj.kernel)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, *args: Any, **others: Any
    ) -> Any:
        step = None if args else self.step(hidden_states, position_embeddings, others)
        if step is None:
            return self._theirs(hidden_states, position_embeddings, *args, **others)
        rotation = step.begin_layers([self.layer.module], position_embeddings, self.head_dim)
        qkv = self.qkv(hidden_states.reshape(-1, hidden_states.shape[-1]))
        attended = self.output(self.attention(qkv, rotation))
        return attended.view(*hidden_states.shape[:-1], attended.shape[-1]), None

    def step(
        self, hidden_states: torch.Tensor, position_embeddings: Any, others: Mapping[str, Any]
    ) -> Step | None:
        """Return the step that runs if our kernels compute attention from these arguments; None if they do not."""
        step = running()
        if not isinstance(step, Step) or hidden_states.dtype is not self._dtype:
            return None
        if any(others.get(name) is not None for name in CACHES):
            return None
        return step if step.rotates(hidden_states, position_embeddings, self.head_dim) else None


def _norms_of_heads(module: Any) -> _HeadNorms | None:
    """Return the norms in a module that computes attention as Llama does otherwise; None if it does not."""
    if any(_has_code_of(module, each.forward, _EAGER) for each in _PLAIN_ATTENTION):
        return _HeadNorms()
    if not any(_has_code_of(module, each.forward, _EAGER) for each in _NORMED_ATTENTION):
        return None
    norms = module.q_norm, module.k_norm
    if not all(type(each) is KernelNorm for each in norms) or norms[0].norm.eps != norms[1].norm.eps:
        return None
    if any(len(each.weight) != module.head_dim for each in norms):
        return None
    return _HeadNorms(norms[0].weight, norms[1].weight, norms[0].norm.eps)


class KernelLayers:
    """Llama's decoder layer, or several of them, in one call of our kernels, in place of a module's `forward`, which
    computes what its attention leaves.

    Args:
        theirs: what is replaced, for each layer.
    """

    def __init__(
        self,
        attention: Sequence[FusedAttention],
        parts: Sequence[DecoderParts],
        fused: FusedDecoder,
        theirs: Sequence[Callable[..., Any]],
    ) -> None:
        self._attention, self._parts, self._fused, self._theirs = attention, parts, fused, theirs
        self._modules = [each.layer.module for each in attention]
        self._rotating = [each.attention for each in attention]

    @classmethod
    def replace(cls, module: Any) -> None:
        """Replace what a layer computes if its code is known, and that of its parts."""
        if not _has_code_of(module, LlamaDecoderLayer.forward):
            return
        attention = vars(module.self_attn).get("forward")
        norms = module.input_layernorm, module.post_attention_layernorm
        if not isinstance(attention, FusedAttention) or not all(type(each) is KernelNorm for each in norms):
            return
        if type(module.mlp) is not KernelMLP or norms[0].norm.eps != norms[1].norm.eps:
            return
        parts = DecoderParts(
            norms[0].norm,
            attention.qkv,
            attention.attention,
            attention.output,
            norms[1].norm,
            module.mlp.gate_up,
            module.mlp.down_proj.kernel,
        )
        if (fused := attention.layer.backend.fuse_decoder([parts])) is not None:
            module.forward = cls([attention], [parts], fused, [module.forward])

    @classmethod
    def join(cls, body: Any) -> None:
        """Let the first layer of a model whose code is known compute them all, if all are replaced and of one size. The
        model then has no others, and masks, which differ between layers, are not read in steps."""
        if not any(_is_same(type(body).forward, each.forward, frozenset()) for each in _BODIES):
            return
        kinds = body._forward_hooks, body._forward_pre_hooks
        found = [vars(each).get("forward") for each in body.layers]
        layers = [each for each in found if isinstance(each, cls)]
        if any(kinds) or len(layers) < len(body.layers) or len({each._sizes for each in layers}) != 1:
            return
        if any(each._forward_hooks or each._forward_pre_hooks for each in body.layers):
            return
        attention = [each for layer in layers for each in layer._attention]
        parts = [each for layer in layers for each in layer._parts]
        theirs = [each for layer in layers for each in layer._theirs]
        if (fused := attention[0].layer.backend.fuse_decoder(parts)) is not None:
            first = body.layers[0]
            first.forward = cls(attention, parts, fused, theirs)
            body.layers = nn.ModuleList([first])

    @property
    def _sizes(self) -> tuple[float, ...]:
        """What layers in one call have in common."""
        parts, params = self._parts[0], self._attention[0].layer.attention.params
        linears = parts.qkv, parts.output, parts.gate_up, parts.down
        outs = [0 if each.packed is None else each.packed.out_features for each in linears]
        return (params.num_heads, params.num_kv_heads, params.head_dim, parts.input_norm.eps, *outs)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **others: Any) -> Any:
        embeddings = others.get("position_embeddings")
        step = None if args else self._attention[0].step(hidden_states, embeddings, others)
        if step is None:
            for theirs in self._theirs:
                hidden_states = theirs(hidden_states, *args, **others)
            return hidden_states
        rotation = step.begin_layers(self._modules, embeddings, self._attention[0].head_dim)
        for attention in self._rotating:
            attention.rotate_by(rotation)
        x = hidden_states[0].clone(memory_format=torch.contiguous_format)
        return self._fused(x, rotation.meta).view(hidden_states.shape)


def _has_code_of(
    module: nn.Module, forward: Callable[..., Any], ignored: frozenset[str] = frozenset()
) -> bool:
    """Whether a module's forward means the same as that function, and nothing changes what it computes.

    Args:
        ignored: global functions that may differ.
    """
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    kind = type(module)
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _ACCESS):
        return False
    return _is_same(kind.forward, forward, ignored)


_ACCESS = "__call__", "__getattr__", "__getattribute__"
"""Methods of modules by which a class may do more than `forward` says."""


@functools.cache
def _is_same(mine: Callable[..., Any], theirs: Callable[..., Any], ignored: frozenset[str]) -> bool:
    return _means(mine, theirs, ignored, set())


def _means(mine: Any, theirs: Any, ignored: frozenset[str], compared: set[tuple[int, int]]) -> bool:
    """Whether two functions, or values that functions read, are the same but for documentation and annotations.

    Args:
        compared: pairs whose comparison has begun, which are the same as far as they refer to each other.
    """
    if mine is theirs or (id(mine), id(theirs)) in compared:
        return True
    if type(mine) is not type(theirs):
        return False
    if not isinstance(mine, FunctionType):
        return isinstance(mine, (bool, int, float, str)) and repr(mine) == repr(theirs)
    compared.add((id(mine), id(theirs)))
    if not _same_code(mine.__code__, theirs.__code__):
        return False
    if repr((mine.__defaults__, mine.__kwdefaults__)) != repr((theirs.__defaults__, theirs.__kwdefaults__)):
        return False
    pairs = [
        (mine.__globals__.get(name, _MISSING), theirs.__globals__.get(name, _MISSING))
        for name in set(_globals_of(mine.__code__)) - ignored
    ]
    cells = zip(mine.__closure__ or (), theirs.__closure__ or (), strict=True)
    pairs += [(one.cell_contents, other.cell_contents) for one, other in cells]
    return all(_means(*pair, ignored, compared) for pair in pairs)


_MISSING = object()


def _same_code(mine: CodeType, theirs: CodeType) -> bool:
    constants = mine.co_consts, theirs.co_consts
    if len(constants[0]) != len(constants[1]) or any(
        getattr(mine, name) != getattr(theirs, name) for name in _CODE
    ):
        return False
    read = {each.arg for each in dis.get_instructions(mine) if each.opcode in dis.hasconst}
    for index, (one, other) in enumerate(zip(*constants, strict=True)):
        if isinstance(one, CodeType) and isinstance(other, CodeType):
            if not _same_code(one, other):
                return False
        elif repr(one) != repr(other) and (index or index in read):
            return False  # the first may be documentation, which is not read
    return True


_CODE = (
    "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount",
    "co_kwonlyargcount", "co_flags", "co_exceptiontable",
)  # fmt: skip


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the names of the globals that code reads, with the functions that it defines."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _globals_of(each)
