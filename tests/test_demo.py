"""`twinstage demo` and `twinstage serve`, as a newcomer runs them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import wait_until

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("cli")]

TWINSTAGE = str(Path(sys.executable).with_name("twinstage"))


def _processes_of_session(session: int) -> list[str]:
    """Live processes of a session, from /proc (state, parent, group and session follow the name in parentheses)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, process_session = stat.read_text().rsplit(")", 1)[1].split()[:4]
            if int(process_session) == session and state != "Z":
                found.append(stat.parent.name)
    return found


def test_demo_prints_an_answer_that_crossed_three_processes_and_a_ranked_search() -> None:
    demo = subprocess.Popen(
        [TWINSTAGE, "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    output, errors = demo.communicate(timeout=240)
    assert demo.returncode == 0, errors
    everything = output + errors
    assert "What is the capital of France?" in everything
    assert "Paris" in output
    for phase in ("queue", "tokenize", "prefill", "transfer", "first token", "decode", "total"):
        assert re.search(rf"{phase}.*\d ms", everything), phase
    assert re.search(r"shm", everything)
    ranked = re.findall(r"^ *(\d) +(-?\d\.\d{4}) +(\d) +\S", output, re.MULTILINE)
    assert [rank for rank, _, _ in ranked] == ["1", "2", "3", "4", "5"]
    assert {place for _, _, place in ranked[:2]} == {"2", "4"}, "the lake and the pool"
    assert [float(score) for _, score, _ in ranked] == sorted((float(score) for _, score, _ in ranked), reverse=True)
    assert not _processes_of_session(demo.pid), "the demo left processes behind"


def test_serve_stops_everything_on_one_ctrl_c(tmp_path: Path, tiny_model: Path) -> None:
    log = tmp_path / "serve.log"
    with log.open("wb") as sink:
        serve = subprocess.Popen(
            [TWINSTAGE, "serve", "--model", f"tiny={tiny_model}", "--prefill", "1", "--decode", "1", "--port", "0"],
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
    try:
        wait_until(lambda: b"serving on" in log.read_bytes(), timeout_s=90, what="the cluster serves")
        match = re.search(r"serving on (\S+:\d+)", log.read_text())
        assert match
        address = match.group(1)
        answer = subprocess.run(
            [TWINSTAGE, "generate", "Hello", "--address", address, "--max-tokens", "4"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        health = subprocess.run(
            [TWINSTAGE, "health", "--address", address], capture_output=True, text=True, timeout=60, check=False
        )
        assert (health.returncode, health.stdout) == (0, "SERVING\n")
        table = subprocess.run([TWINSTAGE, "workers", "--address", address], capture_output=True, text=True, timeout=60)
        assert table.returncode == 0
        assert "prefill" in table.stdout
        assert "decode" in table.stdout
        assert len(_processes_of_session(serve.pid)) >= 4, "serve, router, prefill and decode worker"
        os.killpg(serve.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        assert serve.wait(40) == 0, log.read_text()
        assert not _processes_of_session(serve.pid), "serve left processes behind"
    finally:
        if serve.poll() is None:
            os.killpg(serve.pid, signal.SIGKILL)
            serve.wait(10)


def test_health_without_a_server_fails() -> None:
    command = [TWINSTAGE, "health", "--address", "127.0.0.1:1", "--timeout", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


def test_a_client_without_a_server_says_what_to_do() -> None:
    result = subprocess.run(
        [TWINSTAGE, "generate", "Hello", "--address", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.stderr
