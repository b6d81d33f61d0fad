"""The generated CustomResourceDefinition: no drift, structural, everything bounded and described."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from argosy_resource import crd

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "render"), [(crd.FILE, crd.render), (crd.TEMPLATE, crd.template)])
def test_files_are_what_the_types_say(name: str, render: Callable[[], str]) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == render(), "run: python -m argosy_resource.crd"


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, nested in schema.get("properties", {}).items():
        yield from nodes(nested, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


SPEC = dict(nodes(crd.schema()["properties"]["spec"], "spec"))
STATUS = dict(nodes(crd.schema()["properties"]["status"], "status"))


def missing_bounds(schema: dict[str, Any], *, is_status: bool) -> set[str]:
    """Return the keywords that a bounded schema of this type must have, and that this one lacks."""
    one_of: tuple[str, ...]
    match "int-or-string" if schema.get("x-kubernetes-int-or-string") else schema.get("type"):
        case "string":
            one_of = ("maxLength", "enum")
        case "integer" | "number":
            return ({"minimum"} if is_status else {"minimum", "maximum"}) - schema.keys()
        case "int-or-string":
            rules = [rule["rule"] for rule in schema.get("x-kubernetes-validations", ())]
            has_pattern = "pattern" in schema or any(".matches('^" in rule for rule in rules)
            wanted = {"minimum", "maximum", "maxLength"} | (set() if has_pattern else {"pattern"})
            return (wanted - schema.keys()) | ({"no type"} if "type" in schema else set())
        case "array":
            one_of = ("maxItems",)
        case "object":
            one_of = ("properties", "maxProperties")
        case "boolean":
            return set()
        case other:
            return {f"a structural type, not {other}"}
    return set() if schema.keys() & set(one_of) else {" or ".join(one_of)}


def test_everything_is_bounded() -> None:
    missing = {
        path: missing_bounds(schema, is_status=nodes is STATUS)
        for nodes in (SPEC, STATUS)
        for path, schema in nodes.items()
    }
    assert len(missing) > 400
    assert {path: keywords for path, keywords in missing.items() if keywords} == {}


@pytest.mark.parametrize(
    ("schema", "missing"),
    [
        ({"type": "string"}, {"maxLength or enum"}),
        ({"type": "integer", "minimum": 0}, {"maximum"}),
        ({"type": "number"}, {"minimum", "maximum"}),
        ({"x-kubernetes-int-or-string": True, "minimum": 0, "maximum": 1}, {"maxLength", "pattern"}),
        (
            {"x-kubernetes-int-or-string": True, "type": "string", "minimum": 0, "maximum": 1, "maxLength": 1,
             "pattern": "^a$"},
            {"no type"},
        ),
        ({"type": "array"}, {"maxItems"}),
        ({"type": "object"}, {"properties or maxProperties"}),
        ({"type": "null"}, {"a structural type, not null"}),
        ({}, {"a structural type, not None"}),
    ],
)  # fmt: skip
def test_the_check_sees_what_is_not_bounded(schema: dict[str, Any], missing: set[str]) -> None:
    assert missing_bounds(schema, is_status=False) == missing


def test_every_field_is_described() -> None:
    described = {
        path: schema.get("description", "")
        for path, schema in (SPEC | STATUS).items()
        if not path.endswith("[]")
    }
    assert len(described) > 300
    assert {path: text for path, text in described.items() if len(text) <= 5 or not text.endswith(".")} == {}


def test_defaults_decide_no_either_or() -> None:
    for path in ("spec.rollout.maxSurge", "spec.rollout.maxUnavailable", "spec.resources.gpu"):
        assert "default" not in SPEC[path]
    for path in ("spec.engine.kvCacheMemory", "spec.engine.gpuMemoryUtilization", "spec.model.servedName"):
        assert "default" not in SPEC[path]


def test_a_resource_that_was_never_reconciled_does_not_look_done() -> None:
    """kstatus compares observedGeneration with the generation, which begins at 1."""
    assert STATUS["status"]["default"] == {"observedGeneration": -1}
    assert STATUS["status.observedGeneration"]["minimum"] == -1
    assert not [path for path, schema in STATUS.items() if "default" in schema and path != "status"]


def test_subresources_and_columns() -> None:
    definition = yaml.safe_load(crd.render())
    (version,) = definition["spec"]["versions"]
    assert version["subresources"]["status"] == {}
    scale = version["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.replicas"
    assert STATUS["status" + scale["statusReplicasPath"].removeprefix(".status")]["type"] == "integer"
    assert STATUS["status" + scale["labelSelectorPath"].removeprefix(".status")]["type"] == "string"
    columns = [column["name"] for column in version["additionalPrinterColumns"] if not column.get("priority")]
    assert columns == ["Ready", "Reason", "Routable", "ModelCache", "Model", "GPU", "URL", "Age"]
    wide = {column["name"]: column["jsonPath"] for column in version["additionalPrinterColumns"]}
    assert wide["Message"] == '.status.conditions[?(@.type=="Ready")].message'
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert definition["spec"]["names"]["shortNames"] == ["isvc"]
