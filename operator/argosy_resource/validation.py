"""Validates manifests without a cluster, by the CRD's schema and CEL rules.

Owns what an API server does to a resource before it stores it: unknown fields, defaults, the structural schema, list
types and CEL rules, in that order and with its messages. Must not know what happens to a valid manifest. Invariant: a
manifest is accepted here if and only if an API server with our CRD accepts it; the tests run one table of good and bad
manifests through both.

ManifestError
    the author must change the manifest; `errors` lists every invalid field
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
from msgspec import Struct

from argosy_resource.engine_arguments import RULE_OF_TEXT, ArgumentRule, argument_problems
from argosy_resource.schema_types import quantity_value
from argosy_resource.types import API_VERSION, GROUP, KIND, InferenceService, parse

if TYPE_CHECKING:
    import celpy

Schema = dict[str, Any]

_NAMESPACE: Final = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_METADATA_FIELDS = (
    *("name", "namespace", "labels", "annotations", "finalizers", "ownerReferences", "generateName", "uid"),
    *(
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "resourceVersion",
    ),
    *("managedFields", "selfLink"),
)
_METADATA_SCHEMA: Schema = {"type": "object", "properties": {name: {} for name in _METADATA_FIELDS}}


_SHOWN_FIELDS: Final = 8
"""Fields of an object that are named where something else is given."""


class FieldError(Struct, frozen=True):
    """One invalid field, with the message that Kubernetes would give."""

    path: str
    """Such as `spec.model.aliases[1]`; empty for the resource as a whole."""
    message: str
    """Such as `Invalid value: -1: should be greater than or equal to 0`."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ManifestError(Exception):
    """A manifest that an API server would reject."""

    def __init__(self, errors: tuple[FieldError, ...], resource: str = "") -> None:
        assert errors
        self.errors = errors
        self.resource = resource
        self.path = errors[0].path
        self.message = errors[0].message
        text = "; ".join(str(error) for error in errors)
        super().__init__(f"{resource} is invalid: {text}" if resource else text)


def load_manifests(
    text: str, *, default_namespace: str = "default", on_other: Callable[[str], None] | None = None
) -> list[InferenceService]:
    """Load every resource of a YAML file (several documents, or a `List`), validated and with defaults.

    Args:
        on_other: called with each object of a kind that is not ours, such as `ConfigMap "settings"`, which is skipped
            then. Without it such an object is an error.

    Raises:
        ManifestError: not YAML, a key given twice, another kind, or a resource that an API server would reject. Another
            kind of our group and another group's InferenceService are errors in any case.
    """
    services: list[InferenceService] = []
    for document in _documents(text):
        if on_other is not None and isinstance(document, dict) and _is_other(document):
            on_other(_kind_and_name(document))
            continue
        service = validate_manifest(document, default_namespace=default_namespace)
        if any(service.key == other.key for other in services):
            raise ManifestError(
                (FieldError("metadata.name", f"Duplicate value: {service.key!r}"),), _name(document)
            )
        services.append(service)
    return services


def validate_manifest(document: object, *, default_namespace: str = "default") -> InferenceService:
    """Validate one resource, and apply defaults.

    Raises:
        ManifestError: an API server would reject it.
    """
    if not isinstance(document, dict):
        raise ManifestError((FieldError("", f"a manifest must be a mapping, not {_type_name(document)}"),))
    resource = _name(document)
    errors = tuple(_identity_errors(document))
    if errors:
        raise ManifestError(errors, resource)
    schema = _schema()
    manifest = _plain_copy(document, resource)
    stages = (_unknown_fields, _schema_errors, _list_errors, _cel_errors)
    for stage in stages:
        if stage is _schema_errors:
            apply_defaults(schema, manifest)
        errors = tuple(stage(schema, manifest, ""))
        if errors:
            raise ManifestError(errors, resource)
    manifest["metadata"].setdefault("namespace", default_namespace)
    try:
        return parse(manifest)
    except msgspec.ValidationError as error:  # metadata has no schema of ours
        raise ManifestError((FieldError("metadata", str(error)),), resource) from error


def _plain_copy(document: dict[str, Any], resource: str) -> dict[str, Any]:
    """A copy of plain JSON values; the caller's document stays as it is. 4.0 becomes 4, as in the JSON of kubectl.

    Raises:
        ManifestError: there is something else in it: !!binary, half a surrogate pair, an alias within its own anchor.
    """
    try:
        copy: dict[str, Any] = json.loads(
            json.dumps(document, ensure_ascii=False).encode(), parse_float=_number
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ManifestError((FieldError("", f"not what JSON can say: {error}"),), resource) from error
    return copy


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


@functools.cache
def _schema() -> Schema:
    from argosy_resource import crd

    schema = crd.schema()
    schema["properties"]["metadata"] = _METADATA_SCHEMA
    _type_int_or_strings(schema)
    return schema


def _type_int_or_strings(schema: Schema) -> None:
    """Say in JSON Schema what `x-kubernetes-int-or-string` says to an API server."""
    if schema.get("x-kubernetes-int-or-string"):
        schema["type"] = ["integer", "string"]
    for nested in schema.get("properties", {}).values():
        _type_int_or_strings(nested)
    if "items" in schema:
        _type_int_or_strings(schema["items"])


def _documents(text: str) -> Iterator[object]:
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """Rejects duplicate keys, which PyYAML would resolve silently; dates stay strings."""

        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
            first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(
                        None, None, "a key must be a text", key_node.start_mark
                    )
                if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key_node.value!r} already set in map", key_node.start_mark
                    )
                seen.add(key_node.value)
            return super().construct_mapping(node, deep=deep)

    try:
        for document in yaml.load_all(text, Loader=StrictLoader):
            if document is None:
                continue
            if isinstance(document, dict) and document.get("kind") == "List":
                items = document.get("items") or ()
                if not isinstance(items, list | tuple):
                    message = (
                        f"Invalid value: {_json(_type_name(items))}: items in body must be of type array"
                    )
                    raise ManifestError((FieldError("items", message),))
                yield from items
            else:
                yield document
    except yaml.YAMLError as error:
        text = str(error).replace('in "<unicode string>", line', "at line")  # PyYAML's name of a text
        raise ManifestError((FieldError("", f"not valid YAML: {text}"),)) from error
    except RecursionError as error:
        raise ManifestError((FieldError("", "not valid YAML: nested too deeply"),)) from error


def _is_other(document: dict[str, Any]) -> bool:
    """Whether it is an object of a kind that is not ours and cannot be meant to be."""
    version, kind = document.get("apiVersion"), document.get("kind")
    if not isinstance(version, str) or not isinstance(kind, str):
        return False
    return kind != KIND and version.partition("/")[0] != GROUP


def _kind_and_name(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f'{document["kind"]} "{name}"' if isinstance(name, str) else str(document["kind"])


def _name(document: object) -> str:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f'{KIND} "{name}"' if isinstance(name, str) else ""


def _identity_errors(document: dict[str, Any]) -> Iterator[FieldError]:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if field not in document:
            yield FieldError(field, "Required value")
        elif document[field] != wanted:
            found = _json(document[field])
            yield FieldError(field, f'Unsupported value: {found}: supported values: "{wanted}"')
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str) or not metadata["name"]:
        yield FieldError("metadata.name", "Required value: name is required")
    elif (namespace := metadata.get("namespace")) is not None and (
        not isinstance(namespace, str) or re.fullmatch(_NAMESPACE, namespace) is None
    ):
        yield FieldError(
            "metadata.namespace",
            f"Invalid value: {_json(namespace)}: a namespace is at most 63 lower-case letters, digits and '-', "
            "beginning and ending with a letter or digit",
        )


def _unknown_fields(schema: Schema, value: object, path: str) -> Iterator[FieldError]:
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        for name, nested in value.items():
            if name in known:
                yield from _unknown_fields(known[name], nested, _join(path, name))
            else:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                yield FieldError("", f'unknown field "{_join(path, name)}"{hint}')
    elif isinstance(value, list) and "items" in schema:
        for index, nested in enumerate(value):
            yield from _unknown_fields(schema["items"], nested, f"{path}[{index}]")


def apply_defaults(schema: Schema, value: object) -> None:
    """Write the schema's defaults into `value`, as the API server does: also in place of a null."""
    if isinstance(value, dict):
        for name, nested in schema.get("properties", {}).items():
            if "default" in nested and value.get(name) is None:
                value[name] = json.loads(json.dumps(nested["default"]))
            if name in value:
                apply_defaults(nested, value[name])
    elif isinstance(value, list) and "items" in schema:
        for item in value:
            apply_defaults(schema["items"], item)


def _validator(schema: Schema) -> Any:
    """A validator in whose patterns `$` is the string's end, as for an API server, and not the end of a last line."""
    import jsonschema

    def pattern(_: Any, wanted: str, value: object, __: Schema) -> Iterator[Any]:
        if isinstance(value, str) and _compiled(wanted).search(value) is None:
            yield jsonschema.ValidationError(f"{value!r} does not match {wanted!r}")

    strict = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern})
    return strict(schema)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("$", r"\Z"))


def _schema_errors(schema: Schema, value: object, path: str) -> Iterator[FieldError]:
    validator = _validator(schema)
    for error in sorted(validator.iter_errors(value), key=lambda error: [str(part) for part in error.path]):
        where = path
        for part in error.path:
            where = f"{where}[{part}]" if isinstance(part, int) else _join(where, part)
        yield from _kubernetes_errors(error, where)


def _lacks_quotes(limit: Any, value: object) -> bool:
    """Whether a number would be taken as text, such as the quantity 0.5."""
    return isinstance(value, int | float) and not isinstance(value, bool) and "string" in limit


def _kubernetes_errors(error: Any, path: str) -> Iterator[FieldError]:
    limit, value = error.validator_value, _json(error.instance)
    should = f"Invalid value: {value}: {path} in body should"
    match error.validator:
        case "required":
            for name in limit:
                if name not in error.instance:
                    yield FieldError(_join(path, name), "Required value")
        case "type":
            found = f'"{_type_name(error.instance)}"'
            kinds = limit if isinstance(limit, str) else ",".join(limit)
            remedy = f'; write it in quotes: "{value}"' if _lacks_quotes(limit, error.instance) else ""
            if limit == "object" and (fields := list(error.schema.get("properties", ()))):
                more = ", ..." if len(fields) > _SHOWN_FIELDS else ""
                remedy = f"; its fields are {', '.join(fields[:_SHOWN_FIELDS])}{more}"
            told = f"Invalid value: {found}: {path} in body must be of type {kinds}: {found}{remedy}"
            yield FieldError(path, told)
        case "enum":
            supported = ", ".join(f'"{each}"' for each in limit)
            yield FieldError(path, f"Unsupported value: {value}: supported values: {supported}")
        case "minimum":
            yield FieldError(path, f"{should} be greater than or equal to {limit}")
        case "maximum":
            yield FieldError(path, f"{should} be less than or equal to {limit}")
        case "pattern":
            yield FieldError(path, f"{should} match '{limit}'")
        case "minLength":
            yield FieldError(path, f"{should} be at least {limit} chars long")
        case "maxLength":
            yield FieldError(path, f"Too long: may not be more than {limit} bytes")
        case "minItems":
            yield FieldError(path, f"{should} have at least {limit} items")
        case "maxItems" | "maxProperties":
            yield FieldError(path, f"Too many: {len(error.instance)}: must have at most {limit} items")
        case _:
            yield FieldError(path, f"Invalid value: {value}: {error.message}")


def _list_errors(schema: Schema, value: object, path: str) -> Iterator[FieldError]:
    """Duplicates in lists of type set, or of type map with a key."""
    if isinstance(value, dict):
        for name, nested in schema.get("properties", {}).items():
            if name in value:
                yield from _list_errors(nested, value[name], _join(path, name))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        is_set = schema.get("x-kubernetes-list-type") == "set"
        seen: list[object] = []
        for index, item in enumerate(value):
            yield from _list_errors(schema.get("items", {}), item, f"{path}[{index}]")
            identity = {key: item.get(key) for key in keys} if keys else item
            if (is_set or keys) and identity in seen:
                yield FieldError(f"{path}[{index}]", f"Duplicate value: {_json(identity)}")
            seen.append(identity)


def _cel_errors(schema: Schema, value: object, path: str) -> Iterator[FieldError]:
    for entry in schema.get("x-kubernetes-validations", ()):
        message = _broken(entry, value)
        if message:
            shown = "" if isinstance(value, dict | list) else f"{_json(value)}: "
            where = (path + entry.get("fieldPath", "")).lstrip(".")
            yield FieldError(where, f"Invalid value: {shown}{message}")
    if isinstance(value, dict):
        for name, nested in value.items():
            below = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if below:
                yield from _cel_errors(below, nested, _join(path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _cel_errors(schema.get("items", {}), item, f"{path}[{index}]")


@functools.cache
def _environment() -> celpy.Environment:
    import celpy

    return celpy.Environment()


@functools.cache
def _program(expression: str) -> celpy.Runner:
    from celpy.celtypes import BoolType

    functions: dict[str, Any] = {
        "format": lambda text, values: text % tuple(values),
        "quantity": quantity_value,
        "isGreaterThan": lambda this, other: BoolType(this > other),
    }
    return _environment().program(_environment().compile(expression), functions=functions)


def _broken(entry: dict[str, str], value: object) -> str:
    """The message of a rule if it is broken; else empty."""
    argument_rule = RULE_OF_TEXT.get(entry["rule"])
    if argument_rule is not None and isinstance(value, dict):
        return _refused_arguments(argument_rule, value)
    if _evaluate(entry["rule"], value):
        return ""
    expression = entry.get("messageExpression")
    return entry["message"] if expression is None else str(_evaluate(expression, value))


def _refused_arguments(rule: ArgumentRule, value: dict[str, Any]) -> str:
    """The API server's message, and what can be said here beyond it: what is wrong with the refused arguments."""
    engine = value.get("type", "argosy")
    refused = rule.refused(value.get("args", ()), engine)
    if not refused:
        return ""
    message = rule.told(refused)
    problems = argument_problems(refused, engine) if engine == "argosy" else []  # of others all is said
    return f"{message} ({'; '.join(problems)})" if problems and problems != [message] else message


def _evaluate(expression: str, value: object) -> Any:
    if isinstance(value, dict) and (names := _fields_read(expression)) is not None:
        value = {name: value[name] for name in names if name in value}
    return _result(expression, json.dumps(value))


@functools.cache
def _fields_read(expression: str) -> tuple[str, ...] | None:
    """The fields of `self` that an expression can see; None if it may see all."""
    names = set(re.findall(r"\bself\b(?:\.(\w+)(?![\w(]))?", expression))
    return None if "" in names else tuple(sorted(names))


@functools.lru_cache(maxsize=1024)
def _result(expression: str, value: str) -> Any:
    """An evaluation takes milliseconds, and most parts of most manifests are the defaults."""
    from celpy.adapter import json_to_cel

    return _program(expression).evaluate({"self": json_to_cel(json.loads(value))})


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _json(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _type_name(value: object) -> str:
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
