"""What an administrator installs, checked without Helm: values and their schema, RBAC, examples, Dockerfiles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from chart_rules import helper_rules

from argosy_operator.controller import WATCHED
from argosy_operator.validate import load_manifests

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "argosy"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def test_default_values_satisfy_the_schema() -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(VALUES)


@pytest.mark.parametrize(
    "wrong",
    [
        {"routr": {}},
        {"router": {"replica": 2}},
        {"router": {"apiKeys": ["short"]}},
        {"operator": {"image": {"tag": 1}}},
        {"watchNamespaces": ["Not_a_name"]},
    ],
    ids=str,
)
def test_typos_in_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(wrong)


def closed(schema: dict[str, Any]) -> bool:
    if schema.get("type") != "object" or "properties" not in schema:
        return True
    return schema.get("additionalProperties") is False and all(map(closed, schema["properties"].values()))


def test_the_schema_leaves_no_object_open() -> None:
    assert closed(SCHEMA)
    assert all(map(closed, SCHEMA["$defs"].values()))


def grants(name: str) -> dict[str, set[str]]:
    return {
        f"{group}/{resource}": set(rule["verbs"])
        for rule in helper_rules(name)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.mark.parametrize("name", ["argosy.operatorRules", "argosy.routerRules"])
def test_no_wildcards_and_nothing_that_leads_further(name: str) -> None:
    for resource, verbs in grants(name).items():
        assert "*" not in resource
        assert not verbs & {"*", "escalate", "bind", "impersonate"}
        assert "exec" not in resource


def test_the_operator_cannot_read_secrets() -> None:
    assert grants("argosy.operatorRules")["/secrets"] == {"create", "patch"}


def test_the_operator_may_watch_what_it_watches() -> None:
    granted = grants("argosy.operatorRules")
    for kind in WATCHED:
        assert granted[f"{kind.group}/{kind.plural}"] >= {"list", "watch"}


def test_the_router_only_reads_pods() -> None:
    assert grants("argosy.routerRules") == {"/pods": {"get", "list", "watch"}}


def test_whoever_asks_the_admin_port_speaks_tls_where_it_does() -> None:
    text = (CHART / "templates" / "router.yaml").read_text()
    probes = re.findall(r"httpGet: .*port: admin.*", text)
    assert len(probes) == 3
    assert all("{{ with .Values.router.tlsSecret }}, scheme: HTTPS{{ end }}" in probe for probe in probes)
    monitor = (CHART / "templates" / "monitoring.yaml").read_text()
    assert re.search(r"if \$\.Values\.router\.tlsSecret }}\n +scheme: https\n", monitor)
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    assert 'ternary "https" "http" (not (empty .Values.router.tlsSecret))' in helpers, (
        "the operator goes by it"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert load_manifests(path.read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "images").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_images_run_as_a_number_and_take_their_base_as_an_argument(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert re.search(r"^ARG BASE=\S+$", text, re.MULTILINE)
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert stages
    assert set(stages) == {"${BASE}"}
    assert "PYTHONSAFEPATH=1" in text
    assert 'ENTRYPOINT ["/opt/venv/bin/argosy"]' in text
