"""The chart's dashboard and alert rules: up to date, and about metrics that a router exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from argosy_router.metrics.registry import PREFIX
from argosy_router.metrics.series import Counter
from monitoring.__main__ import DASHBOARD, RULES, render
from monitoring.grafana import rows
from monitoring.promql import Registry

from .fake_engine import FakeEngine
from .harness import rig

FILES = Path(__file__).parents[2] / "charts" / "argosy" / "files"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.of_router()


def test_files_are_up_to_date(registry: Registry) -> None:
    for name, text in render(registry).items():
        assert (FILES / name).read_text() == text, "run `make generate`"


def expressions() -> list[str]:
    dashboard = json.loads((FILES / DASHBOARD).read_text())
    rules = yaml.safe_load((FILES / RULES).read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked += [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]
    return asked + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


async def test_every_metric_and_label_they_name_is_on_metrics() -> None:
    async with rig([FakeEngine()], admin_port=0) as r:
        await r.chat()
        exposition = (await r.http.get(r.router.admin_url + "/metrics")).text
    families = dict(re.findall(rf"^# TYPE ({PREFIX}\w+) (\w+)", exposition, re.MULTILINE))
    shown = {f"{name}_bucket" if kind == "histogram" else name for name, kind in families.items()}
    for expression in expressions():
        names = set(re.findall(rf"{PREFIX}\w+", expression))
        assert names, expression
        assert names <= shown, expression
        assert expression.count("(") == expression.count(")")


def test_a_name_that_no_router_has_is_refused(registry: Registry) -> None:
    with pytest.raises(KeyError):
        registry.counter("no_such_series")
    with pytest.raises(AssertionError):
        registry.gauge("requests")
    with pytest.raises(KeyError):
        rows(Registry([Counter("requests", "", ())]))


def test_panels_do_not_overlap(registry: Registry) -> None:
    places: set[tuple[int, int]] = set()
    for panel in json.loads(render(registry)[DASHBOARD])["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + column, at["y"] + line) for column in range(at["w"]) for line in range(at["h"])}
        assert not own & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= own
