"""The rules and the dashboard about the operator, and the engines that it keeps.

Owns: which series of operator and engines are shown, and the remedies. Must not know: how rules and panels are written.
Engines have vLLM's names, so the panels show vLLM's engines as well.
"""

from __future__ import annotations

from monitoring.alerts import SERVICE, Alert, as_service
from monitoring.grafana import Panel, Row

_CHOSEN = '{model_name=~"$model"}'
_RATE = "[$__rate_interval]"
_PODS = "pod, engine"
_INTENDED = "Canary(Starting|Analyzing|Held|Promoting)|Paused|Untried"
"""Reasons for which a service is not Ready as somebody wants it so."""
MODELS = "label_values(vllm:num_requests_running, model_name)"
"""Values of the dashboard's variable `model`."""


def operator_alerts() -> list[Alert]:
    """The rules. An operator that waits for the lease reports what it has seen as well, hence the maxima."""
    return [
        Alert(
            "ArgosyNoOperator",
            "sum by (namespace) (argosy_operator_leading) == 0 or absent(argosy_operator_leading)",
            "5m",
            "critical",
            "No operator works: new pods do not become ready, and changes and scaling wait. Requests are served.",
            "Look at the Deployment and the Lease argosy-operator, and at the log of its pods.",
        ),
        Alert(
            "ArgosyNamespaceUnreadable",
            "max by (namespace, watched_namespace) (argosy_operator_unreadable_namespaces) > 0",
            "5m",
            "warning",
            "The operator in {{ $labels.namespace }} cannot read namespace {{ $labels.watched_namespace }}: its "
            "services are served as they were, and changes, new pods and scaling wait.",
            "The operator's log, and `kubectl describe lease argosy-operator` in its namespace, say why. Restore the "
            "RoleBinding argosy-operator-... there (helm upgrade does), or take the namespace out of watchNamespaces.",
        ),
        Alert(
            "ArgosyServicesNotReady",
            as_service(
                f'max by ({SERVICE}) (argosy_operator_service_not_ready{{reason!~"{_INTENDED}"}}) > 0'
            ),
            "30m",
            "warning",
            "{{ $labels.namespace }}/{{ $labels.name }} has not been Ready for half an hour.",
            "`kubectl argosy why NAME -n NAMESPACE` names the reason and what to do. Canaries that go on or are held, "
            "services that are paused, and edits at zero replicas are left out.",
        ),
        Alert(
            "ArgosyReconcilesFail",
            'sum by (namespace) (rate(argosy_operator_reconcile_seconds_count{outcome!="ok"}[10m])) > 0',
            "30m",
            "warning",
            "The operator in {{ $labels.namespace }} keeps failing to bring services to their desired state.",
            "Its log names the services and the API server's answers; a missing permission, say.",
        ),
        Alert(
            "ArgosyOperatorSlow",
            "histogram_quantile(0.99, sum by (le) (rate(argosy_operator_reconcile_seconds_bucket[15m]))) > 5",
            "30m",
            "warning",
            "One in a hundred reconciles takes more than 5 s.",
            "The API server answers slowly, or the operator lacks CPU: raise operator.resources.",
        ),
    ]


def operator_rows() -> list[Row]:
    """The dashboard's content."""
    return [
        Row(
            "Operator",
            (
                Panel(
                    "Services by readiness",
                    "short",
                    [("max by (ready) (argosy_operator_services)", "Ready: {{ready}}")],
                    is_stacked=True,
                ),
                Panel(
                    "Reconcile time",
                    "s",
                    [
                        (
                            f"histogram_quantile({share}, sum by (le) "
                            f"(rate(argosy_operator_reconcile_seconds_bucket{_RATE})))",
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.99)
                    ],
                    "API calls included.",
                ),
                Panel(
                    "Reconciles",
                    "ops",
                    [
                        (
                            f"sum by (outcome) (rate(argosy_operator_reconcile_seconds_count{_RATE}))",
                            "{{outcome}}",
                        )
                    ],
                    is_stacked=True,
                ),
                Panel(
                    "Writes to the API server",
                    "ops",
                    [
                        (
                            f"sum by (kind, verb) (rate(argosy_operator_api_writes_total{_RATE}))",
                            "{{verb}} {{kind}}",
                        )
                    ],
                    "0 at rest.",
                    is_stacked=True,
                ),
                Panel(
                    "Queue",
                    "short",
                    [("max by (pod) (argosy_operator_queued_keys)", "{{pod}}")],
                    "Services that wait to be reconciled.",
                ),
                Panel(
                    "Leader, and routers that answer",
                    "short",
                    [
                        ("max by (pod) (argosy_operator_leading)", "{{pod}} leads"),
                        ("max(argosy_operator_routers_alive)", "routers"),
                    ],
                ),
                Panel(
                    "Namespaces that cannot be read",
                    "short",
                    [
                        (
                            "max by (watched_namespace) (argosy_operator_unreadable_namespaces)",
                            "{{watched_namespace}}",
                        )
                    ],
                    "None is shown if all are read.",
                ),
            ),
        ),
        Row(
            "Engines",
            (
                _gauge("Running requests", "short", "vllm:num_requests_running"),
                _gauge("Waiting requests", "short", "vllm:num_requests_waiting"),
                _gauge("KV cache", "percentunit", "vllm:kv_cache_usage_perc"),
                _quantiles("Time to first token", "vllm:time_to_first_token_seconds"),
                _quantiles("Time between tokens", "vllm:inter_token_latency_seconds"),
                _quantiles("Time in the engine's queue", "vllm:request_queue_time_seconds"),
                Panel(
                    "Tokens",
                    "short",
                    [
                        (f"sum(rate(vllm:prompt_tokens_total{_CHOSEN}{_RATE}))", "prompt"),
                        (f"sum(rate(vllm:generation_tokens_total{_CHOSEN}{_RATE}))", "generated"),
                    ],
                    "Per second.",
                ),
                Panel(
                    "Prefix cache hits",
                    "percentunit",
                    [
                        (_share("vllm:prefix_cache"), "{{model_name}}"),
                    ],
                    "Share of the prompt tokens.",
                ),
                Panel(
                    "Images found in caches",
                    "percentunit",
                    [
                        (_share("vllm:mm_cache"), "{{model_name}} processed"),
                        (_share("argosy_engine_encoder_cache"), "{{model_name}} encoded"),
                    ],
                    "Share of the images that requests need: decoded and processed before, and encoded before.",
                ),
                Panel(
                    "Preemptions",
                    "ops",
                    [
                        (
                            f"sum by ({_PODS}) (rate(vllm:num_preemptions_total{_CHOSEN}{_RATE}))",
                            "{{pod}} {{engine}}",
                        )
                    ],
                    "The KV cache is too small for the load if there are many.",
                ),
            ),
        ),
    ]


def _share(cache: str) -> str:
    """Return the expression of a cache's hits by its queries."""
    of_model = "sum by (model_name)"
    return (
        f"{of_model} (rate({cache}_hits_total{_CHOSEN}{_RATE})) / "
        f"{of_model} (rate({cache}_queries_total{_CHOSEN}{_RATE}))"
    )


def _gauge(title: str, unit: str, name: str) -> Panel:
    return Panel(title, unit, [(f"max by ({_PODS}) ({name}{_CHOSEN})", "{{pod}} {{engine}}")])


def _quantiles(title: str, name: str) -> Panel:
    lines = [
        (
            f"histogram_quantile({share}, sum by (le) (rate({name}_bucket{_CHOSEN}{_RATE})))",
            f"p{share * 100:g}",
        )
        for share in (0.5, 0.9, 0.99)
    ]
    return Panel(title, "s", lines)
