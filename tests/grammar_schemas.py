"""A hundred JSON schemas, each of its own shape: what applications ask for, and every keyword that both sides know.

Texts are short where a length can be said, as the outputs come from a model of random weights.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(longest: int = 8, **more: Any) -> Schema:
    return {"type": "string", "maxLength": longest, **more}


def integer(low: int | None = None, high: int | None = None, **more: Any) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}, **more}


def record(*, required: tuple[str, ...] | None = None, closed: bool = True, **properties: Schema) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    schema["required"] = list(properties if required is None else required)
    return {**schema, "additionalProperties": False} if closed else schema


def items(schema: Schema, shortest: int = 0, longest: int = 3) -> Schema:
    return {"type": "array", "items": schema, "minItems": shortest, "maxItems": longest}


def one_of_texts(*values: str) -> Schema:
    return {"enum": list(values)}


BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
NUMBER: Schema = {"type": "number", "minimum": -10, "maximum": 10}
POINT = record(x=integer(0, 99), y=integer(0, 99))
TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {"node": record(value=integer(0, 9), children=items({"$ref": "#/$defs/node"}, longest=1))},
}
LINKED: Schema = {
    "$ref": "#/$defs/link",
    "$defs": {"link": record(name=text(3), next={"anyOf": [NULL, {"$ref": "#/$defs/link"}]})},
}

SCALARS: dict[str, Schema] = {
    "boolean": BOOLEAN,
    "null": NULL,
    "small integer": integer(0, 9),
    "negative integer": integer(-99, -10),
    "integer around zero": integer(-3, 3),
    "integer from": integer(1000),
    "integer up to": integer(high=-5),
    "exclusive integers": {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 9},
    "even integer": integer(0, 200, multipleOf=2),
    "multiple of seven": integer(7, 700, multipleOf=7),
    "number in range": NUMBER,
    "positive number": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "number between halves": {"type": "number", "minimum": -0.5, "maximum": 0.5},
    "any number": {"type": "number"},
    "short text": text(),
    "text of exact length": text(4, minLength=4),
    "text of some length": text(12, minLength=5),
    "empty text": text(0),
    "constant text": {"const": "fixed"},
    "constant with quotes": {"const": 'say "hi"\n'},
    "constant number": {"const": 42},
    "constant object": {"const": {"a": [1, None, True]}},
    "enumeration": one_of_texts("red", "green", "blue"),
    "enumeration of all types": {"enum": ["one", 1, 1.5, None, False]},
    "enumeration of prefixes": one_of_texts("a", "ab", "abc", "abcd"),
    "enumeration in other scripts": one_of_texts("größer", "日本", "мир", "🙂"),
    "several types": {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    "text or boolean": {"type": ["string", "boolean"], "maxLength": 3},
}
STRINGS: dict[str, Schema] = {
    "digits": {"type": "string", "pattern": "^[0-9]{3}$"},
    "plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2,4}$"},
    "alternatives": {"type": "string", "pattern": "^(cat|dog|bird)s?$"},
    "hexadecimal colour": {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    "version": {"type": "string", "pattern": "^v[0-9]{1,2}\\.[0-9]{1,2}$"},
    "word characters": {"type": "string", "pattern": "^\\w{2,5}$"},
    "escaped dot": {"type": "string", "pattern": "^a\\.b$"},
    "pattern and length": {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date and time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email", "maxLength": 20},
    "hostname": {"type": "string", "format": "hostname", "maxLength": 20},
    "duration": {"type": "string", "format": "duration"},
}
ARRAYS: dict[str, Schema] = {
    "integers": items(integer(0, 9)),
    "at least two": items(integer(0, 9), shortest=2, longest=4),
    "exactly three": items(BOOLEAN, shortest=3, longest=3),
    "empty array": items(NULL, longest=0),
    "texts": items(text(4)),
    "colours": items(one_of_texts("red", "green"), shortest=1),
    "rows and columns": items(items(integer(0, 1), shortest=2, longest=2), shortest=2, longest=2),
    "three levels": items(items(items(NULL, 1, 1), 1, 1), 1, 1),
    "points": items(POINT, shortest=1, longest=2),
    "tuple": {"type": "array", "prefixItems": [text(3), integer(0, 9), BOOLEAN], "items": False, "minItems": 3},
    "tuple with a tail": {
        "type": "array",
        "prefixItems": [one_of_texts("sum")],
        "items": integer(0, 9),
        "minItems": 2,
        "maxItems": 4,
    },
    "numbers or texts": items({"anyOf": [integer(0, 9), text(2)]}, shortest=2),
    "nothing or numbers": items({"type": ["null", "integer"], "minimum": 0, "maximum": 9}, shortest=1),
}
OBJECTS: dict[str, Schema] = {
    "point": POINT,
    "person": record(name=text(), age=integer(0, 130), email={"type": "string", "format": "email", "maxLength": 16}),
    "all optional": record(required=(), a=integer(0, 9), b=BOOLEAN, c=NULL),
    "some optional": record(required=("id",), id=integer(1, 999), note=text(5), done=BOOLEAN),
    "last required": record(required=("z",), a=BOOLEAN, m=BOOLEAN, z=BOOLEAN),
    "no property": {"type": "object", "additionalProperties": False},
    "open object": record(required=("kind",), closed=False, kind=one_of_texts("open")),
    "map of integers": {"type": "object", "additionalProperties": integer(0, 9), "maxProperties": 1},
    "required without schema": {"type": "object", "required": ["any"], "additionalProperties": integer(0, 9)},
    "object in object": record(outer=record(inner=record(leaf=BOOLEAN))),
    "array in object": record(values=items(integer(0, 9)), name=text(4)),
    "order": record(
        id={"type": "string", "pattern": "^[A-Z]{3}[0-9]{3}$"},
        lines=items(record(sku=text(4), count=integer(1, 20)), shortest=1, longest=2),
        paid=BOOLEAN,
    ),
    "address": record(
        street=text(10), zip={"type": "string", "pattern": "^[0-9]{5}$"}, country=one_of_texts("DE", "FR", "PL")
    ),
    "weather": record(
        temperature=NUMBER, unit=one_of_texts("C", "F"), wind=record(speed=integer(0, 200), from_=text(2))
    ),
    "sentiment": record(label=one_of_texts("positive", "neutral", "negative"), score=NUMBER),
    "calendar": record(day={"type": "string", "format": "date"}, invited=items(text(5), shortest=1)),
    "book": record(title=text(10), year=integer(1450, 2100), tags=items(text(4)), price=NUMBER),
    "tool call": record(name={"const": "search"}, arguments=record(query=text(10), limit=integer(1, 50))),
    "keys with spaces": {
        "type": "object",
        "properties": {"first name": text(4), "größe": integer(0, 9), 'a"b': NULL},
        "required": ["first name", "größe", 'a"b'],
        "additionalProperties": False,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n[0-9]$": integer(0, 9)},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    "null or object": {"anyOf": [NULL, POINT]},
    "settings": record(required=("mode",), mode=one_of_texts("on", "off"), level=integer(0, 3), extra=record()),
    "coordinates": record(lat={"type": "number", "minimum": -90, "maximum": 90}, lon=NUMBER),
    "titles and descriptions": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A thing",
        "description": "Words for people.",
        **record(id={"description": "its number", "default": 1, "examples": [2], **integer(0, 9)}),
    },
    "deep": record(a=record(b=record(c=record(d=record(e=record(f=integer(0, 1))))))),
    "wide": record(**{f"field_{index}": BOOLEAN for index in range(16)}),
}
COMBINED: dict[str, Schema] = {
    "either type": {"anyOf": [integer(0, 9), text(3)]},
    "either object": {"anyOf": [record(a=integer(0, 9)), record(b=BOOLEAN)]},
    "tagged union": {
        "anyOf": [
            record(kind={"const": "circle"}, radius=integer(1, 9)),
            record(kind={"const": "square"}, side=integer(1, 9)),
        ]
    },
    "one of disjoint": {"oneOf": [integer(0, 9), BOOLEAN, NULL]},
    "all of bounds": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 20}]},
    "all of records": {
        "allOf": [
            {"type": "object", "properties": {"a": integer(0, 9)}, "required": ["a"]},
            {"type": "object", "properties": {"b": BOOLEAN}, "required": ["b"]},
        ]
    },
    "definition": {**record(p={"$ref": "#/$defs/p"}, q={"$ref": "#/$defs/p"}), "$defs": {"p": POINT}},
    "older definitions": {**record(p={"$ref": "#/definitions/p"}), "definitions": {"p": integer(0, 9)}},
    "reference with siblings": {
        **record(v={"$ref": "#/$defs/v", "maximum": 5}),
        "$defs": {"v": integer(0, 9)},
    },
    "definitions in a row": {
        **record(a={"$ref": "#/$defs/a"}),
        "$defs": {"a": items({"$ref": "#/$defs/b"}, 1, 2), "b": {"$ref": "#/$defs/c"}, "c": one_of_texts("x", "y")},
    },
    "tree": TREE,
    "linked list": LINKED,
    "list of unions": items({"anyOf": [POINT, NULL, one_of_texts("origin")]}, shortest=1, longest=2),
    "union in a union": {"anyOf": [{"anyOf": [NULL, BOOLEAN]}, {"anyOf": [integer(0, 9), text(2)]}]},
    "optional union": record(required=(), v={"anyOf": [integer(0, 9), NULL]}),
    "map of unions": {
        "type": "object",
        "additionalProperties": {"anyOf": [BOOLEAN, integer(0, 9)]},
        "maxProperties": 1,
    },
}

SCHEMAS = {**SCALARS, **STRINGS, **ARRAYS, **OBJECTS, **COMBINED}
