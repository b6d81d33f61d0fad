"""The alert rules over series as the programs export them, run by Prometheus' own promtool: each fires, and does not.

promtool is that of PATH or of `ARGOSY_PROMTOOL`, or is built from its Go module."""

from __future__ import annotations

import functools
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from builders import isvc_object
from harness import Operator, edit_engine, new_cluster, settled
from virtual_time import virtual_time

from argosy_operator.names import INFERENCE_SERVICES
from promtool import find_promtool

FILES = Path(__file__).parents[2] / "charts" / "argosy" / "files"
ALERTS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "alerts.md"
RULES = ("operator-rules.yaml", "router-rules.yaml")
SERVICE = {"namespace": "team", "name": "chat"}
INFO = 'argosy_router_service_info{model="chat", service_namespace="team", service_name="chat", pod="r0"}'
OTHER = 'argosy_router_service_info{model="other", service_namespace="b", service_name="other", pod="r0"}'
WANTED = 'argosy_operator_service_wanted_replicas{service_namespace="team", service_name="chat", pod="o0"}'
NOT_READY = "argosy_operator_service_not_ready"
ROUTABLE = 'argosy_router_routable_replicas{model="chat", pod="r0"}'
STATE = 'argosy_router_replica_state{model="chat", replica="chat-0", pod="r0"'


class Case(NamedTuple):
    """Series, a value for each minute, and whether the alert fires after an hour."""

    alert: str
    series: Mapping[str, str]
    labels: Mapping[str, str] | None
    """Of the alert that fires, besides its name and severity; None if none does."""


def not_ready(reason: str) -> str:
    return f'{NOT_READY}{{service_namespace="team", service_name="chat", reason="{reason}", pod="o0"}}'


def state(name: str) -> str:
    return f'{STATE}, state="{name}"}}'


def counter(name: str, **labels: str) -> str:
    given = {"model": "chat", "pod": "r0", **labels}
    return f"argosy_router_{name}_total{{{', '.join(f'{key}={value!r}' for key, value in given.items())}}}".replace(
        "'", '"'
    )


MODEL = {"model": "chat", **SERVICE}
REPLICA = {"replica": "chat-0", **MODEL}
REQUESTS, FAILURES = counter("requests", code="200"), counter("requests", code="503")
TTFT = (
    counter("actual_ttft_seconds", replica="chat-0"),
    counter("predicted_ttft_seconds", replica="chat-0"),
)
HITS = (
    counter("actual_cached_tokens", replica="chat-0"),
    counter("predicted_cached_tokens", replica="chat-0"),
)

BATCHES = {"namespace": "argosy"}
UNAVAILABLE = 'argosy_router_batch_unavailable{namespace="argosy", pod="r0"}'
RUNNING = 'argosy_batch_batches{namespace="argosy", pod="b0", status="in_progress"}'
ENDED = 'argosy_batch_requests_total{namespace="argosy", pod="b0", outcome="completed"}'
RESTARTS = 'argosy_batch_task_restarts_total{namespace="argosy", pod="b0", task="sweep"}'
QUARANTINED = 'argosy_batch_quarantined_objects{namespace="argosy", pod="b0"}'

CASES = {
    "no replica, and some are wanted": Case(
        "ArgosyNoRoutableReplica", {INFO: "1x60", ROUTABLE: "0x60", WANTED: "2x60"}, MODEL
    ),
    "no replica, and no operator says what is wanted": Case(
        "ArgosyNoRoutableReplica", {INFO: "1x60", ROUTABLE: "0x60"}, MODEL
    ),
    "a service at zero": Case(
        "ArgosyNoRoutableReplica", {INFO: "1x60", ROUTABLE: "0x60", WANTED: "0x60"}, None
    ),
    "its first replica starts": Case(
        "ArgosyNoRoutableReplica", {INFO: "1x60", ROUTABLE: "0x60", WANTED: "0x54 1x6"}, None
    ),
    "its first replica does not come up": Case(
        "ArgosyNoRoutableReplica", {INFO: "1x60", ROUTABLE: "0x60", WANTED: "0x40 1x20"}, MODEL
    ),
    "another service is at zero": Case(
        "ArgosyNoRoutableReplica",
        {
            INFO: "1x60",
            OTHER: "1x60",
            ROUTABLE: "0x60",
            WANTED: "1x60",
            WANTED.replace("chat", "other"): "0x60",
        },
        MODEL,
    ),
    "one router reaches a replica": Case(
        "ArgosyNoRoutableReplica",
        {INFO: "1x60", ROUTABLE: "0x60", ROUTABLE.replace("r0", "r1"): "1x60", WANTED: "1x60"},
        None,
    ),
    "not ready": Case("ArgosyServicesNotReady", {not_ready("Unschedulable"): "1x60"}, SERVICE),
    "not ready for several reasons": Case(
        "ArgosyServicesNotReady",
        {not_ready("Starting"): "1x30 _x30", not_ready("OOMKilled"): "_x31 1x30"},
        SERVICE,
    ),
    "not ready for a short time": Case("ArgosyServicesNotReady", {not_ready("Starting"): "_x40 1x20"}, None),
    "a failed canary": Case("ArgosyServicesNotReady", {not_ready("CanaryFailed"): "1x60"}, SERVICE),
    **{
        f"not ready as it should be: {reason}": Case(
            "ArgosyServicesNotReady", {not_ready(reason): "1x60"}, None
        )
        for reason in (
            "CanaryStarting",
            "CanaryAnalyzing",
            "CanaryHeld",
            "CanaryPromoting",
            "Paused",
            "Untried",
        )
    },
    "nobody leads": Case(
        "ArgosyNoOperator", {'argosy_operator_leading{namespace="a", pod="o0"}': "0x60"}, {"namespace": "a"}
    ),
    "no operator at all": Case("ArgosyNoOperator", {"up": "1x60"}, {}),
    "one of two leads": Case(
        "ArgosyNoOperator",
        {
            'argosy_operator_leading{namespace="a", pod="o0"}': "0x60",
            'argosy_operator_leading{namespace="a", pod="o1"}': "1x60",
        },
        None,
    ),
    "a namespace cannot be read": Case(
        "ArgosyNamespaceUnreadable",
        {'argosy_operator_unreadable_namespaces{namespace="a", watched_namespace="b"}': "1x60"},
        {"namespace": "a", "watched_namespace": "b"},
    ),
    "all can be read": Case(
        "ArgosyNamespaceUnreadable",
        {'argosy_operator_unreadable_namespaces{namespace="a", watched_namespace="b"}': "0x60"},
        None,
    ),
    "reconciles fail": Case(
        "ArgosyReconcilesFail",
        {'argosy_operator_reconcile_seconds_count{namespace="a", outcome="error"}': "0+1x60"},
        {"namespace": "a"},
    ),
    "reconciles work": Case(
        "ArgosyReconcilesFail",
        {'argosy_operator_reconcile_seconds_count{namespace="a", outcome="ok"}': "0+1x60"},
        None,
    ),
    "slow reconciles": Case(
        "ArgosyOperatorSlow",
        {
            'argosy_operator_reconcile_seconds_bucket{le="5"}': "0x60",
            'argosy_operator_reconcile_seconds_bucket{le="15"}': "0+9x60",
            'argosy_operator_reconcile_seconds_bucket{le="+Inf"}': "0+9x60",
        },
        {},
    ),
    "quick reconciles": Case(
        "ArgosyOperatorSlow",
        {
            'argosy_operator_reconcile_seconds_bucket{le="5"}': "0+9x60",
            'argosy_operator_reconcile_seconds_bucket{le="+Inf"}': "0+9x60",
        },
        None,
    ),
    "requests fail": Case(
        "ArgosyRequestsFail", {INFO: "1x60", REQUESTS: "0+80x60", FAILURES: "0+20x60"}, MODEL
    ),
    "few requests fail": Case(
        "ArgosyRequestsFail", {INFO: "1x60", REQUESTS: "0+99x60", FAILURES: "0+1x60"}, None
    ),
    "the only request fails": Case("ArgosyRequestsFail", {INFO: "1x60", FAILURES: "0x59 1"}, None),
    **{
        f"a replica is {name}": Case(alert, {INFO: "1x60", state(name): "1x60"}, REPLICA)
        for alert, name in (
            ("ArgosyReplicaEjected", "ejected"),
            ("ArgosyReplicaEjected", "half-open"),
            ("ArgosyReplicaUnreachable", "connecting"),
            ("ArgosyReplicaSilent", "suspect"),
            ("ArgosyTelemetryLost", "stale"),
        )
    },
    **{
        f"a replica is well, says {alert}": Case(
            alert, {INFO: "1x60", state("synced"): "1x60", state(name): "0x60"}, None
        )
        for alert, name in (
            ("ArgosyReplicaEjected", "ejected"),
            ("ArgosyReplicaUnreachable", "connecting"),
            ("ArgosyReplicaSilent", "suspect"),
            ("ArgosyTelemetryLost", "stale"),
        )
    },
    "most are ejected": Case(
        "ArgosyMostReplicasEjected", {INFO: "1x60", 'argosy_router_panic{model="chat"}': "1x60"}, MODEL
    ),
    "few are ejected": Case(
        "ArgosyMostReplicasEjected", {INFO: "1x60", 'argosy_router_panic{model="chat"}': "0x60"}, None
    ),
    "streams are cut": Case(
        "ArgosyStreamsCut",
        {INFO: "1x60", counter("interrupted_streams", replica="chat-0"): "0+1x60"},
        REPLICA,
    ),
    "one was cut": Case(
        "ArgosyStreamsCut",
        {INFO: "1x60", counter("interrupted_streams", replica="chat-0"): "0x30 1x30"},
        None,
    ),
    "requests wait": Case(
        "ArgosyRequestsWait",
        {INFO: "1x60", 'argosy_router_queued_requests{model="chat", pod="r0"}': "3x60"},
        {"pod": "r0", **MODEL},
    ),
    "requests wait now and then": Case(
        "ArgosyRequestsWait",
        {
            INFO: "1x60",
            'argosy_router_queued_requests{model="chat", pod="r0"}': "3x54 0 3x5",
        },
        None,
    ),
    "first tokens come late": Case(
        "ArgosyFirstTokenMispredicted", {INFO: "1x60", TTFT[0]: "0+60x60", TTFT[1]: "0+6x60"}, REPLICA
    ),
    "first tokens come as expected": Case(
        "ArgosyFirstTokenMispredicted", {INFO: "1x60", TTFT[0]: "0+6x60", TTFT[1]: "0+6x60"}, None
    ),
    "hits are missing": Case(
        "ArgosyHitsMissing", {INFO: "1x60", HITS[0]: "0+1000x60", HITS[1]: "0+9000x60"}, REPLICA
    ),
    "hits are as expected": Case(
        "ArgosyHitsMissing", {INFO: "1x60", HITS[0]: "0+8000x60", HITS[1]: "0+9000x60"}, None
    ),
    "choices are slow": Case(
        "ArgosyChoicesSlow",
        {
            'argosy_router_decision_seconds_bucket{le="0.001"}': "0x60",
            'argosy_router_decision_seconds_bucket{le="0.01"}': "0+9x60",
            'argosy_router_decision_seconds_bucket{le="+Inf"}': "0+9x60",
        },
        {},
    ),
    "choices are quick": Case(
        "ArgosyChoicesSlow",
        {
            'argosy_router_decision_seconds_bucket{le="0.001"}': "0+9x60",
            'argosy_router_decision_seconds_bucket{le="+Inf"}': "0+9x60",
        },
        None,
    ),
    "connections are refused": Case(
        "ArgosyConnectionsRefused",
        {'argosy_router_refused_connections_total{instance="r0"}': "0+1x60"},
        {"instance": "r0"},
    ),
    "none is refused": Case(
        "ArgosyConnectionsRefused", {'argosy_router_refused_connections_total{instance="r0"}': "5x60"}, None
    ),
    "routers are assumed": Case(
        "ArgosyRoutersNotCounted",
        {'argosy_router_limiting_routers{instance="r0", source="assumed"}': "2x60"},
        {"instance": "r0"},
    ),
    "routers are counted": Case(
        "ArgosyRoutersNotCounted",
        {'argosy_router_limiting_routers{instance="r0", source="counted"}': "2x60"},
        None,
    ),
    "usage is not written": Case(
        "ArgosyUsageNotWritten",
        {'argosy_router_usage_write_failures_total{instance="r0"}': "0+1x60"},
        {"instance": "r0"},
    ),
    "usage is written": Case(
        "ArgosyUsageNotWritten", {'argosy_router_usage_write_failures_total{instance="r0"}': "1x60"}, None
    ),
    "no answer from the program of batches": Case(
        "ArgosyBatchUnavailable", {UNAVAILABLE: "0x40 1x20", UNAVAILABLE.replace("r0", "r1"): "0x60"}, BATCHES
    ),
    "it answers": Case("ArgosyBatchUnavailable", {UNAVAILABLE: "1x50 0x10"}, None),
    "batches stall": Case("ArgosyBatchesStall", {RUNNING: "2x60", ENDED: "7x60"}, BATCHES),
    "batches stall from the start": Case("ArgosyBatchesStall", {RUNNING: "2x60"}, BATCHES),
    "batches go on slowly": Case("ArgosyBatchesStall", {RUNNING: "2x60", ENDED: "0x20 1x20 2x20"}, None),
    "one process of two has batches that go on": Case(
        "ArgosyBatchesStall",
        {
            RUNNING: "2x60",
            RUNNING.replace("b0", "b1"): "0x60",
            ENDED.replace("b0", "b1"): "0x60",
            ENDED: "0+1x60",
        },
        None,
    ),
    "a batch has just begun": Case("ArgosyBatchesStall", {RUNNING: "0x40 1x20", ENDED: "7x60"}, None),
    "requests of batches fail": Case(
        "ArgosyBatchRequestsFail",
        {ENDED: "0+7x60", ENDED.replace("completed", "failed"): "0+3x60"},
        BATCHES,
    ),
    "few requests of batches fail": Case(
        "ArgosyBatchRequestsFail",
        {ENDED: "0+9x60", ENDED.replace("completed", "failed"): "0+1x60"},
        None,
    ),
    "a part of the program of batches keeps failing": Case(
        "ArgosyBatchTasksFail", {RESTARTS: "0+1x60"}, {"task": "sweep", **BATCHES}
    ),
    "a part of it failed once": Case("ArgosyBatchTasksFail", {RESTARTS: "0x50 1x10"}, None),
    "objects are put aside": Case("ArgosyBatchObjectsQuarantined", {QUARANTINED: "0x50 2x10"}, BATCHES),
    "objects were put aside long ago": Case("ArgosyBatchObjectsQuarantined", {QUARANTINED: "2x60"}, None),
}


@virtual_time
async def test_the_operator_names_services_that_are_not_ready_and_what_they_want() -> None:
    cluster = new_cluster()
    cluster.broken_images.add("wrong")
    async with Operator(cluster) as operator:

        def shown(name: str, **labels: str) -> float | None:
            operator.controller.count_services()
            value: float | None = operator.controller.metrics.registry.get_sample_value(name, labels)
            return value

        names = {"service_namespace": "team", "service_name": "tiny"}
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        assert shown("argosy_operator_services", ready="True") == 1
        assert shown("argosy_operator_service_wanted_replicas", **names) == 2
        edit_engine(cluster, image="wrong")
        await operator.settle()
        assert shown("argosy_operator_service_not_ready", reason="RolloutHalted", **names) == 1
        cluster.edit("tiny", lambda spec: spec.update(replicas=0))
        await operator.settle()
        assert shown("argosy_operator_service_wanted_replicas", **names) == 0
        assert shown("argosy_operator_service_not_ready", reason="RolloutHalted", **names) is None
        cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
        await operator.settle()
        assert shown("argosy_operator_service_wanted_replicas", **names) is None


@virtual_time
async def test_a_canary_that_goes_on_has_its_own_reason() -> None:
    canary = {"steps": [{"weight": 10, "hold": True}, {"weight": 50}]}
    async with settled(isvc_object(replicas=2, rollout={"canary": canary})) as (cluster, operator):
        edit_engine(cluster, threads=2)
        await operator.settle()
        operator.controller.count_services()
        found = [
            sample.labels["reason"]
            for metric in operator.controller.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == NOT_READY
        ]
        assert found == ["CanaryHeld"]


@functools.cache
def rules() -> dict[str, dict[str, dict[str, str]]]:
    """The rules by name of their alert."""
    groups: Any = all_rules()["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


@functools.cache
def promtool() -> str:
    """Its path; the test is skipped where there is none."""
    found = find_promtool()
    if found is None:
        pytest.skip("needs promtool, or Go to build it")
    return found


Asked = dict[str, tuple[Mapping[str, str], dict[str, object] | None]]
"""By name series, and an expression with what it should be, if any."""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What promtool finds wrong of each case, and of all rules on its series.

    Each case has its own rule evaluated every minute. All rules together, which takes 20 times as long, are every half
    an hour: none may fail on any series.
    """
    groups: dict[str, Asked] = defaultdict(dict)
    for name, case in CASES.items():
        groups[case.alert][name] = case.series, asked_of(case)
    alone = {
        alert: ({"groups": [{"name": alert, "rules": [rules()[alert]]}]}, asked)
        for alert, asked in groups.items()
    }
    found = evaluated(alone, tmp_path_factory.mktemp("alone"))
    every: Asked = {every_rule_on(name): (case.series, None) for name, case in CASES.items()}
    found |= evaluated({"all": (all_rules(), every)}, tmp_path_factory.mktemp("all"), interval="30m")
    return found


def every_rule_on(name: str) -> str:
    return f"every rule on: {name}"


def all_rules() -> dict[str, object]:
    return {
        "groups": [group for name in RULES for group in yaml.safe_load((FILES / name).read_text())["groups"]]
    }


def asked_of(case: Case) -> dict[str, object]:
    """Whether the alert of a case fires, and with which labels."""
    labels = {
        "alertname": case.alert,
        "alertstate": "firing",
        "severity": str(rules()[case.alert]["labels"]["severity"]),
    }
    shown = ", ".join(f'{key}="{value}"' for key, value in {**labels, **(case.labels or {})}.items())
    expected = [] if case.labels is None else [{"labels": f"ALERTS{{{shown}}}", "value": 1}]
    return {
        "expr": f'ALERTS{{alertname="{case.alert}", alertstate="firing"}}',
        "eval_time": "60m",
        "exp_samples": expected,
    }


def evaluated(
    groups: Mapping[str, tuple[dict[str, object], Asked]], folder: Path, interval: str = "1m"
) -> dict[str, str]:
    """Run promtool once for files of rules, each with its tests; return what fails, by the test's name."""
    files = []
    for group, (given, asked) in groups.items():
        file = folder / f"{group}-rules.yaml"
        file.write_text(yaml.safe_dump(given))
        tests = [
            {
                "name": name,
                "interval": "1m",
                "input_series": [{"series": each, "values": values} for each, values in series.items()],
                "promql_expr_test": [question] if question else [],
            }
            for name, (series, question) in asked.items()
        ]
        files.append(folder / f"{group}.yaml")
        files[-1].write_text(
            yaml.safe_dump({"rule_files": [str(file)], "evaluation_interval": interval, "tests": tests})
        )
    report = folder / "report.xml"
    command = [promtool(), "test", "rules", f"--junit={report}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert report.exists(), done.stdout + done.stderr
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert sorted(str(each.get("name")) for each in cases) == sorted(
        name for _, asked in groups.values() for name in asked
    ), done.stdout + done.stderr
    found = {
        str(each.get("name")): told.text or done.stdout
        for each in cases
        for told in (each.find("failure"), each.find("error"))
        if told is not None
    }
    assert bool(found) == (done.returncode != 0), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_rule_fires_or_not(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
    assert every_rule_on(name) not in failures, failures[every_rule_on(name)]


def test_two_services_with_one_model_do_not_fail_a_rule(tmp_path: Path) -> None:
    """Two routers may disagree for a moment about whose a name is."""
    series = {INFO: "1x60", INFO.replace('"team"', '"another"'): "1x60", ROUTABLE: "0x60"}
    alert = 'ALERTS{alertname="ArgosyNoRoutableReplica", alertstate="firing"}'
    asked = {"expr": f"count({alert})", "eval_time": "60m", "exp_samples": [{"labels": "{}", "value": 1}]}
    assert not evaluated({"all": (all_rules(), {"two": (series, asked)})}, tmp_path)


def test_what_promtool_finds_wrong_is_seen(tmp_path: Path) -> None:
    asked = {"expr": "up", "eval_time": "60m", "exp_samples": [{"labels": "up", "value": 2}]}
    tests: Asked = {"wrong": ({"up": "1x60"}, asked), "right": ({"up": "2x60"}, asked)}
    found = evaluated({"all": (all_rules(), tests)}, tmp_path)
    assert list(found) == ["wrong"]
    ambiguous = {"alert": "Ambiguous", "expr": "up * on (job) other"}
    series = {f'{name}{{job="a", pod="{pod}"}}': "1x60" for name in ("up", "other") for pod in "01"}
    failing: dict[str, object] = {"groups": [{"name": "failing", "rules": [ambiguous]}]}
    assert list(evaluated({"failing": (failing, {"two": (series, None)})}, tmp_path, "30m")) == ["two"]


def test_promtool_accepts_the_rules() -> None:
    for name in RULES:
        done = subprocess.run(
            [promtool(), "check", "rules", str(FILES / name)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_shown_to_fire_and_not_to() -> None:
    assert {case.alert for case in CASES.values() if case.labels is not None} == rules().keys()
    assert {case.alert for case in CASES.values() if case.labels is None} == rules().keys()


def test_every_alert_has_a_section_that_its_runbook_names() -> None:
    headings = {line[3:].lower() for line in ALERTS_PAGE.read_text().splitlines() if line.startswith("## ")}
    for alert, rule in rules().items():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/reference/alerts.md"
        assert anchor == alert.lower()
        assert anchor in headings
