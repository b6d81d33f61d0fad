"""Schemes: how a checkpoint stores the weight [out, in] of a linear layer. No torch.

A scheme says which tensors a layer has, their shapes and dtypes, and how a tensor-parallel rank cuts each of them. What
the numbers stand for, `layers.scheme_weights` knows; which layer has which scheme, `quantization_config`. Every scheme
is in `SCHEMES`, from which the table in docs/supported-models.md is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, Literal, NamedTuple

from msgspec import Struct

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.sharding import Shard


class Axis(NamedTuple):
    """A dimension of a stored tensor that runs along the outputs or inputs of a weight."""

    of: Literal["out", "in", "all"]
    """`all`: along all numbers, row by row; every rank takes the whole."""
    features: int = 1
    """Features that are stored together: those of a packed word, of a group with one scale."""
    elements: int = 1
    """Elements that store them."""
    is_whole: bool = False
    """Whether every rank takes all of it."""

    def size(self, shape: tuple[int, int]) -> int:
        """Return the tensor's size along this dimension, of a weight [out, in]."""
        size = math.prod(shape) if self.of == "all" else shape[self.of == "in"]
        return -(-size // self.features) * self.elements


class SchemeTensor(NamedTuple):
    """One of the tensors that make up a layer's weight."""

    suffix: str
    """Of its name, after the layer's."""
    dtype: str | None
    """As safetensors calls it; None: numbers of any floating point dtype, which keep their precision; `JSON`: a JSON
    object in bytes, as many as it has."""
    axes: tuple[Axis | int, ...]
    """Its dimensions; a number is the size of one that has nothing to do with the weight's."""
    is_optional: bool = False
    """Whether there are checkpoints without it."""
    is_positive: bool = False
    """Whether numbers that are 0 or less are an error."""

    def shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return its shape, for a weight [out, in]."""
        return tuple(axis if isinstance(axis, int) else axis.size(shape) for axis in self.axes)


class Cut(NamedTuple):
    """What a rank reads of a weight [out, in]: whole granules, and what it uses of them."""

    shape: tuple[int, int]
    """Of the whole weight."""
    out: tuple[range, ...] | None
    """Features that are read, in whole granules; None: all."""
    inputs: tuple[range, ...] | None
    used_out: tuple[range, ...]
    """Features that are used, counted among those that are read."""
    used_in: tuple[range, ...]


class Scheme(Struct, frozen=True):
    """How the weight [out, in] of a linear layer is stored."""

    title: ClassVar[str]
    """What the format is called."""
    sources: ClassVar[str]
    """`quant_method` in config.json of the checkpoints that have it, for the table in the documentation."""
    reads: ClassVar[str]
    """What of the format is read, for the same."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Suffixes of tensors that a checkpoint may have besides, and that are not read."""
    keeps_kept_layers: ClassVar[bool] = False
    """Whether routers and output heads are unquantised though no list of exceptions names them."""
    is_told_by_storage: ClassVar[bool] = False
    """Whether a layer stored as NAME.weight in floating point is unquantised, whatever the config says."""

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        """The stored tensors; the first has the numbers of the weight, and no unquantised layer has the second."""
        return ()

    @property
    def about(self) -> str:
        """What a log line or `argosy doctor` says."""
        return self.title

    @property
    def elements_per_number(self) -> float:
        """Elements of the first tensor for each number of the weight."""
        share = 1.0
        for axis in self.tensors[0].axes:
            if not isinstance(axis, int):
                share *= axis.elements / axis.features
        return share

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape [out, in] of a weight, given that of the first stored tensor."""
        sizes = {"out": 0, "in": 0, "all": 0}
        for axis, size in zip(self.tensors[0].axes, stored, strict=True):
            if not isinstance(axis, int):
                sizes[axis.of] = size * axis.features // axis.elements
        return sizes["out"], sizes["in"]

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        """Check that a weight [out, in] can be stored so.

        Raises:
            ConfigError: its sizes are no multiples of what is stored together.
        """

    def cut(self, shape: tuple[int, int], shard: Shard | None) -> Cut:
        """Return what a rank reads for its part of a weight [out, in], in whole granules.

        Args:
            shard: the part, of outputs (dimension 0) or inputs (1); None: the whole.
        """
        whole = tuple((range(size),) for size in shape)
        if shard is None:
            return Cut(shape, None, None, *whole)
        side: Literal["out", "in"] = "in" if shard.dim else "out"
        granule, size = self._granule(side), shape[shard.dim]
        read, used, start = [], [], 0
        for each in shard.ranges:
            first, last = each.start // granule * granule, min(-(-each.stop // granule) * granule, size)
            read.append(range(first, last))
            used.append(range(start + each.start - first, start + each.stop - first))
            start += last - first
        if shard.dim:
            return Cut(shape, None, tuple(read), whole[0], tuple(used))
        return Cut(shape, tuple(read), None, tuple(used), whole[1])

    def _granule(self, side: Literal["out", "in"]) -> int:
        """Return the number of features, of which a part of every tensor can be cut that is divided."""
        axes: Iterable[Axis | int] = (axis for tensor in self.tensors for axis in tensor.axes)
        found = [
            axis.features
            for axis in axes
            if not isinstance(axis, int) and axis.of == side and not axis.is_whole
        ]
        return math.lcm(*found)


def shard_of(tensor: SchemeTensor, cut: Cut) -> Shard | None:
    """Return the part of a stored tensor that goes with a part of the weight; None: the whole."""
    for dim, axis in enumerate(tensor.axes):
        if isinstance(axis, int) or axis.is_whole:
            continue
        ranges = {"out": cut.out, "in": cut.inputs, "all": None}[axis.of]
        if ranges is not None:
            ends = (range(each.start // axis.features, -(-each.stop // axis.features)) for each in ranges)
            return Shard(
                dim, tuple(range(each.start * axis.elements, each.stop * axis.elements) for each in ends)
            )
    return None


class Fp8Scheme(Scheme, frozen=True):
    """FP8 (e4m3) with a scale per tensor or per output channel."""

    title: ClassVar[str] = "FP8"
    sources: ClassVar[str] = (
        "`fp8`, `compressed-tensors` (float-quantized), `modelopt` (FP8, FP8_PER_CHANNEL_PER_TOKEN)"
    )
    reads: ClassVar[str] = (
        "e4m3, a scale per tensor or output channel; inputs static, dynamic or in full precision"
    )
    is_per_channel: bool = False
    is_static: bool = False
    """Whether inputs have a scale in the checkpoint, rather than one per token and step."""
    is_weight_only: bool = False
    """Whether inputs are not to be quantised, so that weights are widened on every device."""
    is_of_transformers: bool = False
    """Whether scales have the names that transformers gives them."""

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        of_weight, of_inputs = ".weight_scale", ".input_scale"
        if self.is_of_transformers:
            of_weight, of_inputs = ".weight_scale_inv", ".activation_scale"
        scale: tuple[Axis | int, ...] = (Axis("out"),) if self.is_per_channel else (1,)
        found = [
            SchemeTensor(".weight", "F8_E4M3", (Axis("out"), Axis("in"))),
            SchemeTensor(of_weight, None, scale, is_positive=True),
        ]
        if self.is_static:
            found.append(SchemeTensor(of_inputs, None, (1,), is_positive=True))
        return tuple(found)

    @property
    def about(self) -> str:
        return f"FP8 with a scale per {'channel' if self.is_per_channel else 'tensor'}"


class BlockFp8Scheme(Scheme, frozen=True):
    """FP8 (e4m3) with a scale per block of rows and columns (DeepSeek-V3, arXiv 2412.19437)."""

    title: ClassVar[str] = "FP8 in blocks"
    sources: ClassVar[str] = (
        "`fp8` with `weight_block_size`, `compressed-tensors` (strategy block), `modelopt` (FP8_PB_WO)"
    )
    reads: ClassVar[str] = "e4m3, a scale per block of any size"
    keeps_kept_layers: ClassVar[bool] = True
    block: tuple[int, int]
    scale: str = ".weight_scale"
    """Suffix of the scales."""

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        rows, columns = self.block
        return (
            SchemeTensor(".weight", "F8_E4M3", (Axis("out"), Axis("in"))),
            SchemeTensor(self.scale, None, (Axis("out", rows), Axis("in", columns))),
        )

    @property
    def about(self) -> str:
        return f"FP8 in blocks of {self.block[0]} x {self.block[1]}"


_OF_INPUTS = (".input_scale", ".input_zero_point")
"""Suffixes of how inputs are quantised, which are not where weights are widened."""
MX_GROUP = 32
"""Numbers that share a scale in the microscaling formats, 2 ** (scale - 127)."""
BNB_BLOCK = 64
"""Numbers that share a scale in bitsandbytes."""
BNB_NESTED_BLOCK = 256
"""Scales that share one, if they are quantised."""


class _PackedScheme(Scheme, frozen=True):
    """Integers of few bits, packed into words of 32, with a scale and a zero point per group of inputs."""

    is_told_by_storage: ClassVar[bool] = True
    bits: int
    group_size: int | None = None
    """Inputs with one scale; None: all."""

    @property
    def granule(self) -> int:
        """Numbers that fill whole words: of 3 bits, 32 fill three."""
        return 32 // math.gcd(32, self.bits)

    @property
    def about(self) -> str:
        groups = f"in groups of {self.group_size}" if self.group_size else "per channel"
        return f"{self.title}, {self.bits} bits {groups}"

    def _packed(self, of: Literal["out", "in"]) -> Axis:
        return Axis(of, self.granule, self.granule * self.bits // 32)

    def _groups(self, *, is_whole: bool) -> Axis | int:
        return Axis("in", self.group_size, is_whole=is_whole) if self.group_size else 1

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        if self.group_size:
            check_divides(layer, "inputs", shape[1], self.group_size)


class GptqScheme(_PackedScheme, frozen=True):
    """GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel pack it.

    The first format of zero points stores each less 1; GPTQModel takes words for numbers where it adds 1 again.
    """

    title: ClassVar[str] = "GPTQ"
    sources: ClassVar[str] = "`gptq`, `auto-round` (auto_round:auto_gptq)"
    reads: ClassVar[str] = (
        "2, 3, 4 and 8 bits, groups of any size or none, `sym` or not, `desc_act`, zero points of both "
        "formats, `dynamic`"
    )
    is_symmetric: bool = False
    """Whether all zero points are 2 ** (bits - 1)."""
    is_ordered: bool = False
    """Whether inputs were quantised by activation (`desc_act`), so that `g_idx` tells their groups."""
    is_v2: bool = False
    """Whether zero points are stored as they are (`checkpoint_format` gptq_v2)."""

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        groups = self._groups(is_whole=True)  # of a rank's inputs, g_idx may name any
        return (
            SchemeTensor(".qweight", "I32", (self._packed("in"), Axis("out"))),
            SchemeTensor(".qzeros", "I32", (groups, self._packed("out"))),
            SchemeTensor(".scales", None, (groups, Axis("out"))),
            SchemeTensor(".g_idx", "I32", (Axis("in"),), is_optional=not self.is_ordered),
        )

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        super().check(layer, shape)
        check_divides(layer, "inputs", shape[1], self.granule)
        check_divides(layer, "outputs", shape[0], self.granule)


class AwqScheme(_PackedScheme, frozen=True):
    """AWQ (arXiv 2306.00978) as AutoAWQ packs it for its GEMM kernels: eight outputs in a word, out of order."""

    title: ClassVar[str] = "AWQ"
    sources: ClassVar[str] = "`awq` (version gemm), `auto-round` (auto_round:auto_awq)"
    reads: ClassVar[str] = "4 bits, groups of any size or none"

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        groups = self._groups(is_whole=False)
        return (
            SchemeTensor(".qweight", "I32", (Axis("in"), self._packed("out"))),
            SchemeTensor(".qzeros", "I32", (groups, self._packed("out"))),
            SchemeTensor(".scales", None, (groups, Axis("out"))),
        )

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        super().check(layer, shape)
        check_divides(layer, "outputs", shape[0], self.granule)


class PackedIntScheme(_PackedScheme, frozen=True):
    """Integers of compressed-tensors' format pack-quantized, packed along the inputs, less half their range."""

    title: ClassVar[str] = "compressed-tensors' packed integers"
    sources: ClassVar[str] = "`compressed-tensors` (pack-quantized)"
    reads: ClassVar[str] = "4 and 8 bits per group, channel or tensor, with zero points, with `actorder`"
    unused: ClassVar[tuple[str, ...]] = (".weight_shape", *_OF_INPUTS)
    is_told_by_storage: ClassVar[bool] = False
    is_per_tensor: bool = False
    is_symmetric: bool = True
    is_ordered: bool = False
    """Whether `weight_g_idx` tells the groups of inputs."""

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        groups = self._groups(is_whole=self.is_ordered)
        scales: tuple[Axis | int, ...] = (1,) if self.is_per_tensor else (Axis("out"), groups)
        found = [
            SchemeTensor(".weight_packed", "I32", (Axis("out"), self._packed("in"))),
            SchemeTensor(".weight_scale", None, scales),
        ]
        if not self.is_symmetric:
            found.append(SchemeTensor(".weight_zero_point", "I32", (self._packed("out"), groups)))
        if self.is_ordered:
            found.append(SchemeTensor(".weight_g_idx", "I32", (Axis("in"),)))
        return tuple(found)

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        super().check(layer, shape)
        check_divides(layer, "inputs", shape[1], self.granule)
        if not self.is_symmetric:
            check_divides(layer, "outputs", shape[0], self.granule)


class IntScheme(Scheme, frozen=True):
    """Integers of up to 8 bits, each in a byte: compressed-tensors' format int-quantized."""

    title: ClassVar[str] = "int8"
    sources: ClassVar[str] = "`compressed-tensors` (int-quantized)"
    reads: ClassVar[str] = (
        "int8 per group, channel or tensor, with zero points; inputs are left in full precision, though "
        "the checkpoint has them quantised"
    )
    unused: ClassVar[tuple[str, ...]] = _OF_INPUTS
    group_size: int | None = None
    """Inputs with one scale; None: all."""
    is_per_tensor: bool = False
    is_symmetric: bool = True

    @property
    def about(self) -> str:
        groups = (
            f"group of {self.group_size}"
            if self.group_size
            else "tensor"
            if self.is_per_tensor
            else "channel"
        )
        return f"int8 with a scale per {groups}"

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        groups = Axis("in", self.group_size) if self.group_size else 1
        scales: tuple[Axis | int, ...] = (1,) if self.is_per_tensor else (Axis("out"), groups)
        return (
            SchemeTensor(".weight", "I8", (Axis("out"), Axis("in"))),
            SchemeTensor(".weight_scale", None, scales),
            SchemeTensor(".weight_zero_point", "I8", scales, is_optional=self.is_symmetric),
        )

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        if self.group_size:
            check_divides(layer, "inputs", shape[1], self.group_size)


class Nvfp4Scheme(Scheme, frozen=True):
    """NVFP4: pairs of e2m1 in a byte, an FP8 scale per 16 inputs, and one of the tensor."""

    title: ClassVar[str] = "NVFP4"
    sources: ClassVar[str] = "`modelopt` (NVFP4), `compressed-tensors` (nvfp4-pack-quantized)"
    reads: ClassVar[str] = (
        "e2m1, an e4m3 scale per group, one of the tensor; inputs are left in full precision"
    )
    unused: ClassVar[tuple[str, ...]] = (".input_global_scale", *_OF_INPUTS)
    weight: str = ".weight"
    """Suffix of the numbers."""
    tensor_scale: str = ".weight_scale_2"
    """Suffix of the tensor's scale."""
    divides: bool = False
    """Whether the others are divided by that, instead of multiplied (compressed-tensors)."""
    group_size: int = 16

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        return (
            SchemeTensor(self.weight, "U8", (Axis("out"), Axis("in", 2))),
            SchemeTensor(".weight_scale", "F8_E4M3", (Axis("out"), Axis("in", self.group_size))),
            SchemeTensor(self.tensor_scale, None, (1,), is_positive=True),
        )

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        check_divides(layer, "inputs", shape[1], self.group_size)
        check_divides(layer, "inputs", shape[1], 2)


class Mxfp8Scheme(Scheme, frozen=True):
    """MXFP8 (OCP Microscaling Formats 1.0): FP8 (e4m3) with a power of two per 32 inputs."""

    title: ClassVar[str] = "MXFP8"
    sources: ClassVar[str] = "`modelopt` (MXFP8)"
    reads: ClassVar[str] = "e4m3, a power of two per 32 inputs; inputs are left in full precision"
    unused: ClassVar[tuple[str, ...]] = _OF_INPUTS

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        return (
            SchemeTensor(".weight", "F8_E4M3", (Axis("out"), Axis("in"))),
            SchemeTensor(".weight_scale", "U8", (Axis("out"), Axis("in", MX_GROUP))),
        )

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        check_divides(layer, "inputs", shape[1], MX_GROUP)


class Bnb4Scheme(Scheme, frozen=True):
    """bitsandbytes in 4 bits (QLoRA, arXiv 2305.14314): places in a table of 16 numbers, two in a byte, row after row
    without regard to their ends, and a scale per 64, which may be in 8 bits in turn."""

    title: ClassVar[str] = "bitsandbytes, 4 bits"
    sources: ClassVar[str] = "`bitsandbytes` (load_in_4bit)"
    reads: ClassVar[str] = "nf4 and fp4, in `uint8`, with double quantisation or without"
    is_told_by_storage: ClassVar[bool] = True
    kind: Literal["nf4", "fp4"]
    is_double: bool = False
    """Whether the scales are quantised as well."""

    @property
    def about(self) -> str:
        return f"bitsandbytes {self.kind}{', scales quantised' if self.is_double else ''}"

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        blocks = Axis("all", BNB_BLOCK)
        found = [
            SchemeTensor(".weight", "U8", (Axis("all", 2), 1)),
            SchemeTensor(".weight.absmax", "U8" if self.is_double else None, (blocks,)),
            SchemeTensor(".weight.quant_map", None, (16,)),
            SchemeTensor(f".weight.quant_state.bitsandbytes__{self.kind}", "JSON", ()),
        ]
        if self.is_double:
            scales = Axis("all", BNB_BLOCK * BNB_NESTED_BLOCK)
            found.append(SchemeTensor(".weight.nested_absmax", None, (scales,)))
            found.append(SchemeTensor(".weight.nested_quant_map", None, (256,)))
        return tuple(found)

    def cut(self, shape: tuple[int, int], shard: Shard | None) -> Cut:
        used: list[tuple[range, ...]] = [(range(size),) for size in shape]
        if shard is not None:
            used[shard.dim] = shard.ranges
        return Cut(shape, None, None, used[0], used[1])


class Bnb8Scheme(Scheme, frozen=True):
    """bitsandbytes in 8 bits (LLM.int8(), arXiv 2208.07339): the largest magnitude of an output is 127."""

    title: ClassVar[str] = "bitsandbytes int8"
    sources: ClassVar[str] = "`bitsandbytes` (load_in_8bit)"
    reads: ClassVar[str] = "int8 with `SCB`; inputs are left in full precision, outliers too"
    is_told_by_storage: ClassVar[bool] = True

    @property
    def tensors(self) -> tuple[SchemeTensor, ...]:
        return (
            SchemeTensor(".weight", "I8", (Axis("out"), Axis("in"))),
            SchemeTensor(".SCB", None, (Axis("out"),)),
            SchemeTensor(".weight_format", "U8", (), is_optional=True),
        )


class Mxfp4ExpertsScheme(Scheme, frozen=True):
    """gpt-oss' experts in MXFP4, all of a layer stacked: `take_mxfp4` of `layers.linear_method` reads them."""

    title: ClassVar[str] = "MXFP4"
    sources: ClassVar[str] = "`mxfp4`"
    reads: ClassVar[str] = "experts of gpt-oss"


SCHEMES: tuple[type[Scheme], ...] = (
    Fp8Scheme,
    BlockFp8Scheme,
    GptqScheme,
    AwqScheme,
    PackedIntScheme,
    IntScheme,
    Nvfp4Scheme,
    Mxfp8Scheme,
    Bnb4Scheme,
    Bnb8Scheme,
    Mxfp4ExpertsScheme,
)
"""Every scheme that is read."""


def check_divides(layer: str, what: str, size: int, granule: int) -> None:
    """
    Raises:
        ConfigError: a size is no multiple of a granule.
    """
    if granule < 1 or size % granule:
        raise ConfigError(
            f"{layer} has {size} {what}, which is not a multiple of {granule}, as its quantisation needs; correct "
            "quantization_config, or quantise again"
        )
