"""ctypes bindings of the kernel library, and the allocation of what it reads for long: weights, KV cache, scratch
space. src/*.cc and the headers document its functions and structures.

`kernels()` is the only entry point. If the library is unavailable, it logs one line and returns None.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.native.build import (
    ENVIRONMENT_VARIABLE,
    NativeUnavailable,
    Variant,
    library_path,
    own_variants,
)
from argosy_engine.native.kernel_choice import ROWS

log = logging.getLogger(__name__)


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class AttentionLayerStruct(Structure):
    """`Layer` of step.h: an attention layer's constants and its KV cache."""

    _fields_ = (
        *_fields(c_void_p, "k_cache v_cache q_norm k_norm cosines sines sinks alibi_slopes"),
        *_fields(c_int32, "num_blocks block_size num_heads num_kv_heads head_dim rotary_dim window chunk"),
        *_fields(c_float, "scale softcap eps"),
    )


class StepStruct(Structure):
    """`Step` of step.h: the flattened batch of one step."""

    _fields_ = (
        *_fields(c_void_p, "positions slots query_starts seq_lens block_tables key_ends"),
        ("table_stride", c_int64),
        *_fields(c_int32, "num_tokens num_requests"),
    )


class LinearStruct(Structure):
    """`Linear` of linear.h."""

    _fields_ = (
        *_fields(c_void_p, "packed bias scales offsets order"),
        *_fields(c_int32, "out units bits group"),
    )


class DecoderLayerStruct(Structure):
    """`DecoderLayer` of decoder.h."""

    _fields_ = (
        *_fields(c_void_p, "input_norm post_norm"),
        ("attention", POINTER(AttentionLayerStruct)),
        *_fields(LinearStruct, "qkv output gate_up down"),
    )


class SamplingRowsStruct(Structure):
    """`SamplingRows` of sampling.h: parallel arrays, one entry per row."""

    _fields_ = (*_fields(c_void_p, "temperature top_p top_k min_p uniform"),)


class DeltaShapeStruct(Structure):
    """`DeltaShape` of delta.h."""

    _fields_ = _fields(c_int32, "requests tokens key_heads value_heads key_dim value_dim")


class DeltaNetStruct(Structure):
    """`DeltaNet` of delta.h: a Gated DeltaNet layer's constants and states."""

    _fields_ = (
        *_fields(c_void_p, "conv rates dt_bias norm conv_states states"),
        *_fields(c_int32, "num_states block_size key_heads value_heads key_dim value_dim kernel"),
        ("eps", c_float),
    )


class MambaStruct(Structure):
    """`Mamba` of mamba.h: a Mamba-2 layer's constants and states."""

    _fields_ = (
        *_fields(c_void_p, "conv conv_bias rates dt_bias skip norm conv_states states"),
        *_fields(
            c_int32, "num_states block_size heads head_dim groups state_size kernel norm_order norm_ranks"
        ),
        ("eps", c_float),
    )


class ShortConvStruct(Structure):
    """`ShortConv` of short_conv.h: the constants and states of one of LFM2's short convolutions."""

    _fields_ = (
        *_fields(c_void_p, "conv bias states"),
        *_fields(c_int32, "num_states block_size channels kernel"),
    )


MAX_DELTA_KEYS = 512
"""`kDeltaMaxKeys` of delta.h."""

_SIGNATURES: dict[str, tuple[type, ...]] = {
    "set_threads": (c_int,),
    "pack_linear": (c_void_p, c_void_p, c_int, c_int, c_int),
    "pack_quantized": (c_void_p, c_void_p, c_int, c_int, c_int, c_int),
    "linear": (c_int, c_int, POINTER(LinearStruct), c_void_p, c_void_p, c_int),
    "gated_linear": (c_int, POINTER(LinearStruct), c_void_p, c_void_p, c_int),
    "squared_relu_linear": (c_int, POINTER(LinearStruct), c_void_p, c_void_p, c_int),
    "rotate_and_write": (c_int, POINTER(AttentionLayerStruct), POINTER(StepStruct), c_void_p),
    "attention": (c_int, POINTER(AttentionLayerStruct), POINTER(StepStruct), c_void_p, c_int64, c_void_p),
    "rms_norm": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_float),
    "argmax": (c_int, c_void_p, c_void_p, c_int, c_int),
    "gated_delta_rule": (POINTER(DeltaShapeStruct), *(c_void_p,) * 7),
    "delta_scratch": (POINTER(DeltaNetStruct),),
    "gated_delta_net": (c_int, POINTER(DeltaNetStruct), POINTER(StepStruct), *(c_void_p,) * 4),
    "mamba_scratch": (POINTER(MambaStruct),),
    "mamba": (c_int, POINTER(MambaStruct), POINTER(StepStruct), *(c_void_p,) * 3),
    "mamba_before_norm": (c_int, POINTER(MambaStruct), POINTER(StepStruct), *(c_void_p,) * 4),
    "mamba_norm": (c_int, POINTER(MambaStruct), c_int, *(c_void_p,) * 4),
    "short_conv": (c_int, POINTER(ShortConvStruct), POINTER(StepStruct), *(c_void_p,) * 3),
    "sample": (c_int, c_void_p, POINTER(SamplingRowsStruct), c_void_p, c_int, c_int),
    "decoder_scratch": (POINTER(DecoderLayerStruct), c_int, c_int),
    "decoder": (
        c_int,
        POINTER(DecoderLayerStruct),
        c_int,
        POINTER(POINTER(StepStruct)),
        c_void_p,
        c_void_p,
        c_int,
        c_float,
    ),
}

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Element types that the kernels support, and their numbers in C."""


class NoTiles(NativeUnavailable):
    """AMX cannot be used; the message says why."""


_WRONG, _DEPENDS_ON_ROWS, _ROUNDING, _REFUSED = 1, 2, 4, 8
"""`amx::Finding`."""


def check_tiles(found: int) -> bool:
    """Return whether a library's tiles round otherwise than the manual says, by what their test has found; -1: it uses
    none.

    Raises:
        NoTiles: they cannot be used.
    """
    if found < 0:
        return False
    if found & _REFUSED:
        raise NoTiles("the system does not let this process use AMX")
    if found & (_WRONG | _DEPENDS_ON_ROWS):
        raise NoTiles("AMX computes wrongly on this CPU")
    return bool(found & _ROUNDING)


class QuantizedWeight(NamedTuple):
    """A weight [out, in] of small integers, each of which stands for scale * integer + offset."""

    bits: int
    """8, or 4: integers from -8 to 7."""
    integers: torch.Tensor
    """int8 [out, in]"""
    scales: torch.Tensor
    """float32 [out, groups], of equal numbers of adjacent inputs"""
    offsets: torch.Tensor | None = None
    """As scales; minus scale times zero point. None: there are no zero points."""
    order: torch.Tensor | None = None
    """int32 [in]: which input each column multiplies. None: its own."""

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.integers.shape[1] // self.scales.shape[1]

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [out, in], of which column k multiplies input k."""
        numbers = self.integers.unflatten(1, (-1, self.group)) * self.scales.unsqueeze(2)
        if self.offsets is not None:
            numbers += self.offsets.unsqueeze(2)
        weight = numbers.flatten(1).to(dtype)
        if self.order is None:
            return weight
        widened = torch.empty_like(weight)
        widened[:, self.order.long()] = weight
        return widened


def can_pack(weight: QuantizedWeight) -> bool:
    """Whether the kernels multiply by it: no unit or word is of two groups."""
    return weight.group % 8 == 0


class PackedLinear:
    """A weight and an optional bias in the kernels' layout (linear.h, quantized_linear.h)."""

    def __init__(self, struct: LinearStruct, *kept_alive: torch.Tensor | None) -> None:
        self.struct, self._kept_alive = struct, kept_alive

    @property
    def out_features(self) -> int:
        return int(self.struct.out)


class Kernels:
    """Kernels for contiguous CPU tensors of the dtypes in DTYPES. Callers must pass valid shapes; nothing is checked.

    Calls release the GIL and share one pool of `set_threads` threads.

    Args:
        path: of the library.
        threads: None: as many as torch has.

    Raises:
        NoTiles: this system or CPU has no working AMX, and the library uses it.
    """

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self._library = ctypes.CDLL(str(path))
        rounds_otherwise = check_tiles(self._library.argosy_test_tiles())
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, f"argosy_{name}")
            function.argtypes, function.restype = arguments, None
        self._library.argosy_decoder_scratch.restype = c_int64
        self._library.argosy_delta_scratch.restype = c_int64
        self._library.argosy_mamba_scratch.restype = c_int64
        self.lanes: int = self._library.argosy_lanes()
        """Elements of a vector register. Head sizes, block sizes and widths must be multiples of it."""
        self.path = path
        self.variant = path.name.partition("-")[0] + (" of other rounding" if rounds_otherwise else "")
        """Name of the instruction set, which decides how sums of bfloat16 are rounded."""
        self.set_threads(torch.get_num_threads() if threads is None else threads)

    def set_threads(self, threads: int) -> None:
        self._library.argosy_set_threads(threads)

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_gated: bool = False
    ) -> PackedLinear:
        """Copy a weight into the kernels' layout.

        Args:
            weight: [out, in], with rows of a multiple of four bytes.
            is_gated: whether the first half of the outputs gates the second; each half must be a multiple of `lanes`.
        """
        out, units = weight.shape[0], weight.shape[1] * weight.itemsize // 4
        panel = 2 * self.lanes
        weight = weight.contiguous()
        packed = _weights.allocate((-(-out // panel), units, panel), torch.int32)
        self._library.argosy_pack_linear(weight.data_ptr(), packed.data_ptr(), out, units, is_gated)
        bias = self._laid_out(bias, is_gated=is_gated)
        struct = LinearStruct(packed.data_ptr(), _address(bias), out=out, units=units)
        return PackedLinear(struct, packed, bias)

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> PackedLinear:
        """Copy a quantised weight into the kernels' layout.

        Args:
            weight: `can_pack` holds of it.
            dtype: of the activations and the bias.
            is_gated: see `pack_linear`.
        """
        out, inputs = weight.integers.shape
        panels = -(-out // (4 * self.lanes)) * 2
        integers = weight.integers.contiguous()
        packed = _weights.allocate((panels, inputs * 2 * self.lanes * weight.bits // 8), torch.uint8)
        self._library.argosy_pack_quantized(
            integers.data_ptr(), packed.data_ptr(), out, inputs, weight.bits, is_gated
        )

        def laid_out(numbers: torch.Tensor | None) -> torch.Tensor | None:
            if numbers is None:
                return None
            numbers = numbers.contiguous()
            arranged = _weights.allocate((panels, numbers.shape[1], 2 * self.lanes), torch.float32)
            self._library.argosy_pack_linear(
                numbers.data_ptr(), arranged.data_ptr(), *numbers.shape, is_gated
            )
            return arranged

        scales, offsets = laid_out(weight.scales), laid_out(weight.offsets)
        bias = self._laid_out(bias, is_gated=is_gated)
        order = None if weight.order is None else weight.order.contiguous()
        kept = packed, bias, scales, offsets, order
        units = inputs * dtype.itemsize // 4
        return PackedLinear(LinearStruct(*map(_address, kept), out, units, weight.bits, weight.group), *kept)

    def _laid_out(self, bias: torch.Tensor | None, *, is_gated: bool) -> torch.Tensor | None:
        if is_gated and bias is not None:
            bias = bias.view(2, -1, self.lanes).transpose(0, 1).reshape(-1)
        return None if bias is None else bias.contiguous()

    def linear(self, x: torch.Tensor, packed: PackedLinear, out_dtype: torch.dtype) -> torch.Tensor:
        """Compute x W^T + b, [T, out], for x [T, in]. `out_dtype` is x's dtype or float32."""
        y = torch.empty((x.shape[0], packed.out_features), dtype=out_dtype)
        self._library.argosy_linear(
            DTYPES[x.dtype], DTYPES[out_dtype], packed.struct, x.data_ptr(), y.data_ptr(), x.shape[0]
        )
        return y

    def gated_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """Compute silu(gate) * up, [T, out / 2], for x [T, in], where [gate, up] = x W^T + b."""
        y = torch.empty((x.shape[0], packed.out_features // 2), dtype=x.dtype)
        self._library.argosy_gated_linear(
            DTYPES[x.dtype], packed.struct, x.data_ptr(), y.data_ptr(), x.shape[0]
        )
        return y

    def squared_relu_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """Compute relu(x W^T + b) ** 2, [T, out], for x [T, in]."""
        y = torch.empty((x.shape[0], packed.out_features), dtype=x.dtype)
        self._library.argosy_squared_relu_linear(
            DTYPES[x.dtype], packed.struct, x.data_ptr(), y.data_ptr(), x.shape[0]
        )
        return y

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the RMSNorm of x [T, width]. With a residual, add x to it in place and return the norm of the sum."""
        out = torch.empty_like(x)
        self._library.argosy_rms_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            eps,
        )
        return out

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """Return the index of each row's highest value, int64 [T] for x [T, width]; ties go to the lowest index."""
        out = torch.empty(x.shape[0], dtype=torch.int64)
        self._library.argosy_argmax(DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1])
        return out

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the gated delta rule, float32 [N, T, value_heads, value_dim] (arXiv 2412.06464).

        Args:
            q: float32 [N, T, key_heads, key_dim], scaled; of k the same shape. key_dim is at most MAX_DELTA_KEYS.
            v: float32 [N, T, value_heads, value_dim]; value_dim is a multiple of `lanes`.
            g: float32 [N, T, value_heads], logarithm of the decay; of beta the same shape.
            state: float32 [N, value_heads, key_dim, value_dim], which is changed.
        """
        shape = DeltaShapeStruct(*q.shape[:3], *v.shape[2:3], q.shape[3], v.shape[3])
        out = torch.empty_like(v)
        arrays = (q, k, v, g.exp(), beta, state, out)
        self._library.argosy_gated_delta_rule(shape, *(each.data_ptr() for each in arrays))
        return out

    def gated_delta_net(
        self, layer: DeltaNetStruct, step: StepStruct, qkvz: torch.Tensor, ba: torch.Tensor
    ) -> torch.Tensor:
        """Compute a Gated DeltaNet between its projections, [T, value_heads * value_dim], and the states of a step's
        requests in place. Arguments: `layers.delta_net.DeltaNet`.

        Args:
            qkvz: [T, channels + value_heads * value_dim], contiguous; all sizes of heads are multiples of `lanes`.
            ba: [T, 2 * value_heads], contiguous.
        """
        out = torch.empty((qkvz.shape[0], layer.value_heads * layer.value_dim), dtype=qkvz.dtype)
        scratch = torch.empty(qkvz.shape[0] * self._library.argosy_delta_scratch(layer))
        arrays = (qkvz, ba, out, scratch)
        self._library.argosy_gated_delta_net(
            DTYPES[qkvz.dtype], layer, step, *(each.data_ptr() for each in arrays)
        )
        return out

    def mamba(self, layer: MambaStruct, step: StepStruct, zxbcdt: torch.Tensor) -> torch.Tensor:
        """Compute a Mamba-2 layer between its projections, [T, heads * head_dim], and the states of a step's requests
        in place.

        Args:
            zxbcdt: `layers.mamba.Mamba`, contiguous; head_dim and state_size are multiples of `lanes`.
        """
        out = torch.empty((zxbcdt.shape[0], layer.heads * layer.head_dim), dtype=zxbcdt.dtype)
        scratch = torch.empty(zxbcdt.shape[0] * self._library.argosy_mamba_scratch(layer))
        arrays = (zxbcdt, out, scratch)
        self._library.argosy_mamba(DTYPES[zxbcdt.dtype], layer, step, *(each.data_ptr() for each in arrays))
        return out

    def mamba_before_norm(
        self, layer: MambaStruct, step: StepStruct, zxbcdt: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a Mamba-2 layer up to gate and norm, in place its states: what `mamba_norm` gets, float32
        [T, heads * head_dim], and this rank's share of the mean squares, float32 [T].

        Args:
            zxbcdt: as for `mamba`. The layer has one group, which `norm_ranks` ranks share.
        """
        y = torch.empty((zxbcdt.shape[0], layer.heads * layer.head_dim))
        squares = torch.empty(zxbcdt.shape[0])
        scratch = torch.empty(zxbcdt.shape[0] * (self._library.argosy_mamba_scratch(layer) - y.shape[1]))
        arrays = (zxbcdt, y, squares, scratch)
        self._library.argosy_mamba_before_norm(
            DTYPES[zxbcdt.dtype], layer, step, *(each.data_ptr() for each in arrays)
        )
        return y, squares

    def mamba_norm(
        self, layer: MambaStruct, zxbcdt: torch.Tensor, y: torch.Tensor, means: torch.Tensor
    ) -> torch.Tensor:
        """Apply gate and norm, [T, heads * head_dim] in zxbcdt's dtype.

        Args:
            zxbcdt, y: of `mamba_before_norm`.
            means: mean squares of the whole group, contiguous float32 [T].
        """
        out = torch.empty(y.shape, dtype=zxbcdt.dtype)
        arrays = (zxbcdt, y, means, out)
        self._library.argosy_mamba_norm(
            DTYPES[zxbcdt.dtype], layer, len(y), *(each.data_ptr() for each in arrays)
        )
        return out

    def short_conv(self, layer: ShortConvStruct, step: StepStruct, bcx: torch.Tensor) -> torch.Tensor:
        """Compute a short convolution between its projections, [T, channels], and the states of a step's requests in
        place.

        Args:
            bcx: [T, 3 * channels], contiguous; channels is a multiple of `lanes`.
        """
        out, scratch = (torch.empty((bcx.shape[0], layer.channels), dtype=bcx.dtype) for _ in range(2))
        arrays = (bcx, out, scratch)
        self._library.argosy_short_conv(DTYPES[bcx.dtype], layer, step, *(each.data_ptr() for each in arrays))
        return out

    def sample(
        self,
        logits: torch.Tensor,
        temperature: NDArray[np.float32],
        top_p: NDArray[np.float32],
        top_k: NDArray[np.int64],
        min_p: NDArray[np.float32],
        uniform: NDArray[np.float64],
    ) -> torch.Tensor:
        """Sample one token per row of logits [R, vocab_size]; returns int64 [R].

        The arrays are contiguous, [R]. Temperature 0 means greedy; top_p 1, top_k 0 and min_p 0 are off.
        """
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        arrays = temperature, top_p, top_k, min_p, uniform
        rows = SamplingRowsStruct(*(array.ctypes.data for array in arrays))
        self._library.argosy_sample(
            DTYPES[logits.dtype], logits.data_ptr(), rows, out.data_ptr(), *logits.shape
        )
        return out

    def rotate_and_write(self, layer: AttentionLayerStruct, step: StepStruct, qkv: torch.Tensor) -> None:
        """Normalise and rotate q and k of qkv [T, (heads + 2 kv_heads) * head_dim] and write k and v to the cache.

        q is changed in place.
        """
        self._library.argosy_rotate_and_write(DTYPES[qkv.dtype], layer, step, qkv.data_ptr())

    def attention(self, layer: AttentionLayerStruct, step: StepStruct, qkv: torch.Tensor) -> torch.Tensor:
        """Compute causal attention of the q heads in qkv over the cache, [T, heads * head_dim]."""
        out = torch.empty((qkv.shape[0], layer.num_heads * layer.head_dim), dtype=qkv.dtype)
        self._library.argosy_attention(
            DTYPES[qkv.dtype], layer, step, qkv.data_ptr(), qkv.shape[1], out.data_ptr()
        )
        return out

    def decoder_scratch(self, layer: DecoderLayerStruct, num_tokens: int, hidden_size: int) -> int:
        """Return the number of scratch elements that `decoder` needs."""
        return int(self._library.argosy_decoder_scratch(layer, num_tokens, hidden_size))

    def decoder(
        self,
        layers: Array[DecoderLayerStruct],
        steps: Array[Any],
        x: torch.Tensor,
        scratch: torch.Tensor,
        eps: float,
    ) -> None:
        """Run all layers on embeddings x [T, hidden_size], in place; x becomes the hidden states before the final norm.

        Args:
            steps: pointers to each layer's Step.
            scratch: at least `decoder_scratch` elements of x's dtype.
        """
        self._library.argosy_decoder(
            DTYPES[x.dtype], layers, len(layers), steps, x.data_ptr(), scratch.data_ptr(), x.shape[1], eps
        )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed tensor in a memory mapping of its own, whose pages are committed when they are first written.

    The mapping is private and anonymous, because only then may the kernel back it with huge pages. Weights and the KV
    cache are read noticeably faster from these: hardware prefetchers stop at every boundary of a 4 KiB page.
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class _Arena:
    """Memory for tensors that live as long as a model. Small ones share a mapping, because the kernel backs only whole,
    aligned 2 MiB of one with huge pages. A mapping ends with the last of its tensors."""

    _MAPPING = 64 << 20
    _ALIGNMENT = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: torch.Tensor | None = None

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed tensor."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if num_bytes > self._MAPPING // 4:
            return allocate(shape, dtype)
        size = -(-num_bytes // self._ALIGNMENT) * self._ALIGNMENT
        with self._lock:
            if self._free is None or len(self._free) < size:
                self._free = allocate((self._MAPPING,), torch.uint8)
            taken, self._free = self._free[:num_bytes], self._free[size:]
        return taken.view(dtype).view(*shape)


_weights = _Arena()


@functools.cache
def kernels() -> Kernels | None:
    """Return the kernels for this CPU, or None. Builds the library if it is neither prebuilt nor cached."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "1")
    if wanted == "0":
        log.info("CPU kernels are off (%s=0): computing with torch", ENVIRONMENT_VARIABLE)
        return None
    try:
        loaded = _first_usable(is_debug=wanted == "debug")
    except (NativeUnavailable, OSError) as error:
        log.warning("no CPU kernels, computing with torch at a fraction of the speed: %s", error)
        return None
    log.info("CPU kernels: %s", loaded.path.name)
    return loaded


def _first_usable(*, is_debug: bool) -> Kernels:
    variant, *_ = own_variants(_measure)
    if variant.has_tiles:
        try:
            return Kernels(library_path(variant, is_debug=is_debug))
        except NoTiles as error:
            log.warning("the CPU kernels do without AMX, several times slower with long prompts: %s", error)
        variant, *_ = own_variants(_measure, has_tiles=False)
    return Kernels(library_path(variant, is_debug=is_debug))


def _measure(variants: Sequence[Variant]) -> dict[str, list[float]]:
    """Time products of bfloat16 for `kernel_choice`: in turn, CPU seconds of one thread, the least of each. Takes about
    20 ms, apart from building what is not built."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(rows, 1024, generator=generator).bfloat16()

    loaded = {each.name: Kernels(library_path(each), threads=1) for each in variants}
    packed = {name: each.pack_linear(draw(1024)) for name, each in loaded.items()}
    found: dict[str, list[float]] = {name: [] for name in loaded}
    for rows in ROWS:
        x, least = draw(rows), dict.fromkeys(loaded, math.inf)
        for _ in range(6):
            for name, each in loaded.items():
                before = time.thread_time()
                each.linear(x, packed[name], torch.bfloat16)
                least[name] = min(least[name], time.thread_time() - before)
        for name, seconds in least.items():
            found[name].append(seconds)
    return found


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels if they compute on this device and in this dtype, and this machine has them."""
    return kernels() if device.type == "cpu" and dtype in DTYPES else None
