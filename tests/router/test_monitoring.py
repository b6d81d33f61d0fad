"""The chart's dashboard and alert rules: up to date, and about metrics that a router exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from argosy_batch.config import BatchConfig
from argosy_router.metric_series import Counter
from argosy_router.metrics import PREFIX
from monitoring.__main__ import DASHBOARD, OPERATOR_DASHBOARD, OPERATOR_RULES, RULES, render
from monitoring.grafana import rows
from monitoring.promql import Registry

from .fake_engine import FakeEngine
from .harness import rig

FILES = Path(__file__).parents[2] / "charts" / "argosy" / "files"
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.of_router()


def test_files_are_up_to_date(registry: Registry) -> None:
    for name, text in render(registry).items():
        assert (FILES / name).read_text() == text, "run `make generate`"


def expressions(dashboard_file: str = DASHBOARD, rules_file: str = RULES) -> list[str]:
    dashboard = json.loads((FILES / dashboard_file).read_text())
    rules = yaml.safe_load((FILES / rules_file).read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked += [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]
    return asked + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


async def test_every_metric_and_label_they_name_is_on_metrics(tmp_path: Path) -> None:
    async with rig([FakeEngine()], admin_port=0, storage=BatchConfig(storage=str(tmp_path))) as r:
        await r.chat()
        exposition = (await r.http.get(r.router.admin_url + "/metrics")).text
    service = 'model="tiny",service_name="svc",service_namespace="default"'
    assert f"{PREFIX}service_info{{{service}}} 1.0" in exposition
    families = dict(re.findall(rf"^# TYPE ({PREFIX}\w+) (\w+)", exposition, re.MULTILINE))
    shown = {f"{name}_bucket" if kind == "histogram" else name for name, kind in families.items()}
    for expression in expressions():
        if "argosy_batch_" in expression:  # of the program beside it, whose names the next test checks
            continue
        names = set(re.findall(rf"{PREFIX}\w+", expression))
        assert names, expression
        assert names <= shown, expression
        assert expression.count("(") == expression.count(")")


def test_operator_engines_and_batches_export_what_their_panels_and_rules_name() -> None:
    """The reference has every series and its labels, and a test of its own."""
    rows = re.findall(
        r"^\| `((?:vllm:|argosy_operator_|argosy_batch_|argosy_engine_)\w+)` \| (\w+) \| ([\w, ]*) \|",
        REFERENCE.read_text(),
        re.MULTILINE,
    )
    labels: dict[str, set[str]] = {}
    for name, kind, given in rows:
        for suffix in ("_bucket", "_count") if kind == "histogram" else ("",):
            labels[name + suffix] = {*given.split(", "), "le", "namespace", "pod"}
    asked = expressions(OPERATOR_DASHBOARD, OPERATOR_RULES)
    asked += [expression for expression in expressions() if "argosy_batch_" in expression]
    assert len(asked) > 15
    for expression in asked:
        names = set(re.findall(r"(?:vllm:|argosy_operator_|argosy_batch_|argosy_engine_)\w+", expression))
        assert names, expression
        assert names <= labels.keys(), expression
        for name, selector in re.findall(r"((?:vllm:|argosy_\w+_)\w+)\{(.*?)\}", expression):
            assert set(re.findall(r"(?:^|, *)(\w+) *(?:=~|!=|!~|=)", selector)) <= labels[name], expression
        groups = {
            label for group in re.findall(r"by \(([\w, ]+)\)", expression) for label in group.split(", ")
        }
        assert all(groups <= labels[name] for name in names), expression
        assert expression.count("(") == expression.count(")")


def test_a_name_that_no_router_has_is_refused(registry: Registry) -> None:
    with pytest.raises(KeyError):
        registry.counter("no_such_series")
    with pytest.raises(AssertionError):
        registry.gauge("requests")
    with pytest.raises(KeyError):
        rows(Registry([Counter("requests", "", ())]))


@pytest.mark.parametrize("name", [DASHBOARD, OPERATOR_DASHBOARD])
def test_panels_do_not_overlap(registry: Registry, name: str) -> None:
    places: set[tuple[int, int]] = set()
    for panel in json.loads(render(registry)[name])["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + column, at["y"] + line) for column in range(at["w"]) for line in range(at["h"])}
        assert not own & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= own
