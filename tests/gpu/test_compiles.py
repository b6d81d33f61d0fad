"""The kernels compile for every known device, without spills and within its shared memory."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from compiled_samples import compile_samples
from gpu_report.cases import ALL_CASES


@pytest.fixture(scope="module")
def compiling_process():
    """One process for all modules: starting it takes longer than to compile most of them."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.parametrize("module", ALL_CASES)
def test_sampled_kernels_compile_for_every_known_device(module, compiling_process):
    status, printed = compiling_process.submit(compile_samples, module).result()
    assert status == 0, printed
    assert "launches compiled, 0 at fault" in printed
