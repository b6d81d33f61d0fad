"""Our CPU kernels in modules of transformers: linear layers, several of one input at once, gated MLPs and norms.

Which linear layers a model calls, and which of them with one input, is seen while transformers' own code computes the
logits that the probe expects. A norm or an MLP is recognised by its code, which has to be that of Llama's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from argosy_engine.layers.layer_kernels import TorchLayerKernels
from argosy_engine.layers.linear_kernels import gated_linear_kernel, linear_kernel
from argosy_engine.layers.norms import RMSNorm


class CalledLinears:
    """Notes which linear layers a model calls until `end`, and which of them one after another with the same tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._runs: dict[nn.Module, tuple[nn.Linear, ...]] = {}
        """By layer, what is always called with it; empty if that differs."""
        self._input: Any = None
        self._run: list[nn.Linear] = []
        self._hooks = [
            module.register_forward_pre_hook(self._note)
            for module in model.modules()
            if type(module) is nn.Linear
        ]

    def __contains__(self, linear: nn.Module) -> bool:
        return linear in self._runs

    def together(self, linear: nn.Module) -> tuple[nn.Linear, ...]:
        """Return the layers that are always called with the input of this one, itself among them, in their order."""
        return self._runs[linear]

    def end(self) -> None:
        self._close()
        for hook in self._hooks:
            hook.remove()

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


def use_kernels(model: nn.Module, dtype: torch.dtype, linears: CalledLinears) -> None:
    """Replace the modules that our kernels can compute, on a CPU.

    Args:
        dtype: of the activations, and of the weights that are replaced.
        linears: that have been called. Of others the model may read the weight itself.
    """
    ours: dict[nn.Module, nn.Module] = {}

    def of_linears(run: Sequence[nn.Linear]) -> None:
        run = [each for each in run if each in linears and each not in ours and each.weight.dtype is dtype]
        if len(run) > 1:
            product = _SharedProduct(run)
            ours.update({each: PartLinear(each, product, index) for index, each in enumerate(run)})
        elif run:
            ours[run[0]] = KernelLinear(run[0])

    def replace(parent: nn.Module) -> None:
        for name, child in list(parent.named_children()):
            if child not in ours:
                if _is_gated_mlp(child, linears, dtype):
                    ours[child] = KernelMLP(child)
                elif (norm := _rms_norm(child, dtype)) is not None:
                    ours[child] = KernelNorm(child, norm)
                elif child in linears and isinstance(child, nn.Linear):
                    of_linears(linears.together(child) or [child])
            if (kernel := ours.get(child)) is not None:
                setattr(parent, name, kernel)
            else:
                replace(child)

    replace(model)


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


def _is_gated_mlp(module: nn.Module, linears: CalledLinears, dtype: torch.dtype) -> bool:
    if not _has_code_of(module, LlamaMLP.forward):
        return False
    mlp: Any = module
    if type(mlp.act_fn) not in (nn.SiLU, SiLUActivation):
        return False
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return (
        all(each in linears and each.weight.dtype is dtype for each in (gate, up, down))
        and linears.together(gate) == (gate, up)
        and (gate.bias is None) == (up.bias is None)
    )


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
