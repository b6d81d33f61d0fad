"""Makes Triton's interpreter multiply matrices of bfloat16, whose bits it takes for integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def multiply_bfloat16() -> None:
    """Replace the interpreter's matrix product, for this process."""
    original = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return original(self, _widened(a), _widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def _widened(operand: TensorHandle) -> TensorHandle:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
