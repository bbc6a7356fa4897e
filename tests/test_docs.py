"""What the documentation names exists: the pages and sections that it links to, flags, and variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from decode_worker.config import DecodeSettings
from prefill_worker.config import PrefillSettings
from router.config import RouterSettings
from twinstage.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9_-]*[a-z0-9])")
VARIABLE = re.compile(r"\bTWINSTAGE_[A-Z_]+[A-Z]\b")
SETTINGS = [name for kind in (RouterSettings, PrefillSettings, DecodeSettings) for name in kind.model_fields]
# Of docker, pip, protoc, buf, ghz and mypy; and of `python -m bench`, whose parser needs what only a benchmark has.
FLAGS_OF_OTHERS = {
    *("scale", "find-links", "extra-index-url", "no-deps", "http2-prior-knowledge", "protocol", "insecure", "call"),
    *("go_out", "go-grpc_out", "java_out", "grpc-java_out", "go_opt", "go-grpc_opt", "list", "missing", "no-peers"),
    *("peers-at", "protoset", "strict"),
}
# Of compose.yaml, of the bench, and of processes beside their settings.
MORE_VARIABLES = {"CACHE", "WHEELS", "PORT", "BENCH_HOME"}


def _flags() -> Iterator[str]:
    for name in SETTINGS:
        yield name.replace("_", "-")
        yield f"no-{name.replace('_', '-')}"
    yield "help"
    for command in typer.main.get_group(app).commands.values():
        for parameter in command.params:
            yield from (option.removeprefix("--") for option in (*parameter.opts, *parameter.secondary_opts))


def _variables() -> Iterator[str]:
    yield from (name.upper() for name in SETTINGS)
    for command in typer.main.get_group(app).commands.values():
        for parameter in command.params:
            if isinstance(parameter.envvar, str):
                yield parameter.envvar.removeprefix("TWINSTAGE_")


FLAGS = FLAGS_OF_OTHERS.union(_flags())
VARIABLES = MORE_VARIABLES.union(_variables())


def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_flags_and_variables_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in LINK.findall(CODE.sub("", text)):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), f"{target}#{anchor}"
    assert set(FLAG.findall(text)) - FLAGS == set()
    assert {name.removeprefix("TWINSTAGE_") for name in VARIABLE.findall(text)} - VARIABLES == set()


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 300
