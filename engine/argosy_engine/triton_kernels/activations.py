"""Activations of MLPs, gated (arXiv 2002.05202) or squared ReLUs (2109.08668), for use inside kernels. In float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def gelu_tanh(x):
    # x * (1 + tanh(y)) / 2 is x * sigmoid(2 y): exact where tanh is close to -1, and needs no libdevice.
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def squared_relu(x):
    kept = tl.where(x < 0.0, 0.0, x)  # NaN is kept
    return kept * kept


@triton.jit
def swigluoai(gate, up):
    """Return gpt-oss' (up + 1) * gate * sigmoid(1.702 gate), of gates of at most 7 and ups within 7."""
    gate = tl.minimum(gate, 7.0)
    up = tl.minimum(tl.maximum(up, -7.0), 7.0)
    return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
