"""What all tests share: Hypothesis without limits of time and HTTP clients with a generous one, because a machine that
also runs other tests misses shorter ones, HTTP clients that are made quickly, and Triton's interpreter for the kernels.

Triton decides when it decorates a function, its own library's (`tl.sum`) included: the variable must be set when triton
is imported, which other libraries do. It is not left to subprocesses, where kernels are compiled.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import ssl
from pathlib import Path

from hypothesis import HealthCheck, settings

if "ARGOSY_TEST_GPU" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError:  # there is none for this platform; tests/gpu is left out
        pass
    else:
        triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]

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

    # Each would read the certificates of all public authorities, which takes 35 ms. No test talks to their hosts.
    context = ssl.create_default_context(cafile=Path(__file__).parent / "support" / "public_authority.pem")
    for name in filter(importlib.util.find_spec, ("httpx", "httpx2")):  # of which the SDKs use one
        library = importlib.import_module(name)
        functions = [library.Client.__init__, library.AsyncClient.__init__, library.request, library.stream]
        functions += [library.get, library.post, library.put, library.patch, library.delete, library.head]
        for function in functions:
            inspect.unwrap(function).__kwdefaults__["verify"] = context
        for function in (library.HTTPTransport.__init__, library.AsyncHTTPTransport.__init__):
            assert list(inspect.signature(function).parameters)[1] == "verify"
            function.__defaults__ = (context, *function.__defaults__[1:])
except ImportError:  # a machine with what the GPU's tests need alone
    pass
