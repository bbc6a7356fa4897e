"""What xgrammar (0.2.8) does not heed of a JSON schema, so that outputs need not satisfy it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# What it reads over, or does not see to in every case: with minLength and maxLength, strings may have control
# characters; several schemas of allOf allow anything.
_UNSUPPORTED = frozenset(
    {
        "allOf",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "maxLength",
        "minContains",
        "minLength",
        "multipleOf",
        "not",
        "oneOf",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
        "$dynamicRef",
        "$recursiveRef",
    }
)
# Beside one of these it heeds no other keyword; values may have their type beside them, and one value may be both.
_VALUES = ("const", "enum")
_ALONE = (*_VALUES, "anyOf", "$ref")
_HEEDED = frozenset(
    {
        *_ALONE,
        "additionalProperties",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "items",
        "maxItems",
        "maxProperties",
        "maximum",
        "minItems",
        "minProperties",
        "minimum",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
    }
)
_HOLDS_A_SCHEMA_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_HOLDS_DATA = frozenset({"const", "enum", "default", "examples"})
_TYPES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),  # which Python takes for a number
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)


def not_heeded(schema: Any) -> Iterator[str]:
    """The keywords, of a schema and of those within it, that are not heeded where they stand."""
    if isinstance(schema, list):
        for entry in schema:
            yield from not_heeded(entry)
    if not isinstance(schema, dict):
        return
    yield from _of_one(schema)
    for keyword, value in schema.items():
        if keyword in _HOLDS_A_SCHEMA_BY_NAME and isinstance(value, dict):
            yield from not_heeded(list(value.values()))
        elif keyword not in _HOLDS_DATA:
            yield from not_heeded(value)


def _of_one(schema: dict[str, Any]) -> Iterator[str]:
    yield from _UNSUPPORTED & schema.keys()
    for keyword in _ALONE:
        if keyword in schema and not _is_alone(keyword, schema):
            yield f"other keywords beside {keyword}"
    reference = schema.get("$ref", "#")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        yield "$ref to anything but # and what follows #/"  # anchors and other documents, for which it allows anything
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield "required that is no list of names"  # of a draft before the fourth, or plainly wrong
    elif isinstance(properties, dict) and not set(required) <= set(properties):
        yield "required of what properties does not name"
    if schema.get("patternProperties") and schema.get("additionalProperties") is not False:
        yield "patternProperties without additionalProperties: false"  # whose names may match, too


def _is_alone(keyword: str, schema: dict[str, Any]) -> bool:
    others = (_HEEDED & schema.keys()) - {keyword}
    if keyword not in _VALUES or not others <= {"type", *_VALUES}:
        return not others
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if schema.get("enum", values) != values:
        return False  # of both, it heeds one
    return "type" not in schema or _all_are_of(values, schema["type"])


def _all_are_of(values: Any, types: Any) -> bool:
    names = {*map(str, types if isinstance(types, list) else [types])}
    return isinstance(values, list) and all(_types_of(value) & names for value in values)


def _types_of(value: Any) -> set[str]:
    return set(next(names for kind, names in _TYPES if isinstance(value, kind)))
