"""`twinstage bench` as a user runs it, on a cluster of real processes, and against servers that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_public_api import FakeApi, serving
from harness import ROOT, ProcessCluster, wait_until
from twinstage.cli.main import main
from twinstage.client import Options, Stopping, TwinstageClient
from twinstage.errors import KvExhausted

pytestmark = pytest.mark.xdist_group("tiny")

SMALL = ("--prompt-tokens", "16:48", "--output-tokens", "8")


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "twinstage.cli.main", "bench", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `twinstage ARGUMENTS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["twinstage", *arguments])
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def bench(*arguments: str) -> tuple[int, str, str]:
    process = start(*arguments)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi()) as served:
        yield served


def test_closed_loop_on_real_workers(tiny_cluster: ProcessCluster, tmp_path: Path) -> None:
    json_file, html_file = tmp_path / "run.json", tmp_path / "run.html"
    address = ("--address", tiny_cluster.address)
    load = ("--concurrency", "3", "--requests", "9", "--slo-ttft-ms", "20000")
    outputs = ("--json", str(json_file), "--html", str(html_file))
    code, output, errors = bench(*address, *load, *SMALL, *outputs, "--fail-on-error")
    assert code == 0, errors
    assert "9 sent, 9 succeeded, 0 failed" in output
    assert "72 out" in output
    (run,) = json.loads(json_file.read_text())["runs"]
    assert run["requests"]["wrong_length"] == 0
    assert run["tokens"]["output"] == 72
    assert run["goodput"]["share"] == 1
    assert 0 < run["ttft"]["p50_s"] <= run["e2e"]["p50_s"]
    assert run["server"]["prefill"]["count"] == 9
    assert run["kv_bytes"] > 0
    assert "<svg" in html_file.read_text()
    tiny_cluster.wait_idle()


def test_the_sdk_tokenizes_as_prompts_are_tokenized(tiny_cluster: ProcessCluster) -> None:
    text = "The quick brown fox"
    with TwinstageClient(tiny_cluster.address) as client:
        token_ids = client.tokenize(text)
        generation = client.generate(text, Options(stopping=Stopping(max_tokens=1)))
    assert generation.summary.usage.prompt_tokens == len(token_ids) > 1


def test_sweep_compared_with_a_sweep(tiny_cluster: ProcessCluster, tmp_path: Path) -> None:
    sweep = ("--address", tiny_cluster.address, "--sweep-concurrency", "1,2", "--requests", "4", *SMALL, "--quiet")
    first = tmp_path / "first.json"
    code, output, errors = bench(*sweep, "--json", str(first))
    assert (code, errors) == (0, "")
    assert "concurrency 1" in output
    code, output, errors = bench(*sweep, "--compare", str(first), "--json", "-")
    assert code == 0
    assert [run["label"] for run in json.loads(output)["runs"]] == ["concurrency 1", "concurrency 2"]
    assert "time to first token, p99" in errors


def test_a_trace_with_shared_blocks_on_real_workers(tiny_cluster: ProcessCluster, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 1000 * number, "input_length": 1024, "output_length": 64, "hash_ids": [0, number]}
        for number in range(5)
    ]
    trace.write_text("\n".join(map(json.dumps, entries)))
    flags = ("--trace", str(trace), "--trace-scale", "16", "--trace-speed", "20", "--json", "-")
    code, output, _ = bench("--address", tiny_cluster.address, *flags)
    assert code == 0
    (run,) = json.loads(output)["runs"]
    assert (run["label"], run["tokens"]["prompt"], run["tokens"]["output"]) == ("trace x20", 5 * 64, 5 * 4)
    assert run["duration_s"] >= 0.2


def test_ctrl_c_ends_with_what_was_measured(tiny_cluster: ProcessCluster, tmp_path: Path) -> None:
    json_file = tmp_path / "run.json"

    def finished() -> int:
        return sum(worker.finished for worker in tiny_cluster.workers())

    before = finished()
    load = ("--concurrency", "2", "--duration", "100", "--warmup", "0")
    process = start("--address", tiny_cluster.address, *load, *SMALL, "--json", str(json_file))
    wait_until(lambda: finished() >= before + 8, timeout_s=40, what="requests of the load generator")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "(interrupted)" in output
    (run,) = json.loads(json_file.read_text())["runs"]
    assert run["interrupted"]
    assert run["requests"]["succeeded"] >= 2
    assert run["requests"]["failed"] == 0
    tiny_cluster.wait_idle()


class RefusingApi(FakeApi):
    """Says which models it serves, and refuses every prompt but the first `served`."""

    served = 0

    def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        return FakeApi().ListModels(request, context)

    def _stream(self, request: Any, context: Any, response: Any) -> Iterator[Any]:
        self.error = KvExhausted("no blocks left") if len(self.requests) >= self.served else None
        return super()._stream(request, context, response)


@pytest.mark.parametrize(
    ("served", "flags", "code"), [(0, (), 1), (1, (), 0), (1, ("--fail-on-error",), 1), (3, ("--fail-on-error",), 0)]
)
def test_the_exit_code_tells_of_failures(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    served: int,
    flags: tuple[str, ...],
    code: int,
) -> None:
    with serving(RefusingApi()) as api:
        api.served = served
        load = ("--concurrency", "1", "--requests", "3", "--warmup", "0", "--prompt-tokens", "7", "--quiet", *flags)
        records = tmp_path / "records.jsonl"
        assert run(monkeypatch, "bench", "--address", api.address, *load, "--records", str(records)) == code
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["succeeded"] * served + ["failed"] * (3 - served)
    assert {line["load"] for line in lines} == {"concurrency 1"}
    output = capsys.readouterr()
    assert f"3 sent, {served} succeeded, {3 - served} failed" in output.out
    assert (f"{3 - served} x RESOURCE_EXHAUSTED KV_EXHAUSTED: no blocks left" in output.out) is (served < 3)
    assert output.err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--address", "127.0.0.1:1"), 1, "no router answers at 127.0.0.1:1"),
        (("--model", "other"), 2, "--model: no generation model 'other' is served"),
        (("--trace", "absent.jsonl"), 2, "--trace: cannot read absent.jsonl"),
        (("--prompt-tokens", "many"), 2, "--prompt-tokens: expected a number such as 128"),
        (("--prompt-tokens", "9000"), 2, "the model's context has 8192"),
        (("--sweep-rate", "1,x"), 2, "--sweep-rate: expected numbers such as 1,2,4"),
        (("--rate", "1", "--concurrency", "1"), 2, "exclude each other"),
        (("--json", "absent/run.json"), 2, "--json: cannot write absent/run.json"),
        (("--compare", "absent.json"), 2, "cannot read absent.json"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    api: FakeApi,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    address = () if "--address" in arguments else ("--address", api.address)
    assert run(monkeypatch, "bench", *address, *arguments, "--quiet") == code
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not any(hasattr(request, "prompt_token_ids") for request in api.requests)  # nothing was generated
