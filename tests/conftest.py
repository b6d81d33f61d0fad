"""What all tests share: Hypothesis without limits of time and HTTP clients with a generous one, because a machine that
also runs other tests misses shorter ones, and Triton's interpreter for the kernels.

Triton decides when it decorates a function, its own library's (`tl.sum`) included: the variable must be set when triton
is imported, which other libraries do. It is not left to subprocesses, where kernels are compiled. The interpreter
multiplies matrices by NumPy, whose threads would wait for one another longer than such small products take; their
number, too, is read once.
"""

from __future__ import annotations

import inspect
import os

from hypothesis import HealthCheck, settings

if "ARGOSY_TEST_GPU" not in os.environ:
    os.environ["TRITON_INTERPRET"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        import triton
    except ImportError:  # there is none for this platform; tests/gpu is left out
        pass
    else:
        triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"], os.environ["OPENBLAS_NUM_THREADS"]

settings.register_profile("argosy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("argosy")

# These give up connecting after 5 s where nobody says otherwise, and httpx reading, too. The objects are the defaults
# of all functions and clients.
try:
    import httpx

    default = inspect.signature(httpx.get).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = 60.0
    import anthropic
    import openai

    anthropic.DEFAULT_TIMEOUT.connect = openai.DEFAULT_TIMEOUT.connect = 60.0
except ImportError:  # a machine with what the GPU's tests need alone
    pass
