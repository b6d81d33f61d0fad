"""Checks that all workers have loaded parts of the same model."""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.errors import ConfigError
from argosy_engine.messages.worker_info import WorkerInfo


def check_same_model(infos: Sequence[WorkerInfo]) -> None:
    """Check what the workers report, by rank.

    Raises:
        ConfigError: one has loaded another model than worker 0.
    """
    for rank, info in enumerate(infos):
        for field in ("config", "dtype", "model_fingerprint"):
            if getattr(info, field) != getattr(infos[0], field):
                raise ConfigError(
                    f"worker {rank} has loaded another model than worker 0, since their {field} differs; start again "
                    "once the checkpoint no longer changes, and let --worker-cls load the same on every rank"
                )
