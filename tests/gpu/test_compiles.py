"""The kernels compile for every known device, without spills and within its shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_report.cases import ALL_CASES

GENERATORS = Path(__file__).parents[2] / "generators"


@pytest.mark.parametrize("module", ALL_CASES)
def test_sampled_kernels_compile_for_every_known_device(module):
    # A process of its own: here kernels are interpreted.
    done = subprocess.run(
        [sys.executable, "-m", "gpu_report", "--sample", "--module", module],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(GENERATORS), os.environ.get("PYTHONPATH", ""))),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
