"""Linear layers whose stored weights are widened to the engine's dtype as they are loaded: FP8 with a scale per block
of the weight (DeepSeek-V3, arXiv 2412.19437), and experts in MXFP4 (gpt-oss; OCP Microscaling Formats 1.0).

They take the memory of unquantised ones. Each tensor is widened a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from argosy_engine.checkpoint.weights import Weights
from argosy_engine.errors import ConfigError
from argosy_engine.layers.experts import ExpertsSpec, StackedExperts
from argosy_engine.layers.layer_kernels import GatedActivation
from argosy_engine.layers.linear import LinearSpec, ordered
from argosy_engine.layers.linear_kernels import (
    GatedLinearKernel,
    LinearKernel,
    gated_linear_kernel,
    linear_kernel,
)
from argosy_engine.layers.linear_method import (
    UnquantizedLinearMethod,
    fuse,
    take_bias,
    take_stacked,
    unsupported_experts,
)
from argosy_engine.model_configs.quantization_config import QuantizationConfig
from argosy_engine.model_configs.sharding import Shard

FP8 = torch.float8_e4m3fn
_ROWS = 1024
"""Rows that are widened at a time."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of e2m1, those with a sign after them."""
_MX_BLOCK = 32
"""Numbers that share a scale, 2 ** (scale - 127)."""


class BlockFp8LinearMethod(UnquantizedLinearMethod):
    """FP8 weights with a scale per block of rows and columns.

    Layers whose spec keeps their precision, and those that the config names, are as the checkpoint has them.
    """

    def __init__(self, config: QuantizationConfig) -> None:
        super().__init__()
        assert config.block is not None
        self._config, self._block = config, config.block
        self._suffix = ".weight_scale_inv" if config.method == "fp8" else ".weight_scale"

    def load(self, weights: Weights, spec: LinearSpec) -> LinearKernel:
        if not self._is_quantised(spec):
            return super().load(weights, spec)
        return linear_kernel(self._take(weights, spec), take_bias(weights, spec))

    def load_gated(
        self, weights: Weights, spec: LinearSpec, activation: GatedActivation
    ) -> GatedLinearKernel:
        if not self._is_quantised(spec):
            return super().load_gated(weights, spec, activation)
        return gated_linear_kernel(self._take(weights, spec), take_bias(weights, spec), activation)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        if spec.names.stacked is not None:  # which are no linear layers, and left as they are
            return super().load_experts(weights, spec)
        stacked = StackedExperts.empty(spec, weights.dtype, weights.device)
        for place, index in enumerate(spec.held_experts):
            for layer, part, _ in stacked.places(place):
                name, shape = spec.projection(index, layer), spec.weight_shape(layer)
                part.copy_(self._widened(weights, name, shape, spec.weight_shard(layer)))
        return stacked

    def take_weight(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        return self._take(weights, spec) if self._is_quantised(spec) else super().take_weight(weights, spec)

    def _is_quantised(self, spec: LinearSpec) -> bool:
        return not spec.keeps_precision and self._config.quantises_all(tuple(spec.parts))

    def _take(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        """Take the weight [out, in]."""

        def take_part(name: str) -> torch.Tensor:
            shape = spec.parts[name], spec.in_features
            return self._widened(weights, name, shape, spec.weight_shard(name))

        return ordered(spec, fuse(spec, take_part))

    def _widened(
        self, weights: Weights, name: str, shape: tuple[int, int], shard: Shard | None
    ) -> torch.Tensor:
        """Take this process's part of a weight [out, in]."""
        stored = weights.take(name + ".weight", *shape, dtype=FP8, shard=shard)
        counts = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=True))
        scales = weights.take_scale(name + self._suffix, counts, is_signed=True)
        if stored.is_meta:  # where indexing would import torch's compiler
            return torch.empty(stored.shape, dtype=weights.dtype, device=stored.device)
        rows, columns = (
            _indices(size, shard, dim, stored.device) // block
            for dim, (size, block) in enumerate(zip(shape, self._block, strict=True))
        )
        factors = scales[:, columns]
        return _by_rows(
            stored, weights.dtype, lambda part, at: part.float() * factors[rows[at : at + len(part)]]
        )


class Mxfp4LinearMethod(UnquantizedLinearMethod):
    """Experts in MXFP4, stored stacked; all else is unquantised."""

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        if spec.names.stacked is None:
            raise unsupported_experts(spec, "in MXFP4 and stored one by one")
        return take_stacked(weights, spec, take_mxfp4)


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int, int], shard: Shard | None) -> torch.Tensor:
    """Take this process's part of [experts, rows, columns], of which pairs of columns are in a byte, the first in
    its lower half. A part of the columns is cut out of the whole blocks that it is in."""
    count, num_rows, columns = shape
    if columns % _MX_BLOCK:
        raise ConfigError(f"{name} has rows of {columns}, which is not a multiple of {_MX_BLOCK}")
    cut: range | None = None
    if shard is not None and shard.dim == 2:
        (cut,) = shard.ranges
        first, last = cut.start // _MX_BLOCK, -(-cut.stop // _MX_BLOCK)
        shard, cut = Shard(2, (range(first, last),)), range(cut.start - first * 32, cut.stop - first * 32)
    blocks = columns // _MX_BLOCK
    packed = weights.take(
        name + "_blocks", count, num_rows, blocks, _MX_BLOCK // 2, dtype=torch.uint8, shard=shard
    )
    scales = weights.take(name + "_scales", count, num_rows, blocks, dtype=torch.uint8, shard=shard)
    width = packed.shape[2] * _MX_BLOCK
    if packed.is_meta:
        widths = width if cut is None else len(cut)
        return torch.empty(*packed.shape[:2], widths, dtype=weights.dtype, device=packed.device)
    numbers = torch.tensor((*_FP4, *(-each for each in _FP4)), device=packed.device)

    def widen(part: torch.Tensor, at: int) -> torch.Tensor:
        halves = torch.stack((part & 15, part >> 4), dim=-1).int()
        exponents = flat_scales[at : at + len(part)].int() - 127
        widened = torch.ldexp(numbers[halves].flatten(2), exponents.unsqueeze(-1)).flatten(1)
        return widened if cut is None else widened[:, cut.start : cut.stop]

    flat_scales = scales.flatten(0, 1)
    flat = _by_rows(packed.flatten(0, 1), weights.dtype, widen, columns=width if cut is None else len(cut))
    return flat.view(*packed.shape[:2], -1)


def _indices(size: int, shard: Shard | None, dim: int, device: torch.device) -> torch.Tensor:
    """Return the indices, int64, along a dimension of a tensor that a process takes."""
    ranges: Sequence[range] = (range(size),) if shard is None or shard.dim != dim else shard.ranges
    return torch.cat([torch.arange(each.start, each.stop, device=device) for each in ranges])


def _by_rows(
    stored: torch.Tensor,
    dtype: torch.dtype,
    widen: Callable[[torch.Tensor, int], torch.Tensor],
    *,
    columns: int | None = None,
) -> torch.Tensor:
    """Widen a few rows at a time, to limit peak memory.

    Args:
        widen: maps rows, and the number of the first, to their numbers [rows, columns].
        columns: of the result; None: those of `stored`.
    """
    shape = (len(stored), stored.shape[1] if columns is None else columns)
    out = torch.empty(shape, dtype=dtype, device=stored.device)
    for start in range(0, len(stored), _ROWS):
        out[start : start + _ROWS] = widen(stored[start : start + _ROWS], start)
    return out
