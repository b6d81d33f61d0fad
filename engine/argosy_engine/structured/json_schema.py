"""JSON schema check: rejects schemas that XGrammar would not fully enforce.

XGrammar ignores keywords that it does not know, and known ones in combinations that it cannot express: the output would
look constrained but not be valid. This module rejects such a schema and names the keyword and its path, so that every
accepted schema yields output that validates. The rules follow XGrammar's converter (`cpp/json_schema_converter.cc`): a
schema is read as the first of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf`, `type` that it has; everything else
in it is ignored. Annotations and unknown keywords have no effect on validation and are accepted.

`pattern` is matched against the whole string, which is stricter than the search that the standard specifies. Objects
without `additionalProperties` have no properties but the declared ones, as in OpenAI's strict mode.

Of a tool whose `strict` is not true, keywords that cannot be enforced are dropped instead (`Relaxation`).

The module is pure Python over plain values; `structured_outputs_params` bounds the size of the text.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.grammar_checks import check_pattern

MAX_DEPTH = 64
MAX_WORK = 200_000
"""Limit on the size of the compiled schema: the sum of `_count` over its parts, a rough number of native objects."""
MAX_STEPS = 100_000
"""Limit on the time of checking: schemas, names and values looked at, for all schemas of a request together. References
multiply them; without any, the largest text has a third of it."""

_NEVER = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords that are rejected everywhere."""
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRING = ("minLength", "maxLength", "pattern", "format")
_ARRAY = ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems")
_OBJECT = (
    "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties",
)  # fmt: skip
_COMBINING = ("const", "enum", "anyOf", "oneOf", "allOf")
_CONSTRAINTS = ("type", *_COMBINING, *_NUMBER, *_STRING, *_ARRAY, *_OBJECT)
_TELLING = frozenset(("additionalProperties", "unevaluatedProperties", "unevaluatedItems"))
"""Keywords that tell a type which is not given, as `properties`, `items` and `prefixItems` do."""
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer",
        "time", "uri", "uri-reference", "uri-template", "uuid",
    }
)  # fmt: skip
_ANNOTATION_FORMATS = frozenset(
    {
        "binary", "byte", "decimal", "double", "float", "int8", "int16", "int32", "int64", "password", "regex", "uint8",
        "uint16", "uint32", "uint64",
    }
)  # fmt: skip
"""Formats of OpenAPI, hints for people and code generators that do not constrain the text."""
_MAX_MULTIPLE = 1024
_MAX_UNBOUNDED_MULTIPLE = 400
"""XGrammar's automaton of the remainders takes memory and time by the square: 50 MB and some seconds here."""
_MAX_MULTIPLE_RANGE = 9_999
"""Maximum distance between the bounds beside a `multipleOf`: from 10,000 on XGrammar ignores `multipleOf` with a mere
warning."""
_MAX_COUNT = (1 << 31) - 1
_MAX_HASHED = 1 << 53
"""Numbers beyond are compared as text: Python's hash of a number is its remainder, so that a client can choose
thousands that share one. Floats beyond are whole numbers."""


class CheckBudget:
    """Steps left to check the schemas of one request."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self, path: str, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _error(path, "the schema is too large")


def normalized_schema(schema: Any) -> str:
    """Check a schema and return it as JSON text (`checked_schema`)."""
    return json.dumps(checked_schema(schema), ensure_ascii=False)


def checked_schema(schema: Any, budget: CheckBudget | None = None) -> Any:
    """Check a schema and return a copy in the given order, with defaults that XGrammar reads too strictly.

    Args:
        budget: what is left of the request's; by default the schema has one of its own.

    Raises:
        InvalidRequest: the schema is malformed, too deep or too large, or has a keyword that cannot be enforced; the
            message has its path.
    """
    try:
        root = copy.deepcopy(schema)
        _Checker(root, budget or CheckBudget()).check(root, "$", 0)
        return root
    except RecursionError:
        raise _error("$", f"nested deeper than {MAX_DEPTH} levels") from None


def checked_object_schema(schema: Any, budget: CheckBudget | None = None) -> Any:
    """Check a schema as `checked_schema` does, and that no value but an object meets it.

    Raises:
        InvalidRequest: as `checked_schema`, or other values may meet it.
    """
    return _object_schema(schema, budget or CheckBudget(), None)


def relaxed_object_schema(
    schema: Any, budget: CheckBudget | None = None
) -> tuple[dict[str, Any], frozenset[str]]:
    """Check a schema as `checked_object_schema` does, and drop what cannot be enforced.

    Returns:
        The schema, which accepts all that the given one does, and the keywords that were dropped.

    Raises:
        InvalidRequest: the schema is malformed, too deep or too large, or other values than objects may meet it.
    """
    budget, relaxation = budget or CheckBudget(), Relaxation()
    root = _object_schema(schema, budget, relaxation)
    if relaxation.must_open:
        relaxation = Relaxation(is_open=True)
        root = _object_schema(schema, budget, relaxation)
    return root, frozenset(relaxation.keywords)


def _object_schema(schema: Any, budget: CheckBudget, relaxation: Relaxation | None) -> Any:
    try:
        root = copy.deepcopy(schema)
        checker = _Checker(root, budget, relaxation)
        checker.check(root, "$", 0)
        if relaxation is not None and relaxation.keywords and not checker.can_resolve():
            return dict(OPEN_OBJECT)
        if checker.is_of_objects(root):
            return root
    except RecursionError:
        raise _error("$", f"nested deeper than {MAX_DEPTH} levels") from None
    if relaxation is None or not relaxation.keywords:
        raise _error("$", "must be a JSON schema of an object")
    return dict(OPEN_OBJECT)


class _Checker:
    """Walk over a schema and what its references reach, which normalizes it in place.

    Invariant: what does not count as a step takes linear time in the schema's text, however often it is referred to;
    therefore results are kept by reference, or by the `id` of a part of the root.
    """

    def __init__(self, root: Any, budget: CheckBudget, relaxation: Relaxation | None = None) -> None:
        """With `relaxation`, keywords that cannot be enforced are dropped rather than refused."""
        self._root = root
        self._relaxation = relaxation
        self._budget = budget
        self._work = 0
        self._visited: set[str] = set()
        self._targets: dict[str, Any] = {}
        """For each reference the schema at the end of its chain."""
        self._types: dict[int, frozenset[str]] = {}
        self._tags: dict[int, dict[str, frozenset[Hashable]]] = {}
        self._are_of_objects: dict[int, bool] = {}
        self._patterns: set[str] = set()
        """Patterns that are not too large."""

    def check(self, schema: Any, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _error(path, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(schema, bool):
            if not schema:
                raise _error(path, "the schema 'false' allows no value")
            return
        if not isinstance(schema, dict):
            raise _error(path, f"a schema is an object or a boolean, not {type(schema).__name__}")
        self._count(path, 1)
        self._budget.spend(path, 1)
        for keyword in ("properties", "required"):  # what some programs write for none
            if keyword in schema and schema[keyword] is None:
                del schema[keyword]
        if self._relaxation is not None:
            merge_all_of(schema)
        for keyword in _NEVER:
            if keyword in schema:
                self._cannot(schema, path, f"the keyword {keyword} is not supported", keyword)
        if schema.get("uniqueItems"):
            self._cannot(schema, path, "the keyword uniqueItems is not supported", "uniqueItems")
        self._definitions(schema, path)
        if self._relaxation is not None:
            self._drop_conflicts(schema, path)
        if "$ref" in schema:
            self._reference(schema, path, depth)
        elif "const" in schema:
            self._values(schema, path, "const", [schema["const"]])
        elif "enum" in schema:
            self._values(schema, path, "enum", schema["enum"])
        elif "anyOf" in schema or "oneOf" in schema or "allOf" in schema:
            self._combination(schema, path, depth)
        else:
            self._typed(schema, path, depth)

    def can_resolve(self) -> bool:
        """Whether all references still lead somewhere after what was dropped."""
        try:
            for uri in self._visited:
                self._resolve(uri, "$")
        except InvalidRequest:
            return False
        return True

    def _cannot(self, schema: dict[str, Any], path: str, message: str, *keywords: str) -> None:
        """Refuse a schema for keywords, or drop those of them that it has."""
        if self._relaxation is None:
            raise _error(path, message)
        self._relaxation.drop(schema, *(keyword for keyword in keywords if keyword in schema))

    def _drop_conflicts(self, schema: dict[str, Any], path: str) -> None:
        """Drop combinations of schemas that cannot be enforced as a whole."""
        assert self._relaxation is not None
        drop = self._relaxation.drop
        if "$ref" in schema:
            try:
                self._target(schema["$ref"], path)
            except InvalidRequest:
                drop(schema, "$ref")
        is_declared = "properties" in schema or "items" in schema or "prefixItems" in schema
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword not in schema or not isinstance(options := schema[keyword], list) or not options:
                continue  # absent or malformed
            if (
                is_declared
                or (keyword == "allOf" and len(options) > 1)
                or not self._agree(schema, keyword, path)
            ):
                drop(schema, keyword)
        if "oneOf" in schema and isinstance(options := schema["oneOf"], list) and len(options) > 1:
            try:
                self._check_exclusive(options, path)
            except InvalidRequest:
                if "anyOf" in schema:
                    drop(schema, "oneOf")
                else:
                    schema["anyOf"] = schema.pop("oneOf")
                    self._relaxation.keywords.add("oneOf")
        first = next((keyword for keyword in ("$ref", *_COMBINING) if keyword in schema), None)
        if first is not None:
            allowed = (first,) if first == "$ref" else (first, "type")
            drop(schema, *(each for each in _CONSTRAINTS if each in schema and each not in allowed))
        elif "type" not in schema and not is_declared and not schema.keys() & _TELLING:
            drop(schema, *(each for each in _CONSTRAINTS if each in schema))

    def _agree(self, schema: Mapping[str, Any], keyword: str, path: str) -> bool:
        """Whether each option has a type of its own, of those that the schema has beside them."""
        if "type" not in schema:
            return True
        types = _wider(_types(schema["type"], path))
        own = [self._possible_types(option, path) for option in schema[keyword]]
        return all(kinds and kinds <= types for kinds in own)

    def _check_child(self, parent: Any, key: Any, path: str, depth: int) -> None:
        """Check a schema within another. One that allows no value is relaxed to any value."""
        if self._relaxation is not None and parent[key] is False:
            self._relaxation.keywords.add("false")
            parent[key] = True
        self.check(parent[key], path, depth)

    def is_of_objects(self, schema: Any) -> bool:
        """Whether no value but an object meets a part of the root, which was checked."""
        schema = self._follow(schema, "$")
        if not isinstance(schema, dict):
            return False
        known = self._are_of_objects.get(id(schema))
        if known is None:
            self._are_of_objects[id(schema)] = True  # of a schema within itself, the other parts tell
            known = self._are_of_objects[id(schema)] = self._is_of_objects(schema)
        return known

    def _is_of_objects(self, schema: dict[str, Any]) -> bool:
        if "const" in schema:
            return isinstance(schema["const"], dict)
        if "enum" in schema:
            return all(isinstance(value, dict) for value in schema["enum"])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return all(self.is_of_objects(option) for option in schema[keyword])
        if "allOf" in schema:
            return any(self.is_of_objects(part) for part in schema["allOf"])
        if "type" in schema:
            return schema["type"] in ("object", ["object"])
        return "properties" in schema or "additionalProperties" in schema

    def _definitions(self, schema: dict[str, Any], path: str) -> None:
        """Check the form of definitions; their schemas are checked where a reference reaches them."""
        for keyword in ("$defs", "definitions"):
            if keyword in schema and not isinstance(schema[keyword], dict):
                raise _error(path, f"{keyword} must be an object")
        if path != "$" and "$id" in schema:
            message = "the keyword $id is not supported"  # it changes what references within lead to
            self._cannot(schema, path, message, "$id", "$ref", *_CONSTRAINTS)

    def _reference(self, schema: Mapping[str, Any], path: str, depth: int) -> None:
        _only(schema, path, "$ref", allowed=())
        uri = schema["$ref"]
        target = self._target(uri, path)
        if uri in self._visited:
            return
        self._visited.add(uri)
        if uri != "#":
            self.check(target, uri[:256], depth + 1)

    def _target(self, uri: Any, path: str) -> Any:
        """Return the schema at the end of the chain of references that begins with this one."""
        hops: dict[str, None] = {}
        while True:
            if isinstance(uri, str) and uri in self._targets:
                target = self._targets[uri]
                break
            target = self._resolve(uri, path)
            if uri in hops:
                raise _error(path, f"$ref {uri[:256]!r} leads back to itself")
            hops[uri] = None
            if not isinstance(target, dict) or "$ref" not in target:
                break
            uri = target["$ref"]
        self._targets.update(dict.fromkeys(hops, target))
        return target

    def _resolve(self, uri: Any, path: str) -> Any:
        if not isinstance(uri, str) or not (uri == "#" or uri.startswith("#/")) or "~" in uri or "%" in uri:
            raise _error(path, "$ref must be '#' or a plain '#/...' path inside this schema")
        target = self._root
        for part in filter(None, uri[2:].split("/")):
            if not isinstance(target, dict) or part not in target:
                raise _error(path, f"$ref {uri[:256]!r} leads nowhere")
            target = target[part]
        return target

    def _values(self, schema: dict[str, Any], path: str, keyword: str, values: Any) -> None:
        if not isinstance(values, list) or not values:
            raise _error(path, f"{keyword} must be a list of at least one value")
        _only(schema, path, keyword, allowed=("type",))
        self._count(path, len(values))
        self._budget.spend(path, len(values))
        if "type" in schema:
            types = _types(schema["type"], path)
            for value in values:
                if types.isdisjoint(_types_of_value(value)):
                    message = f"{keyword} has a value that is no {' or '.join(sorted(types))}"
                    if path == "$":
                        raise _error(path, message)
                    self._cannot(schema, path, message, "type")

    def _combination(self, schema: dict[str, Any], path: str, depth: int) -> None:
        keyword = next(keyword for keyword in ("anyOf", "oneOf", "allOf") if keyword in schema)
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise _error(path, f"{keyword} must be a list of at least one schema")
        if keyword == "allOf" and len(options) > 1:
            raise _error(path, "allOf of several schemas cannot be enforced: merge them into one")
        _only(schema, path, keyword, allowed=("type",))
        if "type" in schema:
            types = _types(schema["type"], path)
            for option in options:
                if not (own := self._possible_types(option, path)) or not own <= _wider(types):
                    raise _error(
                        path, f"type beside {keyword} cannot be enforced: give each option its own type"
                    )
        if keyword == "oneOf" and len(options) > 1:
            self._check_exclusive(options, path)
        for index in range(len(options)):
            self._check_child(options, index, f"{path}.{keyword}[{index}]", depth + 1)

    def _check_exclusive(self, options: list[Any], path: str) -> None:
        """Reject a oneOf whose options may overlap, because XGrammar treats it as an anyOf."""
        resolved = [self._follow(option, path) for option in options]
        types = [self._possible_types(option, path) for option in options]
        # An integer is a number too.
        types = [frozenset("number" if kind == "integer" else kind for kind in kinds) for kinds in types]
        if all(types) and sum(map(len, types)) == len(frozenset().union(*types)):
            return
        if len({id(option) for option in resolved}) == len(resolved) and self._have_exclusive_tags(
            resolved, path
        ):
            return
        raise _error(
            path, "oneOf whose options may overlap cannot be enforced: use anyOf, or a distinct const in each"
        )

    def _have_exclusive_tags(self, options: list[Any], path: str) -> bool:
        """Whether there is a required property for which each option has values that no other has."""
        tags = [self._option_tags(option) for option in options]
        self._budget.spend(path, sum(map(len, tags)))
        for name in set(tags[0]).intersection(*tags[1:]):
            values = [tag[name] for tag in tags]
            self._budget.spend(path, sum(map(len, values)))
            if sum(map(len, values)) == len(set().union(*values)):
                return True
        return False

    def _option_tags(self, option: Any) -> dict[str, frozenset[Hashable]]:
        if id(option) not in self._tags:
            self._tags[id(option)] = _tags(option)
        return self._tags[id(option)]

    def _follow(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        try:
            return self._target(schema["$ref"], path)
        except InvalidRequest:
            if self._relaxation is None:
                raise
            return {}  # the reference will be dropped

    def _possible_types(self, schema: Any, path: str) -> frozenset[str]:
        """Return the types that a schema's values can have; empty if it does not tell."""
        schema = self._follow(schema, path)
        if id(schema) not in self._types:
            self._types[id(schema)] = _types_of_schema(schema, path)
        return self._types[id(schema)]

    def _typed(self, schema: dict[str, Any], path: str, depth: int) -> None:
        if "type" in schema:
            types = _types(schema["type"], path)
        elif "properties" in schema or "additionalProperties" in schema or "unevaluatedProperties" in schema:
            types = frozenset({"object"})
        elif "items" in schema or "prefixItems" in schema or "unevaluatedItems" in schema:
            types = frozenset({"array"})
        else:
            for keyword in _CONSTRAINTS:
                if keyword in schema:
                    raise _error(path, f"{keyword} needs a type beside it")
            return
        if "object" in types:
            self._object(schema, path, depth)
        if "array" in types:
            self._array(schema, path, depth)
        if "string" in types:
            self._string(schema, path)
        if "integer" in types or "number" in types:
            self._number(schema, path, types)

    def _object(self, schema: dict[str, Any], path: str, depth: int) -> None:
        if self._relaxation is not None:
            self._relaxation.open_object(schema)
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise _error(path, "properties must be an object")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _error(path, "required must be a list of names")
        self._budget.spend(path, len(required))
        for name in required:
            if name not in properties:
                if self._relaxation is None:
                    raise _error(path, f"required names {name[:128]!r}, which is not among the properties")
                if not properties and "unevaluatedProperties" not in schema:
                    schema.setdefault("additionalProperties", True)
                properties = schema["properties"] = {**properties, name: {}}
        is_counted = _count_of(schema, "minProperties", path) > 0 or "maxProperties" in schema
        _count_of(schema, "maxProperties", path)
        self._count(path, len(properties) ** 2 if is_counted else len(properties))
        for name in properties:
            self._check_child(properties, name, f"{path}.properties.{name[:64]}", depth + 1)
        for keyword in ("additionalProperties", "unevaluatedProperties"):
            if not isinstance(schema.get(keyword, False), bool):
                self.check(schema[keyword], f"{path}.{keyword}", depth + 1)
        self._names(schema, path, depth)

    def _names(self, schema: dict[str, Any], path: str, depth: int) -> None:
        """Check what says which names an object's further properties may have."""
        properties = schema.get("properties", {})
        has_more = schema.get("additionalProperties", schema.get("unevaluatedProperties", False)) is not False
        if "patternProperties" in schema:
            patterns = schema["patternProperties"]
            if not isinstance(patterns, dict) or len(patterns) != 1 or properties or has_more:
                message = "patternProperties is supported as the only source of names, with one pattern"
                self._cannot(schema, path, message, "patternProperties")
            for pattern in schema.get("patternProperties", ()):
                self._check_pattern(schema, "patternProperties", pattern, path)
                if "patternProperties" in schema:
                    self._check_child(patterns, pattern, f"{path}.patternProperties", depth + 1)
            if "patternProperties" not in schema:  # names of the patterns were exempt from the other rules
                schema["additionalProperties"] = True
        if "propertyNames" in schema:
            if (
                properties
                or "patternProperties" in schema
                or schema.get("additionalProperties", True) is not True
            ):
                message = "propertyNames is supported only for an object without other rules on its names"
                self._cannot(schema, path, message, "propertyNames")
            elif self._relaxation is not None and isinstance(schema["propertyNames"], bool):
                self._relaxation.drop(schema, "propertyNames")
        if "propertyNames" in schema:
            if isinstance(schema["propertyNames"], dict):
                schema["propertyNames"].setdefault("type", "string")
            self.check(schema["propertyNames"], f"{path}.propertyNames", depth + 1)
        elif not properties and "patternProperties" not in schema and "unevaluatedProperties" not in schema:
            schema.setdefault("additionalProperties", True)

    def _array(self, schema: dict[str, Any], path: str, depth: int) -> None:
        if self._relaxation is not None and isinstance(schema.get("items"), list):
            self._relaxation.drop(schema, "items")
        if self._relaxation is not None:
            self._relaxation.open_array(schema)
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise _error(path, "prefixItems must be a list")
        self._count(path, len(prefix))
        for index, item in enumerate(prefix):
            prefix[index] = {} if item is True else item
            self._check_child(prefix, index, f"{path}.prefixItems[{index}]", depth + 1)
        for keyword in ("items", "unevaluatedItems"):
            if not isinstance(schema.get(keyword, False), bool):
                self.check(schema[keyword], f"{path}.{keyword}", depth + 1)
        _count_of(schema, "minItems", path)
        _count_of(schema, "maxItems", path)
        if not prefix and "unevaluatedItems" not in schema:
            schema.setdefault("items", True)

    def _string(self, schema: dict[str, Any], path: str) -> None:
        if not isinstance(schema.get("format", ""), str):
            raise _error(path, "format must be a string")
        given: list[str] = [keyword for keyword in ("format", "pattern") if keyword in schema]
        if schema.get("format") in _ANNOTATION_FORMATS:
            given.remove("format")
        has_length = _count_of(schema, "minLength", path) > 0 or "maxLength" in schema
        _count_of(schema, "maxLength", path)
        if self._relaxation is not None:  # what is dropped for itself is in the way of nothing
            given = self._enforced_texts(schema, path, given)
        if len(given) == 2:
            self._cannot(schema, path, "format and pattern cannot be enforced together", "format")
        if given and has_length:
            message = f"minLength and maxLength cannot be enforced beside {given[0]}"
            self._cannot(schema, path, message, "minLength", "maxLength")
        if self._relaxation is None:
            self._enforced_texts(schema, path, given)

    def _enforced_texts(self, schema: dict[str, Any], path: str, given: list[str]) -> list[str]:
        """Check `format` and `pattern`, each for itself; return those of them that are left."""
        if "format" in given and schema["format"] not in _FORMATS:
            message = (
                f"format {str(schema['format'])[:64]!r} is not supported; use {', '.join(sorted(_FORMATS))}"
            )
            self._cannot(schema, path, message, "format")
        if "pattern" in given:
            self._check_pattern(schema, "pattern", schema["pattern"], path)
        return [keyword for keyword in given if keyword in schema]

    def _number(self, schema: dict[str, Any], path: str, types: frozenset[str]) -> None:
        for keyword in _NUMBER:
            value = schema.get(keyword, 0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _error(path, f"{keyword} must be a number")
        if "multipleOf" not in schema:
            return
        step = schema["multipleOf"]
        if "number" in types or step != int(step) or not 0 < step <= _MAX_MULTIPLE:
            message = f"multipleOf is supported for integers, with a whole number up to {_MAX_MULTIPLE}"
            self._cannot(schema, path, message, "multipleOf")
            return
        low = max((schema[k] for k in ("minimum", "exclusiveMinimum") if k in schema), default=None)
        high = min((schema[k] for k in ("maximum", "exclusiveMaximum") if k in schema), default=None)
        if low is None and high is None and step > _MAX_UNBOUNDED_MULTIPLE:
            message = f"multipleOf without bounds is supported up to {_MAX_UNBOUNDED_MULTIPLE}"
            self._cannot(schema, path, message, "multipleOf")
        elif low is None and high is None:
            self._count(path, max(10, int(step)) * int(step))
        elif low is None or high is None or high - low > _MAX_MULTIPLE_RANGE:
            message = f"multipleOf beside bounds needs both, at most {_MAX_MULTIPLE_RANGE} apart"
            self._cannot(schema, path, message, "multipleOf")
        else:
            self._count(path, int(high - low) // int(step))

    def _check_pattern(self, schema: dict[str, Any], keyword: str, pattern: object, path: str) -> None:
        if isinstance(pattern, str) and pattern in self._patterns:
            return
        try:
            check_pattern(pattern)
        except InvalidRequest as error:
            if self._relaxation is None or not isinstance(pattern, str):
                raise _error(path, f"pattern {error}") from None
            self._relaxation.drop(schema, keyword)
            return
        self._patterns.add(str(pattern))

    def _count(self, path: str, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise _error(path, "the schema is too large")


def _only(schema: Mapping[str, Any], path: str, keyword: str, allowed: Iterable[str]) -> None:
    """Reject constraints beside a keyword that makes XGrammar ignore them."""
    for other in _CONSTRAINTS:
        if other in schema and other != keyword and other not in allowed:
            raise _error(path, f"{other} beside {keyword} cannot be enforced")


def _types(value: Any, path: str) -> frozenset[str]:
    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, list)
        or not 1 <= len(names) <= len(_TYPES)
        or not all(name in _TYPES for name in names if isinstance(name, str))
    ):
        raise _error(path, f"type must be one or a list of {', '.join(_TYPES)}")
    if not all(isinstance(name, str) for name in names):
        raise _error(path, "type must be a string or a list of strings")
    return frozenset(names)


def _wider(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def _types_of_value(value: Any) -> tuple[str, ...]:
    """Return the type names that apply to a value, the narrowest first."""
    match value:
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("integer", "number") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case None:
            return ("null",)
        case list():
            return ("array",)
        case _:
            return ("object",)


def _types_of_schema(schema: Any, path: str) -> frozenset[str]:
    """Return the types that the values of a schema other than a reference can have; empty if it does not tell."""
    if not isinstance(schema, dict):
        return frozenset()
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return (
            frozenset(_types_of_value(value)[0] for value in values)
            if isinstance(values, list)
            else frozenset()
        )
    return _types(schema["type"], path) if "type" in schema else frozenset()


def _tags(schema: Any) -> dict[str, frozenset[Hashable]]:
    """Return the values, as `_comparable`, of each required property for which an object schema lists its values."""
    required = schema.get("required") if isinstance(schema, dict) else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(required, list) or not isinstance(properties, dict):
        return {}
    tags = {}
    for name in {name for name in required if isinstance(name, str)}:
        value = properties.get(name)
        if not isinstance(value, dict):
            continue
        if "const" in value:
            tags[name] = frozenset({_comparable(value["const"])})
        elif isinstance(value.get("enum"), list) and value["enum"]:
            tags[name] = frozenset(map(_comparable, value["enum"]))
    return tags


def _comparable(value: Any) -> Hashable:
    """Return a key that is equal for values that JSON Schema holds equal: 1 and 1.0 are, true and 1 are not."""
    match value:
        case dict():
            return "object", frozenset((name, _comparable(item)) for name, item in value.items())
        case list():
            return "array", tuple(_comparable(item) for item in value)
        case bool():
            return "boolean", value
        case int() | float() if abs(value) > _MAX_HASHED and math.isfinite(value):
            return "number", str(int(value))
        case _:
            return value


def _count_of(schema: Mapping[str, Any], keyword: str, path: str) -> int:
    value = schema.get(keyword, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise _error(path, f"{keyword} must be a whole number between 0 and {_MAX_COUNT}")
    return value


def _error(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{message} (at {path[:256]})")


OPEN_OBJECT = {"type": "object", "additionalProperties": True}
_IN_PLACE = ("if", "then", "else", "anyOf", "oneOf", "allOf")
"""Keywords whose schemas apply to the value itself, and declare its properties; `not` declares none."""
_NAMING = frozenset(
    (
        "$ref", "$dynamicRef", "$recursiveRef", "$id", "dependentSchemas", "dependencies", "dependentRequired",
        "patternProperties", "propertyNames", "items", "prefixItems", "contains", "additionalItems",
        "unevaluatedItems",
    )
)  # fmt: skip
"""Keywords that may name anything, as far as this module looks."""
_HARMLESS = frozenset(("not", "propertyNames"))
"""Keywords that name nothing, whatever they hold."""


class Relaxation:
    """What is left out of a tool's schema because no grammar enforces it.

    Invariant: what is left accepts all that the schema accepts. A keyword is dropped where it stands. An object without
    `additionalProperties` has no properties but those it declares, so if what was dropped may have named others, the
    schema is checked again with all such objects open.

    Args:
        is_open: whether objects and arrays that do not say whether they may have more than they declare may do so.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.must_open = False
        """Whether what was dropped may have named properties or items that the rest does not declare."""
        self.keywords: set[str] = set()
        """Keywords that were dropped somewhere."""

    def drop(self, schema: dict[str, Any], *keywords: str) -> None:
        """Drop keywords from a schema that has them."""
        for keyword in keywords:
            value = schema.pop(keyword)
            self.keywords.add(keyword)
            if keyword in _HARMLESS:
                continue
            declared = schema.get("properties")
            known = declared if isinstance(declared, Mapping) else ()
            if not _may_name({keyword: value}, known, 0):
                continue
            self.must_open = True
            for limit in ("unevaluatedProperties", "unevaluatedItems"):  # they knew what was dropped
                schema.pop(limit, None)

    def open_object(self, schema: dict[str, Any]) -> None:
        """Let an object have properties that it does not declare, unless it says whether it may."""
        if self.is_open and "unevaluatedProperties" not in schema:
            schema.setdefault("additionalProperties", True)

    def open_array(self, schema: dict[str, Any]) -> None:
        """Let an array have items that it does not declare, unless it says whether it may."""
        if self.is_open and "unevaluatedItems" not in schema:
            schema.setdefault("items", True)


def merge_all_of(schema: dict[str, Any]) -> None:
    """Merge the objects of `allOf` into a schema if each merely declares properties and no two the same one."""
    parts = schema.get("allOf")
    if not isinstance(parts, list) or len(parts) < 2 or not all(map(_is_plain, parts)):
        return
    rest = {
        keyword: value
        for keyword, value in schema.items()
        if keyword not in ("allOf", "$defs", "definitions")
    }
    if not _is_plain({"type": "object", **rest}):
        return
    properties, required = dict(rest.get("properties") or {}), list(rest.get("required") or ())
    for part in parts:
        named = part.get("properties", {})
        if properties.keys() & named.keys():
            return
        properties |= named
        required += part.get("required", ())
    del schema["allOf"]
    schema |= {"type": "object", "properties": properties, "required": list(dict.fromkeys(required))}


_PLAIN = frozenset(("type", "properties", "required", "title", "description", "$schema"))


def _is_plain(schema: Any) -> bool:
    """Whether a schema does nothing but declare properties of an object."""
    return (
        isinstance(schema, dict)
        and schema.get("type") == "object"
        and schema.keys() <= _PLAIN
        and isinstance(schema.get("properties", {}), dict)
        and isinstance(names := schema.get("required", []), list)
        and all(isinstance(name, str) for name in names)
    )


def _may_name(schema: Any, known: Collection[str], depth: int) -> bool:
    """Whether a schema may declare properties other than `known`, anything within them, or items.

    Args:
        known: names that the schema which it applies beside declares.
    """
    if depth > MAX_DEPTH:
        return True
    if not isinstance(schema, Mapping):
        return False
    for keyword, value in schema.items():
        if keyword in _NAMING:
            return True
        if keyword in ("additionalProperties", "unevaluatedProperties"):
            if value is not False:
                return True
        elif keyword == "required":
            if not isinstance(value, list) or not all(
                isinstance(name, str) and name in known for name in value
            ):
                return True
        elif keyword == "properties":
            if not isinstance(value, Mapping) or any(
                name not in known or _may_name(each, (), depth + 1) for name, each in value.items()
            ):
                return True
        elif keyword in _IN_PLACE:
            options = value if isinstance(value, list) else [value]
            if any(_may_name(option, known, depth + 1) for option in options):
                return True
    return False
