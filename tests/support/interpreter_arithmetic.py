"""Makes Triton's interpreter compute as GPUs do.

It truncates float32 to bfloat16, loses the carry when it rounds to FP8, reads FP8's NaN as 480, and adds and multiplies
numbers and matrices of bfloat16 by their bit patterns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def compute_like_a_gpu() -> None:
    """Replace the interpreter's conversions between floating-point dtypes, its arithmetic in bfloat16 and its `tl.dot`,
    for this process."""
    original = interpreter._convert_float
    original_binary = interpreter.InterpreterBuilder.binary_op
    original_dot = interpreter.InterpreterBuilder.create_dot

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source not in _DTYPES or target not in _DTYPES:
            return original(data, source, target, rounding)
        values = _widened(data, source)
        if target is tl.float8e4nv:
            values = values.clamp(-448.0, 448.0)  # a GPU saturates
        converted = values.to(_DTYPES[target])
        return converted.view(torch.uint8).numpy().view(_BITS[converted.itemsize]).reshape(data.shape)

    def dot(self: Any, a: Any, b: Any, accumulator: Any, precision: Any, max_num_imprecise: Any) -> Any:
        if a.dtype.scalar not in _DTYPES or b.dtype.scalar not in _DTYPES:
            return original_dot(self, a, b, accumulator, precision, max_num_imprecise)
        product = _widened(a.data, a.dtype.scalar).numpy() @ _widened(b.data, b.dtype.scalar).numpy()
        return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar is not tl.bfloat16 or operation not in (np.add, np.subtract, np.multiply):
            return original_binary(self, left, right, operation)
        values = operation(*(_widened(each.data, tl.bfloat16).numpy() for each in (left, right)))
        rounded = convert(values, tl.float32, tl.bfloat16, None)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.binary_op = binary
    interpreter.InterpreterBuilder.create_dot = dot


def _widened(data: np.ndarray, dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(data)).view(_DTYPES[dtype]).float()
