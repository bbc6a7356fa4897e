"""What an installation gets: bounded dependencies that the pinned ones satisfy, and types."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
BY_DATE = {"structlog"}  # whose versions say nothing of what they break


def _requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in (*project["dependencies"], *optional)]


def _pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


def test_every_dependency_ends_before_the_next_version_that_may_break_it() -> None:
    unbounded = [
        requirement.name
        for requirement in _requirements()
        if not any(bound.operator in {"<", "=="} for bound in requirement.specifier)
    ]
    assert set(unbounded) == BY_DATE


def test_pinned_versions_are_within_the_bounds() -> None:
    pinned = _pinned()
    wrong = [
        f"{requirement} is pinned to {version}"
        for requirement in _requirements()
        if (version := pinned.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(version)
    ]
    assert not wrong


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "twinstage" / "py.typed").is_file()
