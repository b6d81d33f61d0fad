"""Kernels run in Triton's interpreter, on CPU tensors: set before any of them is decorated."""

import triton

triton.knobs.runtime.interpret = True
