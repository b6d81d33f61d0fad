"""Kernels run in Triton's interpreter, on CPU tensors, which behaves like a GPU after some corrections."""

from importlib.util import find_spec

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import triton

    from interpreted_calls import patch_once_per_launch
    from interpreter_arithmetic import compute_like_a_gpu

    assert not isinstance(triton.language.sum, triton.JITFunction), (
        "triton was imported before tests/conftest.py"
    )
    compute_like_a_gpu()
    patch_once_per_launch()
