"""The page of alerts, from the rules: what each of them means, and what to do about it."""

from __future__ import annotations

import re

from docs_reference.markdown import page, section
from monitoring.alerts import Alert, alerts
from monitoring.batch_views import batch_alerts
from monitoring.operator_views import operator_alerts
from monitoring.promql import Registry

_INTRODUCTION = """\
The alerts that the chart installs with `monitoring.rules`, with what to do about each. Alerts about a service have its
`namespace` and `name` as labels, by which an Alertmanager can route them. The annotation `runbook_url` of an alert
leads to its section; set `monitoring.runbookUrl` to the address at which your Git server shows this page."""


def alerts_page() -> str:
    """The page."""
    found = [*operator_alerts(), *alerts(Registry.of_router()), *batch_alerts()]
    return page("Alerts", _INTRODUCTION, [section(alert.name, _text(alert)) for alert in found])


def _text(alert: Alert) -> str:
    summary = re.sub(
        r"\{\{ \$(?:labels\.)?(\w+)(?: \| \w+)? \}\}", lambda match: match[1].upper(), alert.summary
    )
    return f"Severity {alert.severity}, after {alert.wait}. {summary}\n\n{alert.remedy}\n\n```\n{alert.expression}\n```"
