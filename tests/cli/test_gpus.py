"""The GPUs of this machine, and their assignment to replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.local.child_process import choose_gpus, gpu_env, local_gpus


@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, (0, 2)), ({"CUDA_VISIBLE_DEVICES": "3,1"}, (3, 1)), ({"CUDA_VISIBLE_DEVICES": ""}, ())],
)
def test_gpus_of_this_machine(env: dict[str, str], expected: tuple[int, ...], tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert local_gpus(env, tmp_path) == expected


def test_a_gpu_belongs_to_one_replica() -> None:
    assert choose_gpus((0, 1, 2, 3), (1,), 2) == (0, 2)
    assert choose_gpus((0, 1), (1,), 2) is None
    assert gpu_env((0, 2)) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert gpu_env(()) == {"CUDA_VISIBLE_DEVICES": ""}
