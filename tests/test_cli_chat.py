"""`twinstage chat` as a conversation: in a terminal, through a pipe, with reasoning and tool calls."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_public_api import FakeApi, serving
from twinstage.cli.chat import Session, read_tools
from twinstage.cli.chat_display import AnswerDisplay, written_call
from twinstage.cli.main import main
from twinstage.client import Delta, Options, Tool, ToolCall, TwinstageClient
from twinstage.errors import ConfigError, Overloaded
from twinstage.v1 import common_pb2, generation_pb2

WAIT_S = 30.0
TOOL = Tool(name="add")


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi()) as served:
        yield served


class Typed:
    """Lines as if they were typed."""

    is_interactive = True

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)
        self.prompts: list[str] = []

    def read(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        return self._lines.pop(0) if self._lines else None


class Screen(io.StringIO):
    """An output that may be a terminal."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def hold(api: FakeApi, *lines: str, tools: tuple[Tool, ...] = ()) -> tuple[str, str, Typed]:
    """Hold a conversation; return what was shown, what was noted, and the lines."""
    out, notes, typed = Screen(), Screen(), Typed(*lines)
    with TwinstageClient(api.address) as client:
        display = AnswerDisplay(out, notes)
        Session(client=client, options=Options(), display=display, lines=typed, tools=tools).run()
    return out.getvalue(), notes.getvalue(), typed


def said(request: generation_pb2.ChatRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages]


def test_a_conversation_and_its_commands(api: FakeApi) -> None:
    out, notes, _ = hold(
        api,
        "/system Be brief.",
        "/seed 7",
        "/effort low",
        "Capital?",
        "two \\",
        "lines",
        "//x",
        "/clear",
        "/seed",
        "",
        "New?",
        "/exit",
        "-",
    )
    assert out == "Paris\n" * 4
    first, second, third, fourth = api.requests
    assert said(first) == [("system", "Be brief."), ("user", "Capital?")]
    assert first.sampling.seed == second.sampling.seed == 7
    assert first.reasoning_effort == "low"
    assert said(second)[1:] == [("user", "Capital?"), ("assistant", "Paris"), ("user", "two \nlines")]
    assert said(third)[-1] == ("user", "/x")
    assert said(fourth) == [("system", "Be brief."), ("user", "New?")]
    assert not fourth.sampling.HasField("seed")
    assert re.search(r"7 prompt tokens .* 4\.0 tokens/s · finished by stop", notes)


def test_notes_of_commands(api: FakeApi) -> None:
    _, notes, _ = hold(api, "/help", "/what", "/seed -1", "Hi", "/history", "/system")
    for words in ("/clear", "there is no /what", "a seed is a number", "user: Hi", "assistant: Paris", "no system"):
        assert words in notes


def test_a_failed_answer_leaves_the_conversation_as_it_was(api: FakeApi) -> None:
    api.error = Overloaded("full")
    _, notes, _ = hold(api, "Hi")
    assert "full" in notes
    api.error = None
    hold(api, "Hi")
    assert said(api.requests[-1]) == [("user", "Hi")]


def test_tools_are_called_by_hand(api: FakeApi) -> None:
    call = generation_pb2.ToolCallDelta(id="c1", name="add", arguments='{"a": 1, "b": "é"}')
    api.script = [
        [generation_pb2.Delta(text="So:"), generation_pb2.Delta(tool_calls=[call])],
        [generation_pb2.Delta(text="Two.")],
    ]
    api.finishes = [common_pb2.FINISH_REASON_TOOL_CALLS, common_pb2.FINISH_REASON_STOP]
    out, _, typed = hold(api, "1 + 1?", "2", tools=(TOOL,))
    assert out == 'So:\n→ add(a=1, b="é")\nTwo.\n'
    assert typed.prompts[1] == "result of add> "
    asked = api.requests[-1]
    assert [tool.name for tool in asked.tools] == ["add"]
    assert asked.messages[1].tool_calls[0].arguments == call.arguments
    assert (asked.messages[2].role, asked.messages[2].content, asked.messages[2].tool_call_id) == ("tool", "2", "c1")


def test_reasoning_is_dim_and_control_characters_are_not_shown() -> None:
    terminal, pipe = Screen(is_terminal=True), Screen()
    for screen in (terminal, pipe):
        display = AnswerDisplay(screen, Screen())
        display.delta(Delta(reasoning="Hm\x1b[2J"))
        display.delta(Delta(text="Yes\x07"))
    assert terminal.getvalue() == "\x1b[2mHm[2J\x1b[0m\n\nYes"
    assert pipe.getvalue() == "Yes\x07"


def test_calls_that_are_no_json_are_shown_as_they_are() -> None:
    assert written_call(ToolCall(id="1", name="f", arguments='{"a": ')) == 'f({"a": )'


def test_tools_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(
        '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}, {"name": "g"}]'
    )
    assert read_tools(path) == (Tool(name="f", parameters='{"type": "object"}'), Tool(name="g"))
    path.write_text('{"name": 3}')
    with pytest.raises(ConfigError, match="is no list of tools"):
        read_tools(path)


def test_through_a_pipe(api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, expected in (((), "Paris\nParis\n"), (("--json",), None)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/seed 3\nAgain\n"))
        monkeypatch.setattr(sys, "argv", ["twinstage", "chat", "--address", api.address, *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        out = capsys.readouterr().out
        if expected is not None:
            assert out == expected
        else:
            assert [json.loads(line)["text"] for line in out.splitlines()] == ["Paris", "Paris"]
    assert api.requests[-1].sampling.seed == 3
    assert said(api.requests[-1]) == [("user", "Hi"), ("assistant", "Paris"), ("user", "Again")]


INTERRUPTED_AGAIN_S = 2.0


class Terminal:
    """A `twinstage chat` in a pseudo-terminal."""

    def __init__(self, address: str, home: Path) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twinstage.cli.main", "chat", "--address", address],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt_until(self, words: str) -> None:
        """As `wait_for` after Ctrl-C, and again: Python may miss one that comes just before it waits for a key."""
        for _ in range(int(WAIT_S / INTERRUPTED_AGAIN_S)):
            self.process.send_signal(signal.SIGINT)
            ready, _, _ = select.select([self._master], [], [], INTERRUPTED_AGAIN_S)
            if ready:
                break
        self.wait_for(words)

    def wait_for(self, words: str) -> None:
        """Until the words were shown after those of the last time."""
        deadline = time.monotonic() + WAIT_S
        while words not in self._shown:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{words!r} is not shown: {self._shown!r}"
            self._shown += os.read(self._master, 4096).decode(errors="replace")
        self._shown = self._shown.partition(words)[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._master)


def test_in_a_terminal(api: FakeApi, tmp_path: Path) -> None:
    """Ctrl-C ends an answer and keeps what came of it; at the prompt it gives up the line; Ctrl-D ends."""
    terminal = Terminal(api.address, tmp_path)
    try:
        terminal.wait_for("> ")
        terminal.type("Capital?\n")
        terminal.wait_for("Paris")
        terminal.wait_for("tokens/s")
        terminal.wait_for("> ")
        assert api.cancelled.wait(WAIT_S)  # the fake's word for: over
        api.cancelled.clear()
        api.hangs = True
        terminal.type("Again?\n")
        terminal.wait_for("Paris")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("finished by cancelled")
        assert api.cancelled.wait(WAIT_S)
        terminal.wait_for("> ")
        api.hangs = False
        terminal.type("never sent")
        terminal.wait_for("never sent")
        terminal.interrupt_until("> ")
        terminal.type("And?\n")
        terminal.wait_for("tokens/s")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(WAIT_S) == 0
    finally:
        terminal.close()
    assert said(api.requests[-1]) == [
        ("user", "Capital?"),
        ("assistant", "Paris"),
        ("user", "Again?"),
        ("assistant", "Paris"),
        ("user", "And?"),
    ]
    history = tmp_path / "twinstage" / "chat_history"
    assert history.read_text().splitlines()[-1] == "And?"
    assert history.stat().st_mode & 0o077 == 0
