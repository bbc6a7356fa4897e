"""Groups of flags: a command takes a few dataclasses, and typer sees the fields of all of them as its options.

@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False

@app.command()
@takes_flag_groups
def bench(*, outputs: OutputFlags) -> None: ...
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.core import TyperArgument, TyperCommand
from typer.models import OptionInfo

# What to write, for people: Python calls it int range and list[str].
_WORDS_FOR_TYPES = {int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}


class PlainCommand(TyperCommand):
    """A command whose help says nothing of the Python types of its arguments."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):
                parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]


def takes_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters are the fields of the dataclasses that `command` takes, and its other parameters.

    All are passed by name. Raises TypeError when two groups have a field of the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _fields_of(kind)
        else:
            parameters.append(parameter.replace(annotation=_in_words(kind), kind=inspect.Parameter.KEYWORD_ONLY))
    names = [parameter.name for parameter in parameters]
    if len(names) != len(set(names)):
        raise TypeError(f"{command.__name__} takes two flags of the same name: {', '.join(sorted(names))}")

    @wraps(command)
    def with_groups(**values: Any) -> None:
        found = {
            name: group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**values, **found)

    with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_groups


def _fields_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = inspect.Parameter.empty
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_in_words(hints[field.name])
        )


def _in_words(annotation: Any) -> Any:
    """The annotation of an option, whose help names its value in a word unless it has one already."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *marks = get_args(annotation)
    members = {member for member in (get_args(kind) or (kind,)) if member is not NoneType}
    if len(members) != 1:
        return annotation
    member = members.pop()
    word = _WORDS_FOR_TYPES.get((get_args(member) or (member,))[0])
    for mark in marks:
        if isinstance(mark, OptionInfo) and mark.metavar is None:
            mark.metavar = word
    return annotation
