"""LoadReport: the engine's load as a response header, for balancers that read Open Request Cost Aggregation (ORCA).

A request with `endpoint-load-metrics-format: TEXT` or `JSON` gets `endpoint-load-metrics` with its answer, with vLLM's
names of the figures. Streams have none, as in vLLM: their headers are sent before there is a load to report.
"""

from __future__ import annotations

import json

from argosy_engine.frontend.observer import Observer
from argosy_engine.messages.core_messages import EngineCoreOutputs

FORMAT_HEADER = "endpoint-load-metrics-format"
HEADER = "endpoint-load-metrics"


class LoadReport(Observer):
    """
    Args:
        num_ranks: number of engine cores.
    """

    def __init__(self, num_ranks: int) -> None:
        self._kv_usage = [0.0] * num_ranks
        self._num_waiting = [0] * num_ranks

    def on_core_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.stats is not None:
            self._kv_usage[outputs.engine_index] = outputs.stats.kv_cache_usage
            self._num_waiting[outputs.engine_index] = outputs.stats.num_waiting

    def headers(self, form: str | None) -> dict[str, str]:
        """Return the header in the form that a request asks for; none if it asks for no form that is known."""
        named = {
            "kv_cache_usage_perc": max(self._kv_usage),
            "num_requests_waiting": float(sum(self._num_waiting)),
        }
        match (form or "").upper():
            case "TEXT":
                return {
                    HEADER: "TEXT "
                    + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
                }
            case "JSON":
                return {HEADER: "JSON " + json.dumps({"named_metrics": named})}
            case _:
                return {}
