"""A mixture of experts as grouped matrix products over tokens sorted by expert (arXiv 2211.15841).

Five launches: two to route (`moe_routing`), the experts' gate and up projections with the activation (without a gate,
up alone), their down projections, either of the two with the routing weight, and the sum over a token's experts. Grids
have the size of the worst case; programs past the last tile return at once. Weights in FP8 are widened to the
activations' dtype on their way to the tensor cores: small batches are bound by reading weights, which this halves, and
activations are not quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.activations import gelu_tanh, silu, squared_relu, swigluoai
from argosy_engine.triton_kernels.device_traits import DeviceTraits, device_traits
from argosy_engine.triton_kernels.launch import launch
from argosy_engine.triton_kernels.moe_routing import Routing, route

Activation = Literal["silu", "gelu", "swigluoai", "relu2"]
_GROUP = 8
"""Tiles that run over the same columns of the weights one after another, so that they find them in the L2 cache."""


@triton.jit
def _tile_and_column(num_tiles, columns, GROUP: tl.constexpr):
    """Return this program's tile and column; the tile may be num_tiles or above, where there is nothing to do."""
    program = tl.program_id(0)
    first = program // (GROUP * columns) * GROUP
    size = tl.minimum(tl.maximum(num_tiles - first, 1), GROUP)
    within = program % (GROUP * columns)
    column = within // size
    tile = first + within % size
    # A group that is not full has fewer programs to use: those past its columns have no tile.
    return tl.where(column < columns, tile, num_tiles), column


@triton.jit
def _gate_up_experts(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    routing_weights_ptr,
    pairs_ptr,
    tile_experts_ptr,
    tile_starts_ptr,
    tile_ends_ptr,
    num_tiles_ptr,
    x_stride,
    expert_stride,
    weight_stride,
    expert_scale_stride,
    scale_stride,
    hidden,
    inner,
    columns,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_tiles = tl.load(num_tiles_ptr)
    tile, column = _tile_and_column(num_tiles, columns, GROUP)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    row = tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = row < tl.load(tile_ends_ptr + tile)
    pair = tl.load(pairs_ptr + row, mask=is_row, other=0)
    token = (pair // K).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Columns past the end wrap around, so that loads need no mask for them; they are not stored.
    gate_row = n % inner
    x = x_ptr + token[:, None] * x_stride + k[None, :]
    gate_weight = weight_ptr + expert * expert_stride + gate_row[None, :] * weight_stride + k[:, None]
    if ACTIVATION == "relu2":  # there is no gate
        up_weight = gate_weight
    else:
        up_weight = gate_weight + inner * weight_stride
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, hidden, BLOCK_K):
        if IS_EVEN:
            a = tl.load(x + start, mask=is_row[:, None], other=0.0)
            if ACTIVATION != "relu2":
                gate_b = tl.load(gate_weight + start)
            up_b = tl.load(up_weight + start)
        else:
            in_row = start + k < hidden
            a = tl.load(x + start, mask=is_row[:, None] & in_row[None, :], other=0.0)
            if ACTIVATION != "relu2":
                gate_b = tl.load(gate_weight + start, mask=in_row[:, None], other=0.0)
            up_b = tl.load(up_weight + start, mask=in_row[:, None], other=0.0)
        if ACTIVATION != "relu2":
            gate = tl.dot(a, gate_b.to(a.dtype), gate, input_precision=PRECISION)
        up = tl.dot(a, up_b.to(a.dtype), up, input_precision=PRECISION)
    if scale_ptr is not None:
        scale = scale_ptr + expert * expert_scale_stride + gate_row * scale_stride
        if ACTIVATION != "relu2":
            gate *= tl.load(scale)[None, :]
            scale += inner * scale_stride
        up *= tl.load(scale)[None, :]
    if routing_weights_ptr is not None:
        routing_weight = tl.load(routing_weights_ptr + pair, mask=is_row, other=0.0)
        if ACTIVATION != "relu2":
            gate *= routing_weight[:, None]
        up *= routing_weight[:, None]
    if bias_ptr is not None:
        if ACTIVATION == "relu2":
            bias = bias_ptr + expert * inner + gate_row
        else:
            bias = bias_ptr + expert * 2 * inner + gate_row
            gate += tl.load(bias).to(tl.float32)[None, :]
            bias += inner
        up += tl.load(bias).to(tl.float32)[None, :]
    if ACTIVATION == "gelu":
        product = gelu_tanh(gate) * up
    elif ACTIVATION == "swigluoai":
        product = swigluoai(gate, up)
    elif ACTIVATION == "relu2":
        product = squared_relu(up)
    else:
        product = silu(gate) * up
    out = out_ptr + row.to(tl.int64)[:, None] * inner + n[None, :]
    tl.store(out, product.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (n < inner)[None, :])


@triton.jit
def _down_experts(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    routing_weights_ptr,
    pairs_ptr,
    tile_experts_ptr,
    tile_starts_ptr,
    tile_ends_ptr,
    num_tiles_ptr,
    expert_stride,
    weight_stride,
    expert_scale_stride,
    scale_stride,
    hidden,
    inner,
    columns,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_tiles = tl.load(num_tiles_ptr)
    tile, column = _tile_and_column(num_tiles, columns, GROUP)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    row = tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = row < tl.load(tile_ends_ptr + tile)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + row.to(tl.int64)[:, None] * inner + k[None, :]
    weight = weight_ptr + expert * expert_stride + (n % hidden)[None, :] * weight_stride + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        if IS_EVEN:
            a = tl.load(x + start, mask=is_row[:, None], other=0.0)
            b = tl.load(weight + start)
        else:
            in_row = start + k < inner
            a = tl.load(x + start, mask=is_row[:, None] & in_row[None, :], other=0.0)
            b = tl.load(weight + start, mask=in_row[:, None], other=0.0)
        total = tl.dot(a, b.to(a.dtype), total, input_precision=PRECISION)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + expert * expert_scale_stride + (n % hidden) * scale_stride)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + expert * hidden + n % hidden).to(tl.float32)[None, :]
    pair = tl.load(pairs_ptr + row, mask=is_row, other=0)
    if routing_weights_ptr is not None:
        total *= tl.load(routing_weights_ptr + pair, mask=is_row, other=0.0)[:, None]
    out = out_ptr + pair.to(tl.int64)[:, None] * hidden + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (n < hidden)[None, :])


@triton.jit
def _sum_experts(x_ptr, experts_ptr, out_ptr, out_stride, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in range(K):
        pair = token * K + rank
        # A pair without an expert was not computed: what is there may be anything.
        end = tl.where(tl.load(experts_ptr + pair) >= 0, hidden, 0)
        total += tl.load(x_ptr + pair * hidden + column, mask=column < end, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=column < hidden)


def fused_moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    experts_per_token: int,
    *,
    normalises: bool,
    scales_inputs: bool = False,
    activation: Activation = "silu",
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    first_expert: int = 0,
    out: torch.Tensor | None = None,
    **choice: Any,
) -> torch.Tensor:
    """Run each token through its k best experts and return the weighted sum, [T, hidden].

    Experts are gated MLPs or, with the activation `relu2`, have no gate.

    The weights may be those of consecutive experts only, of which a token may then have fewer than k, or none.

    Args:
        x: [T, hidden], float32, bfloat16 or float16; rows may be strided.
        logits: the router's, [T, number of all experts].
        w1: gate and up projections, [num_experts, 2 * inner, hidden], or up alone, [num_experts, inner, hidden]; x's
            dtype or float8_e4m3fn.
        w2: down projections, [num_experts, hidden, inner], w1's dtype.
        experts_per_token: k.
        normalises: whether to scale a token's k weights to sum to 1 (`norm_topk_prob`).
        scales_inputs: whether a token's weights are factors on what its experts get, instead of on what they give.
        activation: of the gates; `gelu` by its approximation with tanh, `swigluoai` that of gpt-oss (`activations`),
            `relu2` the square of a ReLU, without a gate.
        w1_scale: float32 factors of FP8 weights: [num_experts], or one for each of w1's rows.
        w2_scale: [num_experts] or [num_experts, hidden].
        w1_bias: one for each of w1's rows, contiguous; None: none.
        w2_bias: [num_experts, hidden], contiguous.
        slot_mapping: int64 [T]; rows with -1 are padding: no expert computes them and their output is 0.
        first_expert: index of the first expert of the weights.
        out: [T, hidden]; default: allocated with x's dtype.
        choice: further arguments of `moe_routing.route`, for other ways to choose experts.

    Raises:
        ValueError: the device has no FP8 for FP8 weights, or such weights have no scales, or other weights have them.
    """
    tokens, hidden = x.shape
    inner, k = w2.shape[2], experts_per_token
    traits = device_traits(x.device)
    is_fp8 = w1.dtype is torch.float8_e4m3fn
    if is_fp8 and not traits.has_fp8:
        raise ValueError("FP8 weights on a device without FP8: load a checkpoint in bfloat16")
    if is_fp8 != (w1_scale is not None) or is_fp8 != (w2_scale is not None):
        raise ValueError("w1_scale and w2_scale belong to FP8 weights, which need both")
    tile_rows = _tile_rows(tokens * k / logits.shape[1], x.dtype)
    held = range(first_expert, first_expert + len(w1))
    routing = route(
        logits, k, normalises=normalises, tile_rows=tile_rows, slot_mapping=slot_mapping, held=held, **choice
    )
    activated = torch.empty((tokens * k, inner), dtype=x.dtype, device=x.device)
    products = torch.empty((tokens * k, hidden), dtype=x.dtype, device=x.device)
    if out is None:
        out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    products_at_once = 1 if activation == "relu2" else 2
    tiling = _Tiling.choose(traits, x.dtype, w1.dtype, tile_rows, depth=hidden, products=products_at_once)
    columns = triton.cdiv(inner, tiling.block_n)
    launch(
        _gate_up_experts,
        (_programs(routing, columns),),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        x_ptr=x,
        weight_ptr=w1,
        scale_ptr=w1_scale,
        bias_ptr=w1_bias,
        out_ptr=activated,
        routing_weights_ptr=routing.weights if scales_inputs else None,
        **_tiles(routing),
        x_stride=x.stride(0),
        expert_stride=w1.stride(0),
        weight_stride=w1.stride(1),
        **_scale_strides(w1_scale),
        hidden=hidden,
        inner=inner,
        columns=columns,
        K=k,
        ACTIVATION=activation,
        **tiling.constants(hidden),
    )
    tiling = _Tiling.choose(traits, x.dtype, w2.dtype, tile_rows, depth=inner, products=1)
    columns = triton.cdiv(hidden, tiling.block_n)
    launch(
        _down_experts,
        (_programs(routing, columns),),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        x_ptr=activated,
        weight_ptr=w2,
        scale_ptr=w2_scale,
        bias_ptr=w2_bias,
        out_ptr=products,
        routing_weights_ptr=None if scales_inputs else routing.weights,
        **_tiles(routing),
        expert_stride=w2.stride(0),
        weight_stride=w2.stride(1),
        **_scale_strides(w2_scale),
        hidden=hidden,
        inner=inner,
        columns=columns,
        **tiling.constants(inner),
    )
    block = min(triton.next_power_of_2(hidden), 1024)
    launch(
        _sum_experts,
        (tokens, triton.cdiv(hidden, block)),
        num_warps=max(block // 256, 1),
        num_stages=1,
        x_ptr=products,
        experts_ptr=routing.experts,
        out_ptr=out,
        out_stride=out.stride(0),
        hidden=hidden,
        K=k,
        BLOCK=block,
    )
    return out


def _tile_rows(rows_per_expert: float, dtype: torch.dtype) -> int:
    """Choose the rows of a tile: about what an expert gets, because rows past its tokens are computed in vain."""
    # float32 does without tensor cores, where a large tile takes more registers than there are.
    most = 32 if dtype is torch.float32 else 128
    return int(min(max(triton.next_power_of_2(int(rows_per_expert)), 16), most))


@dataclass(frozen=True, slots=True)
class _Tiling:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    precision: str

    @classmethod
    def choose(
        cls,
        traits: DeviceTraits,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        tile_rows: int,
        *,
        depth: int,
        products: int,
    ) -> _Tiling:
        """Choose the shape of a program's matrix products.

        Few rows: narrow columns give more programs, and deep blocks keep more bytes of the weights in flight. Many
        rows: 128 x 128 results per program, the most that 8 warps hold in registers.
        """
        is_wide = dtype is torch.float32
        if is_wide:
            block_n, block_k = 32, 32
        elif tile_rows <= 32:
            block_n, block_k = 64 // products, 128
        else:
            block_n, block_k = 128 // products, 64
        if depth % block_k:
            block_k = next((size for size in (64, 32) if size < block_k and depth % size == 0), 32)
        weights = products * block_n * block_k
        stage = tile_rows * block_k * dtype.itemsize + weights * weight_dtype.itemsize
        widened = weights * dtype.itemsize if weight_dtype is not dtype else 0
        num_stages = min(max((traits.shared_memory - widened - 2048) // stage, 2), 4)
        return cls(
            block_m=tile_rows,
            block_n=block_n,
            block_k=block_k,
            # Weights that are widened pass through registers: more warps share them.
            num_warps=8 if tile_rows >= 128 or (widened and tile_rows == 32 and not is_wide) else 4,
            num_stages=2 if is_wide else num_stages,
            precision="ieee" if is_wide else "tf32",
        )

    def constants(self, depth: int) -> dict[str, object]:
        return {
            "IS_EVEN": depth % self.block_k == 0,
            "PRECISION": self.precision,
            "GROUP": _GROUP,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
        }


def _programs(routing: Routing, columns: int) -> int:
    """Count the programs: whole groups of tiles, see `_tile_and_column`."""
    return -(-len(routing.tile_experts) // _GROUP) * _GROUP * columns


def _tiles(routing: Routing) -> dict[str, torch.Tensor]:
    return {
        "pairs_ptr": routing.pairs,
        "tile_experts_ptr": routing.tile_experts,
        "tile_starts_ptr": routing.tile_starts,
        "tile_ends_ptr": routing.tile_ends,
        "num_tiles_ptr": routing.num_tiles,
    }


def _scale_strides(scale: torch.Tensor | None) -> dict[str, int]:
    if scale is None:
        return {"expert_scale_stride": 0, "scale_stride": 0}
    per_channel = scale.dim() == 2 and scale.shape[1] > 1
    return {"expert_scale_stride": scale.stride(0), "scale_stride": scale.stride(1) if per_channel else 0}
