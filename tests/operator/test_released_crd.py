"""The CRD and its objects between this release and the one before (tests/protocol/released), in both directions.

Helm and GitOps change CRD, operator and manifests one after the other, so that each meets older versions of the others.
An API server's rules in CEL take seconds to interpret, and test_validation.py tries them. Here, only those run that one
of the two CRDs has and the other has not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator
from typing import Any

import celpy
import jsonschema
import msgspec
import pytest
import yaml
from celpy.adapter import json_to_cel

from argosy_protocol.fleet import encode_fleet
from argosy_resource import crd
from argosy_resource.engine_arguments import RULE_OF_TEXT
from argosy_resource.fleet_document import fleet_document
from argosy_resource.schema_types import quantity_value
from argosy_resource.types import InferenceService, parse
from argosy_resource.validation import apply_defaults
from manifests_table import GOOD
from released_formats import RELEASED, breaking_changes, lost_fields, released

Schema = dict[str, Any]
RECORDED = released("manifests.json")


@functools.cache
def released_crd() -> Schema:
    return yaml.CSafeLoader((RELEASED / "inferenceservices.yaml").read_text("utf-8")).get_single_data()


@functools.cache
def crd_of_today() -> Schema:
    return crd.definition()


def schema_of(definition: Schema) -> Schema:
    (version,) = definition["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def stored(manifest: Any, schema: Schema) -> dict[str, Any]:
    """A resource as an API server with that CRD stores it. 2.0 becomes 2 on the way."""
    resource = json.loads(json.dumps(manifest), parse_float=whole)
    apply_defaults(schema, resource)
    return resource


def whole(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def unknown_fields(schema: Schema, value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and "properties" in schema:
        for name, nested in value.items():
            if name in schema["properties"]:
                yield from unknown_fields(schema["properties"][name], nested, f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif isinstance(value, list) and "items" in schema:
        for item in value:
            yield from unknown_fields(schema["items"], item, f"{path}[]")


def below(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas of fields and items."""
    yield from schema.get("properties", {}).items()
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield "[]", schema[key]


def rules(schema: Schema, path: str = "") -> Iterator[tuple[str, str]]:
    """Where each CEL rule is, and its text."""
    for entry in schema.get("x-kubernetes-validations", ()):
        yield path, entry["rule"]
    for name, nested in below(schema):
        yield from rules(nested, f"{path}.{name}")


def refusals(schema: Schema, resource: dict[str, Any], kept: Collection[tuple[str, str]]) -> list[str]:
    """What an API server with this schema finds wrong with a resource.

    Args:
        kept: rules that the resource is known to keep, since the other CRD has them, too.
    """
    validator = jsonschema.Draft202012Validator(with_types(schema))
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(resource)]
    return errors + list(broken_rules(schema, resource, kept))


def with_types(schema: Schema) -> Schema:
    """Say in JSON Schema what `x-kubernetes-int-or-string` says to an API server, and leave metadata to it."""
    typed = {"type": ["integer", "string"]} if schema.get("x-kubernetes-int-or-string") else {}
    result = schema | typed
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = with_types(schema[key])
    if "properties" in schema:
        result["properties"] = {name: with_types(nested) for name, nested in schema["properties"].items()}
    return result


def broken_rules(
    schema: Schema, value: object, kept: Collection[tuple[str, str]], path: str = ""
) -> Iterator[str]:
    for entry in schema.get("x-kubernetes-validations", ()):
        if (path, entry["rule"]) not in kept and not holds(entry["rule"], value):
            yield f"{path}: {entry.get('message', entry['rule'])}"
    if isinstance(value, dict):
        for name, nested in value.items():
            inner = schema.get("properties", {}).get(name)
            if inner is None and isinstance(schema.get("additionalProperties"), dict):
                yield from broken_rules(schema["additionalProperties"], nested, kept, f"{path}.[]")
            elif inner is not None:
                yield from broken_rules(inner, nested, kept, f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from broken_rules(schema.get("items", {}), item, kept, f"{path}.[]")


def holds(rule: str, value: Any) -> bool:
    if (arguments := RULE_OF_TEXT.get(rule)) is not None:
        return not arguments.refused(value.get("args", ()), value.get("type", "argosy"))
    environment = celpy.Environment()
    functions = {
        "format": lambda text, values: text % tuple(values),
        "quantity": quantity_value,
        "isGreaterThan": lambda this, other: celpy.celtypes.BoolType(this > other),
    }
    program = environment.program(environment.compile(rule), functions=functions)
    return bool(program.evaluate({"self": json_to_cel(value)}))


def test_stored_objects_are_valid_and_keep_their_meaning() -> None:
    old, new = schema_of(released_crd()), schema_of(crd_of_today())
    kept = set(rules(old))
    problems = {}
    for name, manifest in RECORDED["accepted"].items():
        resource = stored(manifest, old) | {"status": RECORDED["status"]}
        problems[name] = refusals(new, resource, kept)
        if not problems[name]:
            read = json.loads(msgspec.json.encode(parse(resource)))
            problems[name] = list(lost_fields({key: resource[key] for key in ("spec", "status")}, read))
    assert len(problems) > 60
    assert {name: lines for name, lines in problems.items() if lines} == {}


def test_the_released_crd_accepts_manifests_of_today_with_fields_of_then() -> None:
    old = schema_of(released_crd())
    kept = set(rules(schema_of(crd_of_today())))
    manifests = {name: yaml.safe_load(text) for name, text in GOOD.items()}
    usable = {name: each for name, each in manifests.items() if not list(unknown_fields(old, each))}
    problems = {name: refusals(old, stored(each, old), kept) for name, each in usable.items()}
    assert len(usable) > 60
    assert {name: lines for name, lines in problems.items() if lines} == {}


def narrowed(old: Schema, new: Schema, path: str = "") -> Iterator[str]:
    """Name what the old schema accepts and the new one may not."""
    for key in ("type", "pattern", "x-kubernetes-int-or-string", "x-kubernetes-list-map-keys"):
        if old.get(key) != new.get(key):
            yield f"{path}: {key} {old.get(key)!r} became {new.get(key)!r}"
    for key in ("minimum", "minLength", "minItems"):
        if new.get(key, float("-inf")) > old.get(key, float("-inf")):
            yield f"{path}: {key} {old.get(key)!r} became {new.get(key)!r}"
    for key in ("maximum", "maxLength", "maxItems", "maxProperties"):
        if new.get(key, float("inf")) < old.get(key, float("inf")):
            yield f"{path}: {key} {old.get(key)!r} became {new.get(key)!r}"
    if "enum" in new and not set(old.get("enum", ())) <= set(new["enum"]):
        yield f"{path}: {sorted(set(old.get('enum', ())) - set(new['enum']))} are not allowed any more"
    yield from (
        f"{path}.{name} is required now"
        for name in set(new.get("required", ())) - set(old.get("required", ()))
    )
    others = dict(below(new))
    for name, nested in below(old):
        if name in others:
            yield from narrowed(nested, others[name], f"{path}.{name}")
        else:
            yield f"{path}.{name} is gone"


def test_no_field_accepts_less() -> None:
    assert list(narrowed(schema_of(released_crd()), schema_of(crd_of_today()))) == []


def test_the_released_crd_takes_the_status_that_the_operator_writes_today() -> None:
    old, new = (
        schema["properties"]["status"] for schema in (schema_of(released_crd()), schema_of(crd_of_today()))
    )
    assert breaking_changes(old, new) == []


def test_name_version_and_scale_of_the_resource_stay() -> None:
    old, new = released_crd()["spec"], crd_of_today()["spec"]
    (version,) = old["versions"]
    shown = {each["name"]: {key: each[key] for key in ("served", "subresources")} for each in new["versions"]}
    wanted = {version["name"]: {key: version[key] for key in ("served", "subresources")}}
    assert list(lost_fields({key: old[key] for key in ("group", "scope", "names")}, new)) == []
    assert list(lost_fields(wanted, shown)) == []


def service(number: int, manifest: dict[str, Any]) -> InferenceService:
    resource = stored(manifest, schema_of(released_crd())) | {"status": RECORDED["status"]}
    resource["metadata"] = {**resource["metadata"], "name": f"tiny-{number}", "uid": f"uid-{number}"}
    return parse(resource)


def test_released_routers_read_the_fleet_document_that_the_operator_writes_today() -> None:
    services = [service(*each) for each in enumerate(RECORDED["accepted"].values())]
    written = json.loads(encode_fleet(fleet_document(services, owners=lambda service: ("owner-",))))
    assert len(written["services"]) == len(services)
    schema = released("messages.json")["messages"]["FleetDocument"]["schema"]
    errors = jsonschema.Draft202012Validator(schema).iter_errors(written)
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


FIELD: Schema = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5, "enum": ["x", "y"]}},
}
A: Schema = FIELD["properties"]["a"]
RULE = {"x-kubernetes-validations": [{"rule": "self.a != 'x'", "message": "no x"}]}


@pytest.mark.parametrize(
    ("new", "change"),
    [
        (FIELD | {"properties": {"a": A | {"enum": ["x", "y", "z"], "maxLength": 6}, "b": A}}, []),
        (FIELD | {"properties": {}}, [".a is gone"]),
        (FIELD | {"required": ["a"]}, [".a is required now"]),
        (FIELD | {"properties": {"a": A | {"maxLength": 4}}}, [".a: maxLength 5 became 4"]),
        (FIELD | {"properties": {"a": A | {"minLength": 1}}}, [".a: minLength None became 1"]),
        (FIELD | {"properties": {"a": A | {"pattern": "x"}}}, [".a: pattern None became 'x'"]),
        (FIELD | {"properties": {"a": A | {"enum": ["y"]}}}, [".a: ['x'] are not allowed any more"]),
    ],
)
def test_the_check_sees_a_field_that_accepts_less(new: Schema, change: list[str]) -> None:
    assert list(narrowed(FIELD, new)) == change


def test_the_check_sees_a_rule_that_a_stored_object_breaks() -> None:
    schema = {"type": "object", "properties": {"spec": FIELD | RULE}}
    resource = {"spec": {"a": "x"}}
    assert refusals(schema, resource, set()) == [".spec: no x"]
    assert refusals(schema, resource, set(rules(schema))) == []
    assert refusals(schema, {"spec": {"a": "y"}}, set()) == []
    assert refusals(schema, {"spec": {"a": "z"}}, set(rules(schema))) == [
        "$.spec.a: 'z' is not one of ['x', 'y']"
    ]
