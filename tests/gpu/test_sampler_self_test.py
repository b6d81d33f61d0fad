"""The start-up test of the sampling kernels: right ones pass, wrong or failing ones are told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from argosy_engine.sample import kernel_sampler
from argosy_engine.sample.sampler import SamplerOptions, self_test

OPTIONS = SamplerOptions(vocab_size=300)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_work_pass(dtype: torch.dtype) -> None:
    assert self_test(OPTIONS, dtype, CPU) is None


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits"])
def test_every_mode_of_log_probabilities_passes(mode: Any) -> None:
    assert self_test(OPTIONS._replace(logprobs_mode=mode), torch.float32, CPU) is None


@pytest.mark.parametrize("name", ["process_logits", "sample_tokens", "top_logprobs"])
def test_kernels_that_compute_nothing_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(kernel_sampler, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        for tensor in result if isinstance(result, tuple) else (result,):
            tensor.zero_()
        return result

    monkeypatch.setattr(kernel_sampler, name, wrong)
    assert "draws" in str(fault := self_test(OPTIONS, torch.float32, CPU)) or "are wrong" in str(fault)


def test_a_kernel_that_does_not_compile_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("ptxas is missing")

    monkeypatch.setattr(kernel_sampler, "sample_tokens", fail)
    assert self_test(OPTIONS, torch.float32, CPU) == "it failed with RuntimeError: ptxas is missing"
