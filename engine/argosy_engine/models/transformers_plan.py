"""Transformers plan: divides a model of transformers' among tensor-parallel ranks by its own `tp_plan`.

A plan names a style for modules and parameters (transformers' `distributed.tensor_parallel`). Each rank loads the whole
model on the CPU, keeps its part, and our communicator exchanges what the styles ask for. The embedding, an output head
that is tied to it, and what a size does not divide behind a gathered output stay whole: every rank computes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from argosy_engine.distributed.communicator import Communicator, LocalCommunicator
from argosy_engine.errors import ConfigError

_COLWISE = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_ROWWISE = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
_WHOLE = frozenset(
    {
        "embedding_rowwise", "embedding_colwise", "local_params", "mla_kv_a_proj", "replicate",
        "replicated_with_grad_allreduce",
    }
)  # fmt: skip
"""Styles with which every rank computes a module as it is; what some do to gradients does not matter here."""


class PlannedRank(LocalCommunicator):
    """Stands for one of several ranks of which no other runs, to find out the shapes of what it computes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=dim)


def divide(model: PreTrainedModel, communicator: Communicator) -> None:
    """Keep a rank's part of a whole model, in place.

    Raises:
        ConfigError: it has no plan, or one with styles or sizes that are not supported.
    """
    plan: Mapping[str, str] = dict(model.tp_plan or {})
    embedding: Any = model.get_input_embeddings()
    for name, module in list(model.named_modules()):
        if (style := plan.get(_pattern(name))) is None or isinstance(module, nn.Embedding):
            continue
        if isinstance(module, nn.Linear):
            if style in _GATHERED and (
                module.weight is embedding.weight or module.out_features % communicator.size
            ):
                continue
            _replace(model, name, _divided(name, module, style, communicator))
        elif style in ("moe_tp_experts", "all_reduce"):
            module.register_forward_hook(lambda _, __, output: communicator.all_reduce(output.contiguous()))
        elif style == "moe_identity_expert":
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0] / communicator.size, *inputs[1:]))
        elif style not in _WHOLE:
            raise ConfigError(f"its plan has the style {style!r} for {name}, which is not supported")
    for name, parameter in list(model.named_parameters()):
        if (style := plan.get(_pattern(name))) is not None:
            part = _part_of_parameter(name, parameter, style, communicator)
            _replace(model, name, nn.Parameter(part, requires_grad=False))


class _DividedLinear(nn.Module):
    """A rank's part of a linear layer, and what the ranks exchange around it."""

    def __init__(self, inner: nn.Linear, style: str, communicator: Communicator) -> None:
        super().__init__()
        self.inner: Any = inner  # our kernels may replace it
        self._style = style
        self._communicator = communicator

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.inner.weight
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank, size = self._communicator.rank, self._communicator.size
        if self._style in _SPLIT_INPUT:
            x = x.chunk(size, dim=-1)[rank]
        out: torch.Tensor = self.inner(x)
        if self._style in _ROWWISE:
            return self._communicator.all_reduce(out.contiguous())
        if self._style in _GATHERED:
            return self._communicator.all_gather(out.contiguous())
        return out


def _divided(name: str, linear: nn.Linear, style: str, communicator: Communicator) -> nn.Module:
    if style in _WHOLE:
        return linear
    weight: torch.Tensor = linear.weight
    bias: torch.Tensor | None = linear.bias
    if style in _COLWISE:
        weight = _part(name, weight, 0, communicator)
        bias = None if bias is None else _part(name, bias, 0, communicator)
    elif style in _ROWWISE:
        weight = _part(name, weight, 1, communicator)
        if communicator.rank:  # the sum over the ranks contains it once
            bias = None
    elif style == "packed_colwise":
        weight = _packed_part(name, weight, 0, communicator)
        bias = None if bias is None else _packed_part(name, bias, 0, communicator)
    else:
        raise ConfigError(f"its plan has the style {style!r} for {name}, which is not supported")
    with torch.device("meta"):
        part = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    part.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias, requires_grad=False)
    part.training = linear.training
    return _DividedLinear(part, style, communicator)


def _part_of_parameter(
    name: str, parameter: torch.Tensor, style: str, communicator: Communicator
) -> torch.Tensor:
    """Return a rank's part of what a plan names beside whole linear layers: experts' weights, sinks."""
    rows, last = max(parameter.ndim - 2, 0), parameter.ndim - 1
    if style in ("replicate", "replicated_with_grad_allreduce") or (
        parameter.ndim == 1 and style in ("rowwise", "packed_rowwise")
    ):
        return parameter
    match style:
        case "colwise":
            return _part(name, parameter, rows, communicator)
        case "rowwise":
            return _part(name, parameter, last, communicator)
        case "packed_colwise":
            return _packed_part(name, parameter, rows, communicator)
        case "packed_rowwise":
            return _packed_part(name, parameter, last, communicator)
    raise ConfigError(f"its plan has the style {style!r} for {name}, which is not supported")


def _part(name: str, tensor: torch.Tensor, dim: int, communicator: Communicator) -> torch.Tensor:
    if tensor.shape[dim] % communicator.size:
        raise ConfigError(
            f"{name} has {tensor.shape[dim]} features, which {communicator.size} ranks cannot divide"
        )
    return _kept(tensor.detach().chunk(communicator.size, dim)[communicator.rank])


def _packed_part(name: str, tensor: torch.Tensor, dim: int, communicator: Communicator) -> torch.Tensor:
    """Return a rank's part of two halves, such as gate and up."""
    if tensor.shape[dim] % (2 * communicator.size):
        raise ConfigError(
            f"{name} has two times {tensor.shape[dim] // 2} features, which {communicator.size} ranks cannot divide"
        )
    if 0 in tensor.stride():
        return tensor.detach().narrow(dim, 0, tensor.shape[dim] // communicator.size)
    halves = tensor.detach().chunk(2, dim)
    parts = [half.chunk(communicator.size, dim)[communicator.rank] for half in halves]
    return torch.cat(parts, dim)


def _kept(part: torch.Tensor) -> torch.Tensor:
    """Return a copy, so that the whole tensor is freed; not of followed models, whose tensors are one number."""
    return part if 0 in part.stride() else part.contiguous().clone()


def _pattern(name: str) -> str:
    """Return a name as plans have it, with `*` for numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _replace(model: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, value)
