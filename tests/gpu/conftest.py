"""Kernels run in Triton's interpreter, on CPU tensors.

Triton decides when it decorates a function, its own library's (`tl.sum`) included: the variable must be set before the
first import of triton. It is not left to subprocesses, which compile kernels.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
import triton

from interpreted_dot import multiply_bfloat16
from interpreted_rounding import round_like_a_gpu

triton.knobs.runtime.interpret = True
del os.environ["TRITON_INTERPRET"]
assert not isinstance(triton.language.sum, triton.JITFunction), (
    "triton was imported before tests/gpu/conftest.py"
)
round_like_a_gpu()
multiply_bfloat16()
