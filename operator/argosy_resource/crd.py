"""Generate the CustomResourceDefinition from the resource's types.

Owns the translation of the structs in `types` into a structural schema (types, bounds, defaults, CEL, list types,
descriptions), the printer columns and the subresources. Knows nothing of single fields.
Invariant: the files in the repository are what `render()` returns; a test compares them.

    python -m argosy_resource.crd [REPOSITORY]     writes both copies
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from pathlib import Path
from typing import Any, Final

import msgspec.inspect
import yaml

from argosy_resource import types
from argosy_resource.schema_types import rule_schema

Schema = dict[str, Any]

FILE: Final = "crds/inferenceservices.yaml"
TEMPLATE: Final = "charts/argosy/templates/crd-inferenceservices.yaml"
"""The chart has the CRD as a template, because Helm never upgrades the files in a chart's crds/."""

HEADER: Final = "# Generated from operator/argosy_resource by `make generate`; do not edit.\n"

_INT32_MAX: Final = 2**31 - 1
_CONDITION: Final = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS: Final[tuple[Schema, ...]] = (
    {"name": "Ready", "type": "string", "jsonPath": f"{_CONDITION}.status"},
    {"name": "Reason", "type": "string", "jsonPath": f"{_CONDITION}.reason"},
    {"name": "Routable", "type": "string", "jsonPath": ".status.routable"},
    {"name": "ModelCache", "type": "string", "jsonPath": ".status.modelCache"},
    {"name": "Model", "type": "string", "jsonPath": ".status.model"},
    {"name": "GPU", "type": "integer", "jsonPath": ".status.gpus"},
    {"name": "URL", "type": "string", "jsonPath": ".status.url"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Revision", "type": "string", "jsonPath": ".status.revision", "priority": 1},
    {"name": "Image", "type": "string", "jsonPath": ".status.image", "priority": 1},
    {"name": "Message", "type": "string", "jsonPath": f"{_CONDITION}.message", "priority": 1},
)


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module, read from its source once: `inspect.getsource` of a class parses all of it each time."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {statement.name: statement for statement in tree.body if isinstance(statement, ast.ClassDef)}


def attribute_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Docstrings of a struct's attributes, by attribute name."""
    docs = {}
    for statement, following in itertools.pairwise(_classes(struct.__module__)[struct.__name__].body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


def struct_schema(struct: type[msgspec.Struct], *, defaults: bool) -> Schema:
    """Structural schema of a struct. `defaults` is off for the status, which only the operator writes."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    docs = attribute_docs(struct)
    properties: Schema = {}
    for field in info.fields:
        schema = {"description": docs[field.name], **type_schema(field.type, defaults=defaults)}
        if defaults:
            default = field_default(field, schema)
            if default is not None:
                schema["default"] = default
        properties[field.encode_name] = schema
    result: Schema = {"type": "object", "properties": properties}
    required = [field.encode_name for field in info.fields if field.required]
    if required:
        result["required"] = required
    if rules := getattr(struct, "rules", ()):
        result["x-kubernetes-validations"] = [rule_schema(rule) for rule in rules]
    return result


def field_default(field: msgspec.inspect.Field, schema: Schema) -> object:
    """The default that the API server writes: a scalar's own, `{}` where a nested field has one, else none."""
    if schema.get("type") == "object":
        nested = schema.get("properties", {}).values()
        is_optional = isinstance(field.type, msgspec.inspect.UnionType)
        return (
            {}
            if not field.required and not is_optional and any("default" in each for each in nested)
            else None
        )
    if schema.get("type") == "array" or field.default is msgspec.NODEFAULT or field.default == "":
        return None
    return field.default


def type_schema(info: msgspec.inspect.Type, *, defaults: bool) -> Schema:
    """Structural schema of any type that the structs use."""
    match info:
        case msgspec.inspect.Metadata(type=inner, extra_json_schema=extra):
            schema = type_schema(inner, defaults=defaults)
            for key, value in (extra or {}).items():
                schema[key] = [*schema.get(key, []), *value] if key == "x-kubernetes-validations" else value
            own = f"self.matches('{schema.get('pattern')}')"
            if any(rule["rule"].endswith(own) for rule in schema.get("x-kubernetes-validations", ())):
                del schema["pattern"]  # the rule says it in words
            return schema
        case msgspec.inspect.UnionType(types=members):
            schemas = [
                type_schema(each, defaults=defaults)
                for each in members
                if not isinstance(each, msgspec.inspect.NoneType)
            ]
            return schemas[0] if len(schemas) == 1 else _int_or_string(schemas)
        case msgspec.inspect.StructType(cls=struct):
            return struct_schema(struct, defaults=defaults)
        case msgspec.inspect.BoolType():
            return {"type": "boolean"}
        case msgspec.inspect.IntType(ge=low, le=high):
            width = "int32" if high is not None and high <= _INT32_MAX else "int64"
            return {"type": "integer", "format": width, **_bounds(minimum=low, maximum=high)}
        case msgspec.inspect.FloatType(ge=low, le=high):
            return {"type": "number", **_bounds(minimum=_number(low), maximum=_number(high))}
        case msgspec.inspect.StrType(min_length=low, max_length=high, pattern=pattern):
            return {"type": "string", **_bounds(minLength=low, maxLength=high, pattern=pattern)}
        case msgspec.inspect.LiteralType(values=values):
            return {"type": "string", "enum": list(values)}
        case msgspec.inspect.DictType(value_type=value, max_length=high):
            nested = type_schema(value, defaults=defaults)
            return {"type": "object", "additionalProperties": nested, **_bounds(maxProperties=high)}
        case msgspec.inspect.VarTupleType(item_type=item, min_length=low, max_length=high):
            nested = type_schema(item, defaults=defaults)
            return {"type": "array", "items": nested, **_bounds(minItems=low, maxItems=high)}
    raise TypeError(f"no structural schema for {info!r}")


def _number(bound: float | None) -> float | None:
    """A whole bound without a point. 0 and 0.0 are equal, and so `typing` keeps one type for both: which one depends on
    the module that is imported first."""
    return int(bound) if bound is not None and bound == int(bound) else bound


def _int_or_string(schemas: list[Schema]) -> Schema:
    """What Kubernetes calls int-or-string: a schema without a type, with the bounds of both. Without the `anyOf` that
    is often seen beside it, too, for which the API server would add three errors to the one that says it."""
    kinds = {schema["type"] for schema in schemas}
    assert kinds == {"integer", "string"}, "no other union is structural"
    bounds = {key: bound for schema in schemas for key, bound in schema.items()}
    return {"x-kubernetes-int-or-string": True} | {
        key: bound for key, bound in bounds.items() if key not in ("type", "format")
    }


def _bounds(**bounds: object) -> Schema:
    return {name: bound for name, bound in bounds.items() if bound is not None}


def schema() -> Schema:
    root = types.InferenceService
    docs = attribute_docs(root)
    wanted = struct_schema(types.InferenceServiceSpec, defaults=True)
    reported = struct_schema(types.InferenceServiceStatus, defaults=False)
    return {
        "description": " ".join((root.__doc__ or "").split()),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": "Version of this schema.", "type": "string"},
            "kind": {"description": "Kind of this resource.", "type": "string"},
            "metadata": {"type": "object"},
            "spec": {"description": docs["spec"], **wanted},
            "status": {
                "description": docs["status"],
                **reported,
                # Tools that follow kstatus (helm --wait, Flux) take a resource without an observedGeneration for
                # reconciled, so that one which no operator has observed would count as done.
                "default": {"observedGeneration": types.InferenceServiceStatus().observed_generation},
            },
        },
        "x-kubernetes-validations": [rule_schema(rule) for rule in root.rules],
    }


def definition() -> Schema:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{types.PLURAL}.{types.GROUP}",
            # Deleting the chart must not delete every InferenceService of the cluster.
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": {"app.kubernetes.io/name": "argosy", "app.kubernetes.io/component": "crd"},
        },
        "spec": {
            "group": types.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": types.KIND,
                "listKind": f"{types.KIND}List",
                "plural": types.PLURAL,
                "singular": types.SINGULAR,
                "shortNames": [types.SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": types.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [dict(column) for column in _COLUMNS],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": schema()},
                }
            ],
        },
    }


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def render() -> str:
    text = yaml.dump(definition(), Dumper=_NoAliases, sort_keys=False, width=110, allow_unicode=True)
    assert "{{" not in text, "the chart holds this file as a template"
    return HEADER + text


def template() -> str:
    """The CustomResourceDefinition as the chart's template, which the value `crds.install` leaves out."""
    return "{{- if .Values.crds.install }}\n" + render() + "{{- end }}\n"


def main(argv: list[str]) -> int:
    root = Path(argv[0] if argv else ".")
    for name, text in ((FILE, render()), (TEMPLATE, template())):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
