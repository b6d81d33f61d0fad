"""Our CPU kernels in modules of transformers: linear layers, several of one input at once, gated MLPs and norms.

Which linear layers a model calls, and which of them with one input, is seen while transformers' own code computes the
logits that the probe expects. A norm or an MLP is recognised by its code, which has to be that of Llama's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from argosy_engine.layers.layer_kernels import TorchLayerKernels
from argosy_engine.layers.linear_kernels import gated_linear_kernel, linear_kernel
from argosy_engine.layers.norms import RMSNorm


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

    def use_kernels(self) -> None:
        """Replace the modules that our kernels can compute, on a CPU, and watch no more. Of linear layers that were not
        called the model may read the weight itself: they stay."""
        self._close()
        for hook in self._hooks:
            hook.remove()
        self._replace(self._model, {})
        self._runs.clear()  # whose layers keep their weights

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
        self._kernel = linear_kernel(linear.weight.detach(), bias)
        self.weight = _no_weight(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == self.in_features  # the kernels do not check it
        return self._kernel(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def _no_weight(linear: nn.Linear) -> torch.Tensor:
    """Return what models find that ask for the weight's dtype. The numbers are elsewhere."""
    return linear.weight.new_full((), torch.nan).expand(linear.weight.shape)


class _SharedProduct:
    """The products of several linear layers with one input, which the first of them computes."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [each.out_features for each in linears]
        bias = None
        if any(each.bias is not None for each in linears):
            zeros = linears[0].weight.new_zeros
            bias = torch.cat(
                [zeros(each.out_features) if each.bias is None else each.bias.detach() for each in linears]
            )
        self._kernel = linear_kernel(torch.cat([each.weight.detach() for each in linears]), bias)
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = [None] * len(linears)
        """Of the product with `_input`, what has not been asked for yet."""

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the product [..., out_features] of the layer `index` for x [..., in_features]."""
        part = self._parts[index] if x is self._input else None
        if part is None:
            rows = self._kernel(x.reshape(-1, x.shape[-1])).split(self._sizes, dim=1)
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
        self._gate_up = gated_linear_kernel(torch.cat([gate.weight, up.weight]).detach(), bias)
        self.down_proj = KernelLinear(mlp.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == self._in_features
        inner = self._gate_up(x.reshape(-1, self._in_features))
        assert isinstance(inner, torch.Tensor)
        return self.down_proj(inner).view(*x.shape[:-1], self.down_proj.out_features)


class KernelNorm(nn.Module):
    """Llama's RMSNorm by our kernels."""

    def __init__(self, theirs: nn.Module, norm: RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self._theirs, self._norm = theirs, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = len(self.weight)
        if x.dtype is not self.weight.dtype or x.shape[-1] != width:
            computed: torch.Tensor = self._theirs(x)
            return computed
        return self._norm(x.reshape(-1, width)).view(x.shape)


def _rms_norm(module: nn.Module, dtype: torch.dtype) -> RMSNorm | None:
    """Return our norm if the module is Llama's and our kernels compute it."""
    if not _has_code_of(module, LlamaRMSNorm.forward):
        return None
    theirs: Any = module
    if theirs.weight.dtype is not dtype or theirs.weight.dim() != 1:
        return None
    norm = RMSNorm(theirs.weight.detach(), theirs.variance_epsilon, dtype, TorchLayerKernels())
    return norm if norm.has_kernel else None


def _has_code_of(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a module's forward is that function but for its documentation, and nothing changes what it computes."""
    mine: Any = type(module).forward
    if "forward" in vars(module) or not hasattr(mine, "__code__") or module._forward_hooks:
        return False

    def meaning(function: Any) -> tuple[Any, ...]:
        code = function.__code__
        constants = tuple(each for each in code.co_consts if each != function.__doc__)
        return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants

    return meaning(mine) == meaning(forward)
