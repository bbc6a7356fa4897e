"""Commands that take groups of flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, get_args, get_type_hints

import pytest
import typer
from pydantic import ByteSize
from typer.testing import CliRunner

from decode_worker.config import DecodeSettings
from router.config import RouterSettings
from twinstage.cli.bench_flags import DEFAULT_CONCURRENCY, LoadFlags
from twinstage.cli.cluster_flags import ClusterFlags, EngineFlags
from twinstage.cli.flags import PlainCommand, takes_flag_groups


@dataclass(frozen=True, kw_only=True)
class Sizes:
    width: Annotated[int, typer.Option("--width", min=1)]
    names: Annotated[list[str], typer.Option("--name")] = field(default_factory=lambda: ["a"])


@dataclass(frozen=True, kw_only=True)
class Colours:
    colour: Annotated[str, typer.Option("--colour")] = "red"


@dataclass(frozen=True, kw_only=True)
class Clash:
    width: Annotated[int, typer.Option("--other-width")] = 1


@takes_flag_groups
def paint(*, what: Annotated[str, typer.Argument(metavar="WHAT")], sizes: Sizes, colours: Colours) -> None:
    """Paint WHAT."""
    print(what, sizes, colours)


def test_a_command_takes_the_fields_of_its_groups() -> None:
    app = typer.Typer()
    app.command()(paint)
    run = CliRunner().invoke
    done = run(app, ["door", "--width", "3", "--name", "x", "--name", "y"])
    assert done.output.strip() == f"door {Sizes(width=3, names=['x', 'y'])} {Colours()}"
    assert run(app, ["door", "--width", "3", "--colour", "blue"]).output.endswith(f"{Colours(colour='blue')}\n")
    assert run(app, ["door"]).exit_code == 2  # a field without a default is required
    assert run(app, ["door", "--width", "0"]).exit_code == 2
    assert "Paint WHAT." in run(app, ["--help"]).output


def test_help_says_what_to_write_and_not_how_python_calls_it() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=PlainCommand)(paint)
    lines = [line.split() for line in CliRunner().invoke(app, ["--help"]).output.splitlines()]
    assert [line[:2] for line in lines if line[:1] in (["--width"], ["--name"], ["--colour"], ["WHAT"])] == [
        ["WHAT", "[required]"],
        ["--width", "NUMBER"],
        ["--name", "TEXT"],
        ["--colour", "TEXT"],
    ]


@pytest.mark.parametrize("group", [ClusterFlags, EngineFlags])
def test_serve_shows_the_defaults_of_the_processes_that_it_starts(group: type) -> None:
    fields = DecodeSettings.model_fields | RouterSettings.model_fields
    hints = get_type_hints(group, include_extras=True)
    unset = [entry.name for entry in dataclasses.fields(group) if entry.default is None]
    shown = {name: get_args(hints[name])[1].show_default for name in unset}
    defaults = {name: fields[name].default for name in unset if name in fields}
    assert {name: text for name, text in shown.items() if text is not True} == {
        name: default.human_readable().replace(".0", "") if isinstance(default, ByteSize) else str(default)
        for name, default in defaults.items()
        if default not in (None, [])
    }


def test_two_groups_with_the_same_flag_are_refused() -> None:
    def paint(*, sizes: Sizes, clash: Clash) -> None: ...

    paint.__annotations__ = {"sizes": Sizes, "clash": Clash, "return": None}
    with pytest.raises(TypeError, match="width"):
        takes_flag_groups(paint)


@pytest.mark.parametrize(
    ("flags", "has_trace", "expected"),
    [
        (LoadFlags(), False, (DEFAULT_CONCURRENCY, None)),
        (LoadFlags(), True, (None, None)),
        (LoadFlags(rate=2.0), False, (None, 2.0)),
        (LoadFlags(sweep_rate="3,5"), False, (None, 3.0)),
        (LoadFlags(sweep_concurrency="8,16"), False, (8, None)),
        (LoadFlags(concurrency=1, sweep_concurrency="8"), False, (1, None)),
    ],
)
def test_the_first_load_of_a_run(flags: LoadFlags, has_trace: bool, expected: tuple[int | None, float | None]) -> None:
    assert flags.first_level(has_trace=has_trace) == expected
