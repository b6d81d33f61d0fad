"""The generated CustomResourceDefinition: no drift, structural, everything bounded and described."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from argosy_resource import crd

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "text"), [(crd.FILE, crd.render()), (crd.TEMPLATE, crd.template())])
def test_files_are_what_the_types_say(name: str, text: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == text, "run: python -m argosy_resource.crd"


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, nested in schema.get("properties", {}).items():
        yield from nodes(nested, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


SPEC = dict(nodes(crd.schema()["properties"]["spec"], "spec"))
STATUS = dict(nodes(crd.schema()["properties"]["status"], "status"))


@pytest.mark.parametrize("path", [*SPEC, *STATUS])
def test_everything_is_bounded(path: str) -> None:
    schema = (SPEC | STATUS)[path]
    match "int-or-string" if schema.get("x-kubernetes-int-or-string") else schema["type"]:
        case "string":
            assert "maxLength" in schema or "enum" in schema
        case "integer" | "number":
            assert "minimum" in schema
            assert "maximum" in schema or path in STATUS
        case "int-or-string":
            assert "type" not in schema
            assert {"minimum", "maximum", "maxLength"} <= schema.keys()
            rules = [rule["rule"] for rule in schema.get("x-kubernetes-validations", ())]
            assert "pattern" in schema or any(".matches('^" in rule for rule in rules)
        case "array":
            assert "maxItems" in schema
        case "object":
            assert "properties" in schema or "maxProperties" in schema
        case "boolean":
            pass
        case other:
            pytest.fail(f"not structural: {other}")


@pytest.mark.parametrize("path", [path for path in (*SPEC, *STATUS) if not path.endswith("[]")])
def test_every_field_is_described(path: str) -> None:
    description = (SPEC | STATUS)[path]["description"]
    assert len(description) > 5
    assert description.endswith(".")


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
