"""A flag without a value gets the default of the device; a value wins on every device."""

from __future__ import annotations

from typing import Any

import pytest

from argosy_engine.config import (
    EngineArgs,
    async_scheduling,
    max_num_mixed_prefill_tokens,
    memory_utilization,
)


@pytest.mark.parametrize(
    ("device", "flags", "mixed_prefill", "utilization", "is_async"),
    [
        ("cpu", {"distributed_executor_backend": "uni"}, 256, 0.4, False),
        ("cpu", {"distributed_executor_backend": "mp"}, 256, 0.4, True),
        ("cpu", {"distributed_executor_backend": "ray"}, 256, 0.4, True),
        ("cuda:0", {"distributed_executor_backend": "uni"}, None, 0.9, True),
        (
            "cpu",
            {"max_num_mixed_prefill_tokens": 64, "gpu_memory_utilization": 0.5, "async_scheduling": True},
            64,
            0.5,
            True,
        ),
        (
            "cuda:0",
            {"max_num_mixed_prefill_tokens": 64, "gpu_memory_utilization": 0.5, "async_scheduling": False},
            64,
            0.5,
            False,
        ),
    ],
)
def test_a_value_wins_over_the_default_of_the_device(
    device: str, flags: dict[str, Any], mixed_prefill: int | None, utilization: float, is_async: bool
) -> None:
    args = EngineArgs.of(model="builtin://tiny", **flags)
    assert max_num_mixed_prefill_tokens(args, device) == mixed_prefill
    assert memory_utilization(args, device) == utilization
    assert async_scheduling(args, device) is is_async
