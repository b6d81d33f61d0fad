"""Makes Triton's interpreter round as GPUs do.

It truncates float32 to bfloat16, loses the carry when it rounds to FP8, and reads FP8's NaN as 480.
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


def round_like_a_gpu() -> None:
    """Replace the interpreter's conversion between floating-point dtypes, for this process."""
    original = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source not in _DTYPES or target not in _DTYPES:
            return original(data, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(data)).view(_DTYPES[source]).float()
        if target is tl.float8e4nv:
            values = values.clamp(-448.0, 448.0)  # a GPU saturates
        converted = values.to(_DTYPES[target])
        return converted.view(torch.uint8).numpy().view(_BITS[converted.itemsize]).reshape(data.shape)

    interpreter._convert_float = convert
