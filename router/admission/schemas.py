"""Whether a document is a JSON schema, as far as its form shows it.

What a schema says is its author's: a schema that nothing can fulfil is one. What is wrong with its form would fail
where it is used, far from whoever can mend it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.limits import MAX_SCHEMAS

MAX_DEPTH = 64

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_SCHEMAS = frozenset(
    {"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then", "unevaluatedProperties"}
)
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPPINGS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
# Of the other keywords, what their values are.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(_LISTS, (list, "a list")),
    **dict.fromkeys(_MAPPINGS, (dict, "an object")),
    **dict.fromkeys(("$ref", "description", "format", "pattern", "title"), (str, "a string")),
    **dict.fromkeys(
        ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"), ((int, float), "a number")
    ),
    **dict.fromkeys(
        ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"), (int, "a whole number")
    ),
    "enum": (list, "a list"),
}


class SchemaRules:
    """Judges the schemas of one request, of which only so many are looked at: this runs on the event loop."""

    def __init__(self) -> None:
        self._room = MAX_SCHEMAS

    def problems(self, schema: Any, *, path: str = "", depth: int = 0) -> Iterator[str]:
        """What is wrong with a schema and those that it holds, each with the path within it."""
        where = path or "the schema"
        self._room -= 1
        if self._room < 0:
            if self._room == -1:
                yield f"{where}: there are more than {MAX_SCHEMAS} schemas within the tools of the request"
            return
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            yield f"{where} must be an object"
            return
        if depth > MAX_DEPTH:
            yield f"{where} is nested deeper than {MAX_DEPTH} schemas"
            return
        for name, value in schema.items():
            if problem := _problem(name, value):
                yield f"{where}: {problem}"
                continue
            for key, part in _parts(name, value):
                yield from self.problems(part, path=f"{path}.{key}" if path else key, depth=depth + 1)


def _problem(name: str, value: Any) -> str:
    """What is wrong with the value of a keyword, the schemas in it aside."""
    if name == "type":
        kinds = value if isinstance(value, list) else [value]
        unknown = [kind for kind in kinds if kind not in _TYPES]
        return f"type must be one of {', '.join(_TYPES)}, is {unknown[0]!r:.40}" if unknown else ""
    if name == "required":
        is_right = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        return "" if is_right else "required must be a list of names"
    kind, words = _KINDS.get(name, (object, ""))
    is_truth = isinstance(value, bool) and words != ""  # which Python takes for a number
    return f"{name} must be {words}" if is_truth or not isinstance(value, kind) else ""


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The schemas in the value of a keyword, with their paths."""
    if name in _LISTS or (name == "items" and isinstance(value, list)):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
    elif name in _SCHEMAS:
        yield name, value
    elif name in _MAPPINGS:
        yield from ((f"{name}.{key}", part) for key, part in value.items())
