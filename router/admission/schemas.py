"""Whether a document is a JSON schema, as far as its form shows it.

What a schema says is its author's: a schema that nothing can fulfil is one. What is wrong with its form would fail
where it is used, far from whoever can mend it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 64

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_ONE = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPPINGS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_TEXTS = ("$ref", "description", "format", "pattern", "title")
_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")


def schema_problems(schema: Any, *, path: str = "", depth: int = 0) -> Iterator[str]:
    """What is wrong with the schema, each with the path within it."""
    where = path or "the schema"
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield f"{where} must be an object"
        return
    if depth > MAX_DEPTH:
        yield f"{where} is nested deeper than {MAX_DEPTH} schemas"
        return
    yield from _own_problems(schema, where)
    for name, part in _parts(schema):
        yield from schema_problems(part, path=f"{path}.{name}" if path else name, depth=depth + 1)


def _own_problems(schema: dict[str, Any], where: str) -> Iterator[str]:
    """Of the schema without those that it holds."""
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            yield f"{where}: type must be one of {', '.join(_TYPES)}, is {kind!r:.40}"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield f"{where}: required must be a list of names"
    if not isinstance(schema.get("enum", []), list):
        yield f"{where}: enum must be a list"
    expected = ((_MAPPINGS, dict, "an object"), (_LISTS, list, "a list"), (_TEXTS, str, "a string"))
    for names, type_, words in (*expected, (_NUMBERS, (int, float), "a number"), (_COUNTS, int, "a whole number")):
        for name in names:
            value = schema.get(name)
            if name in schema and (not isinstance(value, type_) or (isinstance(value, bool) and type_ is not dict)):
                yield f"{where}: {name} must be {words}"


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas that a schema holds, with their names in it."""
    for name in _ONE:
        if name in schema and not (name == "items" and isinstance(schema[name], list)):
            yield name, schema[name]
    for name in (*_LISTS, "items"):
        if isinstance(schema.get(name), list):
            yield from ((f"{name}[{index}]", part) for index, part in enumerate(schema[name]))
    for name in _MAPPINGS:
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}.{key}", part) for key, part in schema[name].items())
