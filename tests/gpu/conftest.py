"""Kernels run on CPU tensors, in Triton's interpreter, which here behaves like a GPU and checks addresses.

With ARGOSY_TEST_GPU set they are compiled and launched on this machine's GPU instead, on copies of the tensors.
"""

import os
from importlib.util import find_spec

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif "ARGOSY_TEST_GPU" in os.environ:
    from device_launches import launch_on_gpu

    # These need the interpreter, or fake CUDA tensors, and show nothing that a GPU adds to.
    collect_ignore = [
        f"test_{name}.py"
        for name in (
            "accounting", "compiled_launches", "compiled_lookup", "compiles", "cuda_graphs", "direct_launch",
            "flash_attn", "flash_attn_graphs", "interpreter_bounds", "kernel_sampler_engine", "launches_per_layer",
            "pipeline_graphs", "warm_up",
        )
    ]  # fmt: skip
    launch_on_gpu()
else:
    import triton

    from interpreted_calls import patch_once_per_launch
    from interpreted_values import reuse_types
    from interpreter_arithmetic import compute_like_a_gpu
    from interpreter_bounds import check_bounds

    assert not isinstance(triton.language.sum, triton.JITFunction), (
        "triton was imported before tests/conftest.py"
    )
    compute_like_a_gpu()
    patch_once_per_launch()
    reuse_types()
    check_bounds()
