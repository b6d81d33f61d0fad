"""The rules and panels about `argosy batch`: part of the router's dashboard and rules.

Owns: which of its series are shown, and the remedies. Must not know: how rules and panels are written.
"""

from __future__ import annotations

from monitoring.alerts import Alert
from monitoring.grafana import Panel, Row

_RATE = "[$__rate_interval]"
_ENDED = 'argosy_batch_requests_total{outcome=~"completed|failed"}'
_FAILED = 'argosy_batch_requests_total{outcome="failed"}'


def batch_alerts() -> list[Alert]:
    """The rules. Series have no label of a tenant, so each is about an installation."""
    return [
        Alert(
            "ArgosyBatchUnavailable",
            "max by (namespace) (argosy_router_batch_unavailable) == 1",
            "5m",
            "warning",
            "`argosy batch` does not answer the routers in {{ $labels.namespace }}: files, batches and stored "
            "responses are refused. Other requests are answered.",
            "Look at the Deployment argosy-batch, and at its log, which names what its storage answers.",
        ),
        Alert(
            "ArgosyBatchesStall",
            'max by (namespace) (min_over_time(argosy_batch_batches{status="in_progress"}[30m])) > 0 '
            f"unless on (namespace) sum by (namespace) (increase({_ENDED}[30m])) > 0",
            "5m",
            "warning",
            "Batches in {{ $labels.namespace }} run, and none of their requests has ended for half an hour.",
            "They wait for room that interactive requests leave free. `kubectl argosy why` says whether their models "
            "have replicas; add some, or raise --batch-share.",
        ),
        Alert(
            "ArgosyBatchRequestsFail",
            f"sum by (namespace) (rate({_FAILED}[15m])) / sum by (namespace) (rate({_ENDED}[15m])) > 0.2",
            "15m",
            "warning",
            "{{ $value | humanizePercentage }} of the requests of batches in {{ $labels.namespace }} fail.",
            "The error file of a batch has the answer to each. Those that replicas lose four times are counted too.",
        ),
        Alert(
            "ArgosyBatchTasksFail",
            "sum by (namespace, task) (increase(argosy_batch_task_restarts_total[15m])) > 2",
            "0m",
            "warning",
            "{{ $labels.task }} of `argosy batch` in {{ $labels.namespace }} keeps failing, and is begun anew.",
            "Its log has the reason with a traceback; usually it is the storage.",
        ),
        Alert(
            "ArgosyBatchObjectsQuarantined",
            "sum by (namespace) (increase(argosy_batch_quarantined_objects[15m])) > 0",
            "0m",
            "warning",
            "`argosy batch` in {{ $labels.namespace }} has put aside objects that it cannot read.",
            "Its log names them; they lie under quarantine/ in the storage. Something else writes there, or it lost "
            "data.",
        ),
    ]


def batch_rows() -> list[Row]:
    """The last rows of the router's dashboard."""
    return [
        Row(
            "Files and batches",
            (
                Panel(
                    "Batches",
                    "short",
                    [
                        ('sum by (status) (argosy_batch_batches{status!="elsewhere"})', "{{status}}"),
                        ('max(argosy_batch_batches{status="elsewhere"})', "of other processes, or none yet"),
                    ],
                ),
                Panel(
                    "Requests of batches",
                    "reqps",
                    [(f"sum by (outcome) (rate(argosy_batch_requests_total{_RATE}))", "{{outcome}}")],
                    is_stacked=True,
                ),
                Panel(
                    "Requests of batches in flight",
                    "short",
                    [
                        ("sum(argosy_batch_requests_inflight)", "sent by argosy batch"),
                        ("sum(argosy_router_batch_requests_inflight)", "at the routers"),
                    ],
                ),
                Panel("Stored", "bytes", [("max(argosy_batch_stored_bytes)", "files, batches, responses")]),
                Panel("Stored objects", "short", [("max(argosy_batch_stored_objects)", "objects")]),
                Panel(
                    "Failures",
                    "short",
                    [
                        ("max(argosy_router_batch_unavailable)", "does not answer routers"),
                        ("sum(argosy_batch_quarantined_objects)", "objects put aside"),
                        (
                            f"sum by (task) (rate(argosy_batch_task_restarts_total{_RATE}))",
                            "{{task}} begun anew per second",
                        ),
                    ],
                ),
            ),
        ),
    ]
