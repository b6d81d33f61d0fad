import subprocess
import sys

import pytest

from gpu_report.cases import ALL_CASES


@pytest.mark.parametrize("module", ALL_CASES)
def test_sampled_kernels_compile_for_every_known_device(module):
    # A process of its own: here kernels are interpreted.
    command = [sys.executable, "-m", "gpu_report", "--sample", "--module", module]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
