"""The examples of docs/client.md run as they stand, on a router whose workers have no model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from router_thread import RunningRouter

PAGE = Path(__file__).resolve().parent.parent / "docs" / "client.md"
EXAMPLES = re.findall(r"## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with RunningRouter() as port:
        yield port


def test_every_example_is_found() -> None:
    assert len(EXAMPLES) == PAGE.read_text(encoding="utf-8").count("```python") >= 6


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_example_runs(port: int, title: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = code.replace("localhost:50051", f"127.0.0.1:{port}").replace("MODEL", "fake")
    exec(compile(code, f"docs/client.md: {title}", "exec"), {"__name__": "example"})
    shown = capsys.readouterr().out
    assert shown.strip()
    if title == "Errors and retries":
        assert "sampling.top_p" in shown
        assert "stopping.max_tokens" in shown
        assert "nobody" in shown
    if title == "Look at the service":
        assert {"prefill", "decode", "kv_transfer"} <= set(shown.split())
