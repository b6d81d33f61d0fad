"""Products by quantised weights as they are stored: in FP8, and by integers of 4 and 8 bits that stay packed.

FP8 with a scale per output channel, or per block of inputs, is multiplied in FP8. A scale per tensor counts as equal
scales of its channels, so that fused projections need no common scale, and one product serves both: rows of activations
have scales of their own, channels of the weight too.

Integers of 4 and 8 bits with scales of groups or channels come from checkpoints (`packed_weight`) or from weights that
are quantised as they are loaded (`quantized_weight`), and are multiplied by kernels of the device (`IntegerKernels`).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import torch

from argosy_engine.checkpoint.weights import Weights
from argosy_engine.layers.experts import ExpertsSpec, StackedExperts
from argosy_engine.layers.linear import (
    GatedLinear,
    Linear,
    LinearSpec,
    SplitGatedLinear,
    fuse,
    ordered,
    quantized_gated_linear_of,
    quantized_linear_of,
)
from argosy_engine.layers.norms import GatedActivation
from argosy_engine.layers.scheme_weights import ROWS, StoredWeight, group_of_inputs
from argosy_engine.model_configs.experts_config import ExpertLayer
from argosy_engine.model_configs.quantization_config import (
    FP8_BLOCK,
    PACKED_GROUPS,
    group_size,
    is_multiplied,
    no_packed_product,
)
from argosy_engine.model_configs.weight_schemes import BlockFp8Scheme, Scheme
from argosy_engine.native.library import Kernels, QuantizedWeight, can_pack
from argosy_engine.quantized_rows import Activations, RowQuantization

logger = logging.getLogger("argosy.models")

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
"""Largest number of this format."""
_ALIGNMENT = 16
"""`torch._scaled_mm` takes sizes that are multiples of this."""


QuantizeRows = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""See `triton_kernels.activations.quantize_fp8`."""


def quantize_rows() -> QuantizeRows:
    """Return the kernel that quantises rows to FP8."""
    from argosy_engine.triton_kernels.activations import quantize_fp8

    return quantize_fp8


class Fp8Linear(Linear):
    """A product in FP8, which quantises its inputs in a launch of its own if the layer before it has not. Few tokens
    are multiplied by our kernel, more by torch's.

    Args:
        weight: float8_e4m3fn [out, in].
        scale: float32 [out].
        bias: [out].
        input_scale: float32 [1], of all inputs; None: each row has the scale that suits it.
        dtype: of the result.
        quantize: quantises rows.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        input_scale: torch.Tensor | None,
        dtype: torch.dtype,
        quantize: QuantizeRows,
    ) -> None:
        from argosy_engine.triton_kernels.fp8_linear import FEW, fp8_linear_few

        self._weight, self._scale = weight.contiguous(), scale.contiguous()
        self._columns, self._scales = self._weight.t(), self._scale.unsqueeze(0)  # as torch takes them
        self._few, self._multiply_few = FEW, fp8_linear_few
        self._bias, self._input_scale, self._dtype = bias, input_scale, dtype
        self._quantize = quantize
        self.input_quantization = RowQuantization(input_scale)

    def __call__(self, x: Activations) -> torch.Tensor:
        values, scales = self._quantize(x, self._input_scale) if isinstance(x, torch.Tensor) else x
        if len(values) <= self._few:
            return self._multiply_few(values, scales, self._weight, self._scale, self._bias, self._dtype)
        return torch._scaled_mm(
            values, self._columns, scales, self._scales, self._bias, out_dtype=self._dtype
        )


class BlockFp8Linear(Linear):
    """A product by weights in FP8 with a scale per 128 inputs (`triton_kernels.fp8_linear`).

    Args:
        weight: float8_e4m3fn [out, in].
        scales: float32 [ceil(in / 128), out].
        bias: [out].
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        from argosy_engine.triton_kernels.fp8_linear import block_fp8_linear

        self._weight, self._scales, self._bias = weight, scales, bias
        self._product = block_fp8_linear

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._product(x, self._weight, self._scales, self._bias)


TakeExpert = Callable[[int, ExpertLayer], StoredWeight]
"""Takes the weight of a projection of an expert, given its number; each exactly once."""


class Product(ABC):
    """Multiplies by quantised weights as they are stored. Where it returns None, they are widened instead."""

    @abstractmethod
    def linear(
        self, spec: LinearSpec, parts: Sequence[StoredWeight], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear | None:
        """Make a layer of the parts of a spec, which come in its order.

        Args:
            dtype: of the activations.
        """

    def gated(
        self,
        spec: LinearSpec,
        parts: Sequence[StoredWeight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        activation: GatedActivation,
    ) -> GatedLinear | None:
        """The same for two parts, the gate's first, followed by the activation."""
        layer = self.linear(spec, parts, bias, dtype)
        return None if layer is None else SplitGatedLinear(layer, activation)

    def experts(
        self, weights: Weights, spec: ExpertsSpec, schemes: Collection[Scheme], take: TakeExpert
    ) -> StackedExperts | None:
        """Make stacked experts.

        Args:
            schemes: of their projections.
        """
        return None


class Fp8Product(Product):
    """Products in FP8, by weights that have one scale per channel or tensor, or one per block of 128 inputs.

    Args:
        quantize: quantises rows of activations.
    """

    def __init__(self, quantize: QuantizeRows) -> None:
        self._quantize = quantize
        self._has_told = False

    def linear(
        self, spec: LinearSpec, parts: Sequence[StoredWeight], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear | None:
        if not all(is_multiplied(part.scheme) and is_aligned(part.shape) for part in parts):
            return None
        of_blocks = [isinstance(part.scheme, BlockFp8Scheme) for part in parts]
        if any(of_blocks):
            return self._in_blocks(spec, parts, bias) if all(of_blocks) else None
        tensors = {part.name: part.tensors for part in parts}
        weight = ordered(spec, fuse(spec, lambda name: tensors[name][".weight"]))
        scales = _joined([_channel_scales(part) for part in parts])
        inputs = [part.tensors[each.suffix] for part in parts for each in part.scheme.tensors[2:]]
        input_scale: torch.Tensor | None = None
        if (
            inputs
        ):  # the largest of the projections that share them; on the meta device `stack` would import sympy
            input_scale = inputs[0] if inputs[0].is_meta else torch.stack(inputs).amax(dim=0)
            if len(inputs) < len(parts):
                return None
        return Fp8Linear(weight, ordered(spec, scales), bias, input_scale, dtype, self._quantize)

    def _in_blocks(
        self, spec: LinearSpec, parts: Sequence[StoredWeight], bias: torch.Tensor | None
    ) -> Linear | None:
        """Make a layer of weights with scales of blocks; None: a rank's inputs begin or end within a block."""
        shapes, device = [part.shape for part in parts], parts[0].tensors[".weight"].device
        outputs, inputs = sum(out for out, _ in shapes), shapes[0][1]
        weight = torch.empty(outputs, inputs, dtype=FP8, device=device)
        scales = torch.empty(outputs, -(-inputs // FP8_BLOCK), device=device)
        start = 0
        for part, (out, _) in zip(parts, shapes, strict=True):
            rows = slice(start, start + out)
            if not _take_blocks(part, weight[rows], scales[rows]):
                self._tell(part.name)
                return None
            start += out
        return BlockFp8Linear(ordered(spec, weight), ordered(spec, scales).t().contiguous(), bias)

    def experts(
        self, weights: Weights, spec: ExpertsSpec, schemes: Collection[Scheme], take: TakeExpert
    ) -> StackedExperts | None:
        if not all(map(is_multiplied, schemes)):
            return None
        of_blocks = [isinstance(each, BlockFp8Scheme) for each in schemes]
        if any(of_blocks):
            edges = () if spec.features is None else (spec.features.start, spec.features.stop)
            if not all(of_blocks):
                return None
            if any(edge % FP8_BLOCK and edge != spec.inner for edge in edges):
                self._tell(spec.prefix)
                return None
        stacked = StackedExperts.empty(spec, FP8, weights.device, FP8_BLOCK if any(of_blocks) else None)
        for place, index in enumerate(spec.held_experts):
            for layer, part, scale in stacked.places(place):
                assert scale is not None
                # Experts do not quantise activations, whatever the scale of inputs.
                stored = take(index, layer)
                if any(of_blocks):
                    has_blocks = _take_blocks(stored, part, scale.t())
                    assert has_blocks
                else:
                    part.copy_(stored.tensors[".weight"])
                    scale.copy_(_channel_scales(stored))
        return stacked

    def _tell(self, name: str) -> None:
        if not self._has_told:
            self._has_told = True
            logger.info(
                "%s is widened, and others may be: this rank's inputs begin or end within a block of %d",
                name,
                FP8_BLOCK,
            )


def _take_blocks(part: StoredWeight, weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Write a weight in FP8 into a tensor [out, in], and the scales of its rows' blocks into [out, blocks]; return
    whether its inputs are whole blocks."""
    for place, (values, own, _, groups) in part.numbers():
        if not isinstance(groups, int):
            return False
        rows = slice(place, place + len(values))
        weight[rows].copy_(values)
        scales[rows].copy_(own)
    return True


def _channel_scales(part: StoredWeight) -> torch.Tensor:
    """Return the scale of each output of an FP8 weight, float32 [out]."""
    return part.tensors[part.scheme.tensors[1].suffix].expand(part.shape[0])


class IntegerKernels(ABC):
    """Multiplies by integers of 4 or 8 bits that stay packed, on one kind of device."""

    device: ClassVar[str]
    """`cpu` or `cuda`."""

    @abstractmethod
    def refusal(self, weight: QuantizedWeight) -> str | None:
        """Return why the kernels do not multiply by a weight, or None."""

    @abstractmethod
    def linear(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """Make a layer of a weight [out, in].

        Args:
            dtype: of the activations and the bias.
        """

    def gated(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        activation: GatedActivation,
    ) -> GatedLinear:
        """The same for a weight [2 * inner, in], the gate's rows first, or without a gate [inner, in]."""
        return SplitGatedLinear(self.linear(weight, bias, dtype), activation)


class CpuIntegers(IntegerKernels):
    """The CPU kernels (native/src/quantized_linear.h)."""

    device: ClassVar[str] = "cpu"

    def __init__(self, loaded: Kernels) -> None:
        self._kernels = loaded

    def refusal(self, weight: QuantizedWeight) -> str | None:
        if can_pack(weight):
            return None
        return f"{weight.group} inputs share a scale, and the CPU kernels take multiples of 8"

    def linear(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        return quantized_linear_of(self._kernels, weight, bias, dtype)

    def gated(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        activation: GatedActivation,
    ) -> GatedLinear:
        return quantized_gated_linear_of(self._kernels, weight, bias, dtype, activation)


class TritonIntegers(IntegerKernels):
    """The Triton kernels (`triton_kernels.packed_linear`), in bfloat16 and float16.

    Args:
        narrows: whether scales are kept in 16 bits where these are exact, as those of checkpoints are. To find out,
            the host waits for the device.
    """

    device: ClassVar[str] = "cuda"

    def __init__(self, *, narrows: bool = True) -> None:
        self._narrows = narrows

    def refusal(self, weight: QuantizedWeight) -> str | None:
        size = PACKED_GROUPS[self.device]
        if weight.scales.shape[1] == 1 or weight.group % size == 0:
            return None
        return f"{weight.group} inputs share a scale, and the GPU kernels take multiples of {size}"

    def linear(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        scales = weight.scales.t().contiguous()
        zeros: torch.Tensor | None = None
        if weight.offsets is not None:
            # Offsets were made of zero points, which are integers, and 0 where a scale is 0.
            zeros = (weight.offsets / -weight.scales).nan_to_num().round().to(torch.int8).t().contiguous()
        return PackedLinearLayer(weight, _in_16_bits(scales) if self._narrows else scales, zeros, bias)


class PackedLinearLayer(Linear):
    """A product of the Triton kernels by integers that stay packed. Inputs that are in another order are brought into
    it by a launch of its own."""

    def __init__(
        self,
        weight: QuantizedWeight,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        from argosy_engine.triton_kernels.packed_linear import PackedIntegers, pack, packed_linear

        words = pack(weight.integers, weight.bits)
        self._weight = PackedIntegers(words, scales, zeros, weight.bits, weight.integers.shape[1])
        self._order, self._bias = weight.order, bias
        self._product = packed_linear

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self._order is not None:
            x = x.index_select(1, self._order)
        return self._product(x, self._weight, self._bias)


def _in_16_bits(scales: torch.Tensor) -> torch.Tensor:
    """Return float32 scales in 16 bits if that changes none of them, else as they are."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales


class _Unpackable(Exception):
    """Why a device's kernels do not take a weight as it is packed."""


class IntegerProduct(Product):
    """Products by integers of 4 or 8 bits, which stay packed.

    Parts of a layer are one product if they have bits, groups and order of inputs in common. Why others are widened is
    logged once for each reason.
    """

    def __init__(self, kernels: IntegerKernels) -> None:
        self._kernels = kernels
        self._told: set[str] = set()

    def linear(
        self, spec: LinearSpec, parts: Sequence[StoredWeight], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear | None:
        weight = self._fused(spec, parts)
        return None if weight is None else self._kernels.linear(weight, bias, dtype)

    def gated(
        self,
        spec: LinearSpec,
        parts: Sequence[StoredWeight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        activation: GatedActivation,
    ) -> GatedLinear | None:
        weight = self._fused(spec, parts)
        return None if weight is None else self._kernels.gated(weight, bias, dtype, activation)

    def experts(
        self, weights: Weights, spec: ExpertsSpec, schemes: Collection[Scheme], take: TakeExpert
    ) -> StackedExperts | None:
        self._tell(spec.prefix, "no kernel multiplies by stacked experts that are packed")
        return None

    def _fused(self, spec: LinearSpec, parts: Sequence[StoredWeight]) -> QuantizedWeight | None:
        """Return the weight of all parts; None: it has to be widened."""
        try:
            found = [packed_weight(part, self._kernels) for part in parts]
            first = found[0]
            if not all(_is_alike(first, each) for each in found):
                raise _Unpackable("its parts differ in bits, groups or the order of inputs")
        except _Unpackable as reason:
            self._tell(parts[0].name, str(reason))
            return None
        offsets: torch.Tensor | None = None
        if any(each.offsets is not None for each in found):
            offsets = torch.cat(
                [torch.zeros_like(each.scales) if each.offsets is None else each.offsets for each in found]
            )
        return QuantizedWeight(
            first.bits,
            ordered(spec, torch.cat([each.integers for each in found])),
            ordered(spec, torch.cat([each.scales for each in found])),
            None if offsets is None else ordered(spec, offsets),
            first.order,
        )

    def _tell(self, name: str, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.info("%s is widened, and others may be: %s", name, reason)


def packed_weight(part: StoredWeight, kernels: IntegerKernels) -> QuantizedWeight:
    """Return a weight of integers as kernels take it. Inputs of one group are brought together, and groups of
    unequal sizes, as a rank may have them, divided into equal ones.

    Raises:
        _Unpackable: they do not take it.
    """
    if (reason := no_packed_product(part.scheme, kernels.device)) is not None:
        raise _Unpackable(reason)
    bits, (out, inputs) = getattr(part.scheme, "bits", 8), part.shape
    device = part.tensors[part.scheme.tensors[0].suffix].device
    integers = torch.empty(out, inputs, dtype=torch.int8, device=device)
    all_scales, all_zeros = [], []
    groups: int | torch.Tensor = inputs
    for place, (values, scales, zeros, own) in part.numbers():
        groups = own
        zeros = torch.zeros_like(scales) if zeros is None else zeros
        if values.dtype is torch.uint8:  # from 0
            half = 1 << (bits - 1)
            values, zeros = (values.to(torch.int16) - half).to(torch.int8), zeros - half
        integers[place : place + len(values)] = values
        all_scales.append(scales.float())
        all_zeros.append(zeros)
    scales, zeros = torch.cat(all_scales), torch.cat(all_zeros)
    order: torch.Tensor | None = None
    if not isinstance(groups, int) or groups * scales.shape[1] != inputs:
        index = group_of_inputs(groups, inputs, integers.device)
        if bool((index.diff() < 0).any()):
            order = index.argsort(stable=True)
            index, integers = index[order], integers[:, order]
        found, counts = index.unique_consecutive(return_counts=True)
        repeated = found.repeat_interleave(counts // math.gcd(*counts.tolist()))
        scales, zeros = scales[:, repeated], zeros[:, repeated]
    offsets = -scales * zeros if bool(zeros.any()) else None
    weight = QuantizedWeight(bits, integers, scales, offsets, None if order is None else order.int())
    if (reason := kernels.refusal(weight)) is not None:
        raise _Unpackable(reason)
    return weight


def _is_alike(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    if (one.bits, one.scales.shape[1]) != (other.bits, other.scales.shape[1]):
        return False
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _joined(scales: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate vectors. On the meta device `torch.cat` would import torch's compiler, which takes seconds."""
    if len(scales) == 1:
        return scales[0].contiguous()
    return scales[0].new_empty(sum(map(len, scales))) if scales[0].is_meta else torch.cat(scales)


def quantized_weight(weight: torch.Tensor, bits: int) -> QuantizedWeight | None:
    """Quantise a weight [out, in]; None: no group divides its inputs.

    The scale of a group is its largest magnitude divided by half the number of steps, as compressed-tensors computes it
    for symmetric integers (`calculate_qparams`).
    """
    out, inputs = weight.shape
    if (group := group_size(inputs)) is None:
        return None
    half = 1 << (bits - 1)
    integers = torch.empty(out, inputs, dtype=torch.int8, device=weight.device)
    scales = torch.empty(out, inputs // group, device=weight.device)
    for start in range(0, out, ROWS):
        rows = slice(start, start + ROWS)
        groups = weight[rows].float().unflatten(1, (-1, group))
        scale = groups.abs().amax(dim=2).div_(half - 0.5).clamp_(min=torch.finfo(torch.float32).tiny)
        rounded = groups.div(scale.unsqueeze(2)).round_().clamp_(-half, half - 1)
        integers[rows], scales[rows] = rounded.flatten(1).to(torch.int8), scale
    return QuantizedWeight(bits, integers, scales)


def is_aligned(shape: Sequence[int]) -> bool:
    return all(size % _ALIGNMENT == 0 for size in shape)
