"""Counts preemptions through the statistics that every step reports."""

from __future__ import annotations

from argosy_engine.core.proc.core_client import SyncClient
from argosy_engine.messages import EngineCoreOutputs


class PreemptionCounter:
    """Adds up the preemptions of a client's steps from its construction on."""

    def __init__(self, client: SyncClient) -> None:
        self.total = 0
        self._step = client.step
        client.step = self._counted_step  # type: ignore[method-assign]

    def _counted_step(self) -> EngineCoreOutputs:
        outputs = self._step()
        if outputs.stats is not None:
            self.total += outputs.stats.num_preemptions
        return outputs
