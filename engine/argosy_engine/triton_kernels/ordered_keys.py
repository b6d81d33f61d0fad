"""Ordered keys: integers in the order of floats, so that searches and maxima over logits are exact.

A key is the float32's bits, as an int32 that compares as the floats do. A packed key is an int64 of a key and a token
id; the greatest one is that of the highest value, and among equal values that of the lowest id. Integers have one
maximum whatever the order in which a device compares them.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(1 << 63))
"""Below every packed key."""
LOWEST_KEY = tl.constexpr(-2139095040)
"""Key of the lowest finite float32."""


@triton.jit
def load_logits(row_ptr, ids, vocab_size):
    """Load logits as float32, minus infinity for NaN and beyond the vocabulary."""
    x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def order_key(x):
    """Return the int32 keys of float32 numbers. Both zeros have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_key(key):
    """Return the float32 numbers of int32 keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(x, ids):
    """Return the packed keys of float32 values and int32 token ids."""
    return (order_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def unpack(packed):
    """Return the values and token ids of packed keys."""
    ids = 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)
    return float_of_key((packed >> 32).to(tl.int32)), ids
