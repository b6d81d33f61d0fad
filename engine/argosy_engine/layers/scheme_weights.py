"""Quantised weights: takes the tensors of a layer by its scheme, and says what their numbers stand for.

`StoredWeight` holds a rank's part as it is stored. `numbers` returns rows of it as integers (or small floating point
numbers) with scales and zero points, which kernels that keep the weight small begin with; `widen` returns it in the
engine's dtype, a few rows at a time. The product of number and scale is taken in float32, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Struct

from argosy_engine.checkpoint.weights import DTYPES, Weights
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.model_configs.weight_schemes import (
    BNB_BLOCK,
    BNB_NESTED_BLOCK,
    MX_GROUP,
    AwqScheme,
    BlockFp8Scheme,
    Bnb4Scheme,
    Bnb8Scheme,
    Cut,
    Fp8Scheme,
    GptqScheme,
    IntScheme,
    Mxfp8Scheme,
    Nvfp4Scheme,
    PackedIntScheme,
    Scheme,
    SchemeTensor,
    shard_of,
)

ROWS = 1024
"""Rows that are widened or quantised at a time, to limit peak memory."""

Tensors = Mapping[str, torch.Tensor]
"""The stored tensors of a layer, by suffix, as far as they are read."""


class Numbers(NamedTuple):
    """Rows of a weight, each number (value - zero) * scale."""

    values: torch.Tensor
    """[rows, in]: uint8, int8, float8_e4m3fn, or float32."""
    scales: torch.Tensor
    """float32 [rows, groups]"""
    zeros: torch.Tensor | None
    """float32 [rows, groups]; None: all are 0."""
    groups: int | torch.Tensor
    """Consecutive inputs that share a scale, or int64 [in], the group of each input."""


Reader = Callable[[int, int], Numbers]
"""Returns the rows from one to another, as many as are read, with all their inputs."""


class StoredWeight:
    """A rank's part of the weight [out, in] of one layer, as the checkpoint stores it.

    Args:
        name: of the layer, for messages.
        tensors: what `cut` says of them, by suffix.
        reader: made of the tensors.
    """

    def __init__(self, name: str, scheme: Scheme, tensors: Tensors, cut: Cut, reader: Reader | None) -> None:
        self.name, self.scheme, self.tensors = name, scheme, tensors
        self._cut, self._reader = cut, reader

    @property
    def shape(self) -> tuple[int, int]:
        """Of the part, [out, in]."""
        return sum(map(len, self._cut.used_out)), sum(map(len, self._cut.used_in))

    def numbers(self) -> Iterator[tuple[int, Numbers]]:
        """Yield the part a few rows at a time, each with the index of its first row."""
        assert self._reader is not None
        place = 0
        for rows in self._cut.used_out:
            for start in range(rows.start, rows.stop, ROWS):
                stop = min(start + ROWS, rows.stop)
                yield place, self._without_unused_inputs(self._reader(start, stop))
                place += stop - start

    def widen(self, out: torch.Tensor) -> None:
        """Write the part into a tensor [out, in] of the engine's dtype."""
        for place, numbers in self.numbers():
            out[place : place + len(numbers.values)] = widened(numbers)

    def _without_unused_inputs(self, numbers: Numbers) -> Numbers:
        (first, *more), size = self._cut.used_in, numbers.values.shape[1]
        if not more and first == range(size):
            return numbers
        device = numbers.values.device
        used = torch.cat([torch.arange(each.start, each.stop, device=device) for each in self._cut.used_in])
        groups = group_of_inputs(numbers.groups, size, device)[used]
        values = numbers.values
        if values.dtype is torch.float8_e4m3fn:  # which torch indexes only as bytes
            values = values.view(torch.uint8)[:, used].view(torch.float8_e4m3fn)
        else:
            values = values[:, used]
        return Numbers(values, numbers.scales, numbers.zeros, groups)


def group_of_inputs(groups: int | torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """Return the group of each of `size` inputs, int64."""
    return torch.arange(size, device=device) // groups if isinstance(groups, int) else groups


def widened(numbers: Numbers) -> torch.Tensor:
    """Return what rows stand for, float32 [rows, in]."""
    values, scales, zeros, groups = numbers
    rows, size = values.shape
    if isinstance(groups, int) and size == groups * scales.shape[1]:
        values = values.view(rows, -1, groups)
        scales = scales.unsqueeze(2)
        zeros = None if zeros is None else zeros.unsqueeze(2)
    else:
        index = group_of_inputs(groups, size, values.device)
        scales = scales[:, index]
        zeros = None if zeros is None else zeros[:, index]
    out = values.to(torch.float32, copy=True)
    return (out if zeros is None else out.sub_(zeros)).mul_(scales).view(rows, size)


def take_weight(
    weights: Weights, name: str, scheme: Scheme, shape: tuple[int, int], shard: Shard | None
) -> StoredWeight:
    """Take this process's part of a layer's weight.

    Args:
        name: of the layer in the checkpoint, without a suffix.
        shape: of the whole weight, [out, in].

    Raises:
        ConfigError: a weight of this shape cannot be stored so, or what is stored is contradictory.
    """
    scheme.check(name, shape)
    cut = scheme.cut(shape, shard)
    taken = {each.suffix: _take(weights, name, each, shape, cut) for each in scheme.tensors}
    tensors = {suffix: tensor for suffix, tensor in taken.items() if tensor is not None}
    if next(iter(tensors.values())).is_meta:
        return StoredWeight(name, scheme, tensors, cut, None)
    return StoredWeight(name, scheme, tensors, cut, _READERS[type(scheme)](name, scheme, tensors, cut))


def _take(
    weights: Weights, name: str, stored: SchemeTensor, shape: tuple[int, int], cut: Cut
) -> torch.Tensor | None:
    if stored.dtype == "JSON":
        return weights.take_bytes(name + stored.suffix)
    sizes, shard = stored.shape(shape), shard_of(stored, cut)
    if stored.dtype is None:
        return weights.take_scale(name + stored.suffix, sizes, shard, is_signed=not stored.is_positive)
    dtype = DTYPES[stored.dtype]
    if stored.is_optional:
        return weights.find(name + stored.suffix, *sizes, dtype=dtype, shard=shard)
    return weights.take(name + stored.suffix, *sizes, dtype=dtype, shard=shard)


def _fp8(_: str, scheme: Fp8Scheme, tensors: Tensors, cut: Cut) -> Reader:
    weight, scale = tensors[".weight"], tensors[scheme.tensors[1].suffix]
    scales = scale.expand(len(weight)).unsqueeze(1)
    return lambda start, stop: Numbers(weight[start:stop], scales[start:stop], None, weight.shape[1])


def _block_fp8(_: str, scheme: BlockFp8Scheme, tensors: Tensors, cut: Cut) -> Reader:
    weight, scale = tensors[".weight"], tensors[scheme.scale]
    rows, columns = scheme.block

    def read(start: int, stop: int) -> Numbers:
        index = torch.arange(start, stop, device=weight.device) // rows
        return Numbers(weight[start:stop], scale[index], None, columns)

    return read


_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ the first output is, the second, and so on."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers that are packed along the last dimension, uint8. The first is in the lowest bits of a word.

    Args:
        words: int32. Eight numbers are in as many bytes as they have bits, and may cross the ends of these.
    """
    parts, count = _bytes_of(words).flatten(-2), 8 // bits
    if 8 % bits:
        eights, count = parts.unflatten(-1, (-1, bits)).int(), 8
        parts = eights[..., 0]
        for index in range(1, bits):
            parts = parts | eights[..., index] << 8 * index
    mask = (1 << bits) - 1
    found = [(parts >> bits * index & mask).to(torch.uint8) for index in range(count)]
    return torch.stack(found, dim=-1).flatten(-2)


def _bytes_of(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of words, uint8 [..., 4], the lowest first."""
    return words.contiguous().view(-1).view(torch.uint8).view(*words.shape, 4)


def pairs_of(numbers: torch.Tensor, *, is_high_first: bool) -> torch.Tensor:
    """Return the two numbers that each byte stands for, float32 [256, 2].

    Args:
        numbers: 16.
        is_high_first: whether the upper half of a byte is the place of the first of them.
    """
    every = torch.arange(256, device=numbers.device)
    low, high = numbers[every & 15], numbers[every >> 4]
    return torch.stack((high, low) if is_high_first else (low, high), dim=1)


def _read_groups(scheme: GptqScheme, tensors: Tensors, cut: Cut, name: str) -> int | torch.Tensor:
    """Return the groups of the inputs that are read."""
    scales, device = tensors[".scales"], tensors[".scales"].device
    if (index := tensors.get(".g_idx")) is not None:
        return _order(name + ".g_idx", index, len(scales))
    size = scheme.group_size
    if size is None:
        return len(tensors[".qweight"]) * 32 // scheme.bits
    if cut.inputs is None:
        return size
    return torch.cat([torch.arange(each.start, each.stop, device=device) // size for each in cut.inputs])


def _gptq(name: str, scheme: GptqScheme, tensors: Tensors, cut: Cut) -> Reader:
    qweight, bits = tensors[".qweight"], scheme.bits
    groups = _read_groups(scheme, tensors, cut, name)
    scales = tensors[".scales"].t()
    zeros = _gptq_zeros(name, scheme, tensors[".qzeros"]).t().float()

    def read(start: int, stop: int) -> Numbers:
        values = unpack(qweight[:, start:stop].t(), bits)
        return Numbers(values, scales[start:stop], zeros[start:stop], groups)

    return read


def _gptq_zeros(name: str, scheme: GptqScheme, qzeros: torch.Tensor) -> torch.Tensor:
    """Return zero points, uint8 [groups, out]."""
    bits, middle = scheme.bits, 1 << (scheme.bits - 1)
    if scheme.is_v2:
        zeros = unpack(qzeros, bits)
    elif 32 % bits:
        zeros = (unpack(qzeros, bits) + 1) & ((1 << bits) - 1)
    else:  # as GPTQModel subtracts and adds it: where a number overflows, it carries
        ones = sum(1 << shift for shift in range(0, 32, bits))
        zeros = unpack(qzeros + torch.tensor(ones, dtype=torch.int32, device=qzeros.device), bits)
    if scheme.is_symmetric and not bool((zeros == middle).all()):
        raise ConfigError(
            f"{name}.qzeros has other zero points than {middle}, and quantization_config says that it is symmetric; "
            "correct sym or checkpoint_format there, or take another checkpoint"
        )
    return zeros


def _awq(_: str, scheme: AwqScheme, tensors: Tensors, cut: Cut) -> Reader:
    qweight, scales = tensors[".qweight"], tensors[".scales"].t()
    zeros = _awq_numbers(tensors[".qzeros"]).float()
    groups = scheme.group_size or len(qweight)

    def read(start: int, stop: int) -> Numbers:
        first = start // 8
        values = _awq_numbers(qweight[:, first : -(-stop // 8)])[start - first * 8 : stop - first * 8]
        return Numbers(values, scales[start:stop], zeros[start:stop], groups)

    return read


def _awq_numbers(words: torch.Tensor) -> torch.Tensor:
    """Return the numbers of words [n, out / 8], uint8 [out, n]."""
    parts = _bytes_of(words.t())
    found = [parts[..., place // 2] >> 4 * (place % 2) & 15 for place in _AWQ_PLACES]
    return torch.stack(found, dim=1).flatten(0, 1)


def _order(name: str, index: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return the groups of inputs, int64.

    Raises:
        ConfigError: some are no groups.
    """
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < num_groups:
        raise ConfigError(
            f"{name} has groups that are not among the {num_groups} that have scales; download the checkpoint "
            "again, or quantise again"
        )
    return index.long()


def _packed_int(name: str, scheme: PackedIntScheme, tensors: Tensors, cut: Cut) -> Reader:
    packed, bits = tensors[".weight_packed"], scheme.bits
    scales, middle = tensors[".weight_scale"], 1 << (bits - 1)
    if scheme.is_per_tensor:
        scales = scales.expand(len(packed)).unsqueeze(1)
    zeros: torch.Tensor | None = None
    if not scheme.is_symmetric:
        zeros = unpack(tensors[".weight_zero_point"].t(), bits).t().float() - middle
    groups: int | torch.Tensor = scheme.group_size or packed.shape[1] * scheme.granule
    if scheme.is_ordered:
        groups = _order(name + ".weight_g_idx", tensors[".weight_g_idx"], scales.shape[1])

    def read(start: int, stop: int) -> Numbers:
        values = (unpack(packed[start:stop], bits) - middle).view(torch.int8)
        return Numbers(values, scales[start:stop], None if zeros is None else zeros[start:stop], groups)

    return read


def _int(_: str, scheme: IntScheme, tensors: Tensors, cut: Cut) -> Reader:
    weight, scales, zeros = tensors[".weight"], tensors[".weight_scale"], tensors.get(".weight_zero_point")
    if scheme.is_per_tensor:
        scales = scales.expand(len(weight)).unsqueeze(1)
        zeros = None if zeros is None else zeros.expand(len(weight)).unsqueeze(1)
    groups = scheme.group_size or weight.shape[1]

    def read(start: int, stop: int) -> Numbers:
        own = None if zeros is None else zeros[start:stop].float()
        return Numbers(weight[start:stop], scales[start:stop], own, groups)

    return read


def fp4_pairs(device: torch.device) -> torch.Tensor:
    """Return the two numbers (e2m1) that each byte stands for, float32 [256, 2]."""
    numbers = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    signed = torch.tensor((*numbers, *(-each for each in numbers)), device=device)
    return pairs_of(signed, is_high_first=False)


def _nvfp4(name: str, scheme: Nvfp4Scheme, tensors: Tensors, cut: Cut) -> Reader:
    packed, scale = tensors[scheme.weight], tensors[scheme.tensor_scale]
    pairs, scales = fp4_pairs(packed.device), tensors[".weight_scale"].float()
    if not bool(scales.isfinite().all()):
        raise _not_finite(name + ".weight_scale")
    scales = scales / scale if scheme.divides else scales * scale

    def read(start: int, stop: int) -> Numbers:
        values = F.embedding(packed[start:stop].int(), pairs).flatten(1)
        return Numbers(values, scales[start:stop], None, scheme.group_size)

    return read


def _mxfp8(name: str, scheme: Mxfp8Scheme, tensors: Tensors, cut: Cut) -> Reader:
    weight, exponents = tensors[".weight"], tensors[".weight_scale"]
    if bool((exponents == 255).any()):  # not a number, in e8m0
        raise _not_finite(name + ".weight_scale")
    scales = torch.ldexp(torch.ones(exponents.shape, device=weight.device), exponents.int() - 127)
    return lambda start, stop: Numbers(weight[start:stop], scales[start:stop], None, MX_GROUP)


class BnbState(Struct):
    """What bitsandbytes says of a weight in 4 bits, beside its tensors."""

    quant_type: str
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int = BNB_NESTED_BLOCK
    nested_offset: float = 0.0

    @classmethod
    def of(cls, name: str, stored: torch.Tensor) -> BnbState:
        """Decode the bytes of a tensor.

        Raises:
            ConfigError: they are no such object, or say what is not read.
        """
        try:
            state = msgspec.json.decode(stored.numpy().tobytes(), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} is malformed: {error}; download the checkpoint again") from None
        if (state.blocksize, state.nested_blocksize) != (BNB_BLOCK, BNB_NESTED_BLOCK):
            raise ConfigError(
                f"{name} has a scale per {state.blocksize} numbers, and one per {state.nested_blocksize} of these; "
                f"only {BNB_BLOCK} and {BNB_NESTED_BLOCK} are read: quantise again"
            )
        if not math.isfinite(state.nested_offset):
            raise _not_finite(name)
        return state


def _bnb4(name: str, scheme: Bnb4Scheme, tensors: Tensors, cut: Cut) -> Reader:
    packed, numbers, scales = (tensors[each] for each in (".weight", ".weight.quant_map", ".weight.absmax"))
    document = f".weight.quant_state.bitsandbytes__{scheme.kind}"
    columns, offset = cut.shape[1], 0.0
    if len(tensors[document]):  # random weights have none
        state = BnbState.of(name + document, tensors[document])
        offset = state.nested_offset
        if state.quant_type != scheme.kind or state.shape != cut.shape:
            raise ConfigError(
                f"{name}{document} is of {state.quant_type} and {list(state.shape)}, which does not fit config.json; "
                "copy the whole checkpoint"
            )
    if scheme.is_double:
        nested = tensors[".weight.nested_absmax"].repeat_interleave(BNB_NESTED_BLOCK)[: len(scales)]
        scales = tensors[".weight.nested_quant_map"][scales.int()] * nested + offset
    pairs, flat = pairs_of(numbers, is_high_first=True), packed.flatten()

    def read(start: int, stop: int) -> Numbers:
        first, last = start * columns, stop * columns
        values = F.embedding(flat[first // 2 : -(-last // 2)].int(), pairs).flatten()
        values = values[first % 2 :][: last - first].view(stop - start, columns)
        blocks = slice(first // BNB_BLOCK, last // BNB_BLOCK)
        if columns % BNB_BLOCK == 0:
            return Numbers(values, scales[blocks].view(stop - start, -1), None, BNB_BLOCK)
        index = torch.arange(first, last, device=flat.device) // BNB_BLOCK  # rows end within blocks
        ones = torch.ones(stop - start, 1, device=flat.device)
        return Numbers(values * scales[index].view_as(values), ones, None, columns)

    return read


def _bnb8(name: str, scheme: Bnb8Scheme, tensors: Tensors, cut: Cut) -> Reader:
    weight, scales = tensors[".weight"], tensors[".SCB"].unsqueeze(1) / 127
    if (form := tensors.get(".weight_format")) is not None and int(form):
        raise ConfigError(
            f"{name}.weight_format is not that of rows; save the checkpoint again with bitsandbytes 0.45"
        )
    return lambda start, stop: Numbers(weight[start:stop], scales[start:stop], None, weight.shape[1])


def _not_finite(name: str) -> ConfigError:
    return ConfigError(f"{name} has numbers that are not finite; download the checkpoint again")


_READERS: dict[type[Scheme], Callable[[str, Any, Tensors, Cut], Reader]] = {
    Fp8Scheme: _fp8,
    BlockFp8Scheme: _block_fp8,
    GptqScheme: _gptq,
    AwqScheme: _awq,
    PackedIntScheme: _packed_int,
    IntScheme: _int,
    Nvfp4Scheme: _nvfp4,
    Mxfp8Scheme: _mxfp8,
    Bnb4Scheme: _bnb4,
    Bnb8Scheme: _bnb8,
}
"""What makes a reader of a layer's tensors; the name is for messages."""
