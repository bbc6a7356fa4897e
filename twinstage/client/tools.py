"""Tools for models to call, made from what a caller has: a Python function or a JSON schema."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from twinstage.types import Tool


def tool_from_function(function: Callable[..., Any]) -> Tool:
    """The tool that a function is: its name, its docstring and, by its annotations, the schema of its arguments.

    Raises TypeError for a function whose arguments have no JSON schema, or may not be given by name.
    """
    from pydantic import PydanticUserError, TypeAdapter

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
        schema = adapter.json_schema()
    except PydanticUserError as error:
        raise TypeError(f"{function.__name__} cannot be a tool: {error.message.splitlines()[0]}") from error
    if schema.get("type") != "object":
        raise TypeError(f"{function.__name__} cannot be a tool: it has arguments without names")
    return tool_from_schema(function.__name__, inspect.getdoc(function) or "", schema)


def tool_from_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    """A tool whose arguments are described by a JSON schema."""
    return Tool(name=name, description=description, parameters=json.dumps(parameters, ensure_ascii=False))
