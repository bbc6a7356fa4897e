"""`twinstage embed`, `score` and `rerank`, on texts and on files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fake_public_api import FakeApi, serving
from test_cli import run


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi()) as api:
        yield api


def test_scores_and_a_ranked_table(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "score", "query", "one", "two", "--address", api.address, "--truncate") == 0
    output = capsys.readouterr()
    assert output.out == ' 0.500000  "one"\n-0.500000  "two"\n'
    assert "7 prompt tokens" in output.err
    assert run(monkeypatch, "rerank", "query", "one", "two", "--address", api.address, "--top-n", "1") == 0
    assert capsys.readouterr().out.split() == ["rank", "score", "place", "document", "1", "1.0000", "2", "two"]
    assert run(monkeypatch, "rerank", "query", "one", "two", "--address", api.address, "--json") == 0
    assert json.loads(capsys.readouterr().out)["documents"][0] == {"index": 1, "score": 1.0}
    scored, ranked, _ = api.requests
    assert (list(scored.queries), list(scored.documents)) == (["query"], ["one", "two"])
    assert scored.truncation.HasField("model_limit")
    assert (ranked.query, ranked.top_n) == ("query", 1)


def test_a_file_of_texts_becomes_a_file_of_vectors(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("bad\na\nbad\nccc", encoding="utf-8")
    output = tmp_path / "vectors.npy"
    arguments = ["embed", "--input", str(texts), "--address", api.address, "--prompt-name", "q", "--output"]
    assert run(monkeypatch, *arguments, str(output)) == 1
    assert {request.prompt_name for request in api.requests} == {"q"}
    assert "2 of 4 texts failed, the first in line 1: input: is bad" in capsys.readouterr().err
    vectors = np.load(output)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, [[np.nan, np.nan], [1, -2], [np.nan, np.nan], [3, -2]])
    texts = texts.rename(tmp_path / "texts.jsonl")
    texts.write_text('"a"\n{"text": "bad"}\n', encoding="utf-8")
    arguments[2] = str(texts)
    assert run(monkeypatch, *arguments, str(tmp_path / "vectors.jsonl")) == 1
    lines = (tmp_path / "vectors.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"index": 0, "embedding": [1.0, -2.0]},
        {"index": 1, "error": "input: is bad"},
    ]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".jsonl", ".npy"], "nothing else is left"


def test_pairs_of_a_file_are_scored(api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"query": "q", "document": "d"}\n{"query": "r", "document": "e"}\n', encoding="utf-8")
    output = tmp_path / "scores.npy"
    assert run(monkeypatch, "score", "--input", str(pairs), "--output", str(output), "--address", api.address) == 0
    assert np.load(output).tolist() == [0.5, -0.5]
    assert (list(api.requests[0].queries), list(api.requests[0].documents)) == (["q", "r"], ["d", "e"])
    pairs.write_text('{"query": "q"}\n', encoding="utf-8")
    assert run(monkeypatch, "score", "--input", str(pairs), "--output", str(output), "--address", api.address) == 2


@pytest.mark.parametrize("suffix", [".npy", ".jsonl"])
def test_a_run_that_was_killed_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    texts, output = tmp_path / "texts.txt", tmp_path / f"vectors{suffix}"
    texts.write_text("\n".join("x" * size for size in range(1, 8)) + "\n", encoding="utf-8")
    with serving(FakeApi(hangs_at="x" * 5)) as api:
        flags = ["embed", "--input", str(texts), "--output", str(output), "--address", api.address]
        process = subprocess.Popen([sys.executable, "-m", "twinstage.cli.main", *flags])
        try:
            deadline_s = time.monotonic() + 60
            while _rows(Path(f"{output}.part")) < 4 and time.monotonic() < deadline_s:
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert not output.exists()
    with Path(f"{output}.part").open("ab") as part:
        part.write(b'{"inde')  # of a row that was being written: less than a whole one
    with serving(FakeApi()) as api:
        flags[-1] = api.address
        assert run(monkeypatch, *flags, "--no-normalize") == 2, "it would be vectors of two kinds"
        assert "with other options" in capsys.readouterr().err
        assert run(monkeypatch, *flags) == 0
        assert "4 of 7 are there already" in capsys.readouterr().err
        assert [len(request.input.text) for request in api.requests] == [5, 6, 7]
    if suffix == ".npy":
        vectors = np.load(output).tolist()
    else:
        vectors = [json.loads(line)["embedding"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert vectors == [[float(size), -2.0] for size in range(1, 8)]


def _rows(path: Path) -> int:
    if not path.exists():
        return 0
    return path.read_bytes().count(b"\n") if ".jsonl" in path.name else path.stat().st_size // 8


@pytest.mark.parametrize(
    "arguments",
    [
        ["embed"],
        ["embed", "a", "--input", "x"],
        ["embed", "--input", "x"],
        ["embed", "--input", "missing.txt", "--output", "o.npy"],
        ["score", "q", "d", "--output", "o.npy"],
        ["rerank", "q"],
    ],
)
def test_wrong_arguments_end_with_code_two(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    assert run(monkeypatch, *arguments) == 2
