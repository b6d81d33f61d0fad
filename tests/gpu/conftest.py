"""Kernels run on CPU tensors, in Triton's interpreter, which here behaves like a GPU and checks addresses."""

from importlib.util import find_spec

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import triton

    from interpreted_calls import patch_once_per_launch
    from interpreter_arithmetic import compute_like_a_gpu
    from interpreter_bounds import check_bounds

    assert not isinstance(triton.language.sum, triton.JITFunction), (
        "triton was imported before tests/conftest.py"
    )
    compute_like_a_gpu()
    patch_once_per_launch()
    check_bounds()
