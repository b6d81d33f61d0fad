"""What all tests share: Hypothesis without deadlines, because a machine that also runs other tests misses them, and
Triton's interpreter for the kernels.

Triton decides when it decorates a function, its own library's (`tl.sum`) included: the variable must be set when triton
is imported, which other libraries do. It is not left to subprocesses, where kernels are compiled.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"
try:
    import triton
except ImportError:  # there is none for this platform; tests/gpu is left out
    pass
else:
    triton.knobs.runtime.interpret = True
del os.environ["TRITON_INTERPRET"]

settings.register_profile("argosy", deadline=None)
settings.load_profile("argosy")
