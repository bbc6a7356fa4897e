"""`twinstage embed`, `score` and `rerank`, on texts and on files."""

from __future__ import annotations

import json
import resource
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
from twinstage.cli.batch_files import Output, Records
from twinstage.errors import ConfigError
from twinstage.v1 import embedding_pb2


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
    assert {request.prompt_name for request in api.requests[1:]} == {"q"}, "after it has asked for the models"
    assert "2 of 4 lines failed, the first in line 1: input: is bad" in capsys.readouterr().err
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
    assert (list(api.requests[1].queries), list(api.requests[1].documents)) == (["q", "r"], ["d", "e"])
    long = json.dumps({"query": "q", "document": "d" * 500_000})
    pairs.write_text("".join(f"{long}\n" for _ in range(5)), encoding="utf-8")
    assert run(monkeypatch, "score", "--input", str(pairs), "--output", str(output), "--address", api.address) == 0
    assert [len(request.documents) for request in api.requests[3:]] == [2, 2, 1], "no more than the router takes"
    assert np.load(output).tolist() == [0.5, -0.5, 0.5, -0.5, 0.5]


def test_probabilities_of_labels(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "classify", "one", "--address", api.address) == 0
    assert capsys.readouterr().out == 'bad 0.7500, good 0.2500  "one"\n'
    assert run(monkeypatch, "classify", "one", "--address", api.address, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"model": "m", "probabilities": [{"good": 0.25, "bad": 0.75}]}
    texts, output = tmp_path / "texts.txt", tmp_path / "o.jsonl"
    texts.write_text("a\n", encoding="utf-8")
    assert run(monkeypatch, "classify", "--input", str(texts), "--output", str(output), "--address", api.address) == 0
    assert json.loads(output.read_text(encoding="utf-8")) == {"index": 0, "probabilities": [1.0, -2.0]}
    assert api.requests[-1].task == embedding_pb2.POOLING_TASK_CLASSIFY


def test_a_pair_that_is_wrong_fails_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs, output = tmp_path / "pairs.jsonl", tmp_path / "scores.jsonl"
    documents = ("a", "b", "bad", "c")
    pairs.write_text("".join(f'{{"query": "q", "document": "{text}"}}\n' for text in documents), encoding="utf-8")
    with serving(FakeApi(bad_document="bad")) as api:
        assert run(monkeypatch, "score", "--input", str(pairs), "--output", str(output), "--address", api.address) == 1
    assert "1 of 4 lines failed, the first in line 3: documents[0]: is bad" in capsys.readouterr().err
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert ["error" in line for line in lines] == [False, False, True, False]


def test_what_is_no_fault_of_a_text_ends_the_run_and_writes_no_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, output = tmp_path / "texts.txt", tmp_path / "vectors.jsonl"
    texts.write_text("a\nlost\nccc\n", encoding="utf-8")
    with serving(FakeApi()) as api:
        flags = ["embed", "--model", "m", "--input", str(texts), "--output", str(output), "--address", api.address]
        assert run(monkeypatch, *flags) == 1
        assert "no worker" in capsys.readouterr().err
        assert not output.exists()
        assert len(Path(f"{output}.part").read_text(encoding="utf-8").splitlines()) == 1
    with serving(FakeApi(fingerprint="another")) as api:
        flags[-1] = api.address
        assert run(monkeypatch, *flags) == 2
        assert "or on another model" in capsys.readouterr().err
        texts.write_text("a\nother\nccc\n", encoding="utf-8")
        assert run(monkeypatch, *flags) == 2, "it is other input"
        texts = texts.rename(tmp_path / "texts.jsonl")
        assert run(monkeypatch, *flags[:4], str(texts), "--output", str(texts), *flags[7:]) == 2
        assert "would be written over --input" in capsys.readouterr().err


def test_a_full_disk_loses_and_doubles_nothing(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, output = tmp_path / "texts.txt", tmp_path / "vectors.jsonl"
    texts.write_text("".join("x" * size + "\n" for size in range(1, 31)), encoding="utf-8")
    flags = ["embed", "--input", str(texts), "--output", str(output), "--address", api.address]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))  # in the middle of a row
    try:
        assert run(monkeypatch, *flags) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert "vectors.jsonl cannot be written" in capsys.readouterr().err
    assert run(monkeypatch, *flags) == 0
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"index": index, "embedding": [index + 1, -2]} for index in range(30)]


def test_a_run_that_is_killed_while_it_puts_its_file_in_place_goes_on(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts, output = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text("".join("x" * size + "\n" for size in range(1, 9)), encoding="utf-8")
    flags = ["embed", "--input", str(texts), "--output", str(output), "--address", api.address]
    for last in ("replace", "unlink"):

        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if last == "replace":
                patch.setattr(Output, "_with_header", killed)
            else:
                patch.setattr(Path, "unlink", killed)
            assert run(patch, *flags) != 0
        assert run(monkeypatch, *flags) == 0
        np.testing.assert_array_equal(np.load(output), [[size, -2] for size in range(1, 9)])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "vectors.npy"]


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    with Output(tmp_path / "o.jsonl", value_name="score", made_of={}) as first:
        with pytest.raises(ConfigError, match="another run"):
            Output(tmp_path / "o.jsonl", value_name="score", made_of={})
        first.write([1.0])
        first.finish()
    assert (tmp_path / "o.jsonl").read_text(encoding="utf-8") == '{"index": 0, "score": 1.0}\n'


def test_marks_of_windows_are_no_part_of_a_text(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_bytes("\ufeffa\r\n\r\nb\u2028c\r\n d".encode())
    records = Records(texts, ["text"])
    assert [text for (text,) in records.read()] == ["a", "", "b\u2028c", " d"]
    assert ([text for (text,) in records.read(start=3)], len(records)) == ([" d"], 4)


@pytest.mark.parametrize(
    "line",
    [b'{"text": "half', b"", b"7", b'{"text": 7}', b'{"other": ""}', b'"\xff"', b'"\\ud800"', b"[" * 99_999],
    ids=["half", "empty", "number", "number as text", "no text", "no UTF-8", "half a pair", "deep"],
)
def test_a_wrong_line_is_told_before_anything_is_computed(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_bytes(b'"good"\n' + line + b'\n"good"\n')
    flags = ["--input", str(texts), "--output", str(tmp_path / "o.npy"), "--address", api.address]
    assert run(monkeypatch, "embed", *flags) == 2
    assert "texts.jsonl, line 2: " in capsys.readouterr().err
    assert run(monkeypatch, "rerank", "q", "--input", str(texts), "--address", api.address) == 2
    assert not api.requests


@pytest.mark.parametrize(("suffix", "blow"), [(".npy", signal.SIGKILL), (".jsonl", signal.SIGINT)])
def test_a_run_that_was_killed_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, blow: int
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
            process.send_signal(blow)
            assert process.wait(30) != 0
    assert not output.exists()
    with Path(f"{output}.part").open("ab") as part:
        part.write(b'{"inde')  # of a row that was being written: less than a whole one
    with serving(FakeApi()) as api:
        flags[-1] = api.address
        assert run(monkeypatch, *flags, "--no-normalize") == 2, "it would be vectors of two kinds"
        assert "with other options" in capsys.readouterr().err
        assert run(monkeypatch, *flags) == 0
        assert "4 of 7 are there already" in capsys.readouterr().err
        streamed = [request for request in api.requests if isinstance(request, embedding_pb2.EncodeStreamRequest)]
        assert [len(request.input.text) for request in streamed] == [5, 6, 7]
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
        ["embed", "--input", "/dev/null", "--output", "o.npy"],
        ["embed", "--input", __file__, "--output", "/no/directory/o.npy"],
        ["score", "q", "d", "--output", "o.npy"],
        ["rerank", "q"],
    ],
)
def test_wrong_arguments_end_with_code_two(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    assert run(monkeypatch, *arguments) == 2
