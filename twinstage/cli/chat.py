"""`twinstage chat` without a message: a conversation, in a terminal or through a pipe."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from twinstage.cli.chat_display import AnswerDisplay
from twinstage.cli.chat_lines import lines_of_this_terminal
from twinstage.cli.json_output import show_json
from twinstage.client import ChatMessage, ChatPrompt, GenerationStream, Options, Tool, TwinstageClient
from twinstage.errors import Cancelled, ConfigError, TwinstageError
from twinstage.types import Finish, FinishReason

HELP = """\
/system TEXT   how the model shall behave; without TEXT, as it likes
/effort LEVEL  how much to think: none, low, medium, high; without LEVEL, as usual
/seed NUMBER   draw the same tokens each time; without NUMBER, others
/clear         forget the conversation
/history       show the conversation
/help          show this
/exit          end, as Ctrl-D does
Ctrl-C ends an answer, and what came of it stays. A line that ends with \\ goes on in the next one. //x says /x."""


class Lines(Protocol):
    """Where messages come from."""

    is_interactive: bool

    def read(self, prompt: str) -> str | None:
        """The next line; None at the end. Raises KeyboardInterrupt."""
        ...


@dataclass(slots=True, kw_only=True)
class Session:
    """A conversation and how its answers are made."""

    client: TwinstageClient
    options: Options
    display: AnswerDisplay
    lines: Lines
    tools: Sequence[Tool] = ()
    system: str = ""
    effort: str = ""
    as_json: bool = False
    messages: list[ChatMessage] = field(default_factory=list)

    def run(self) -> None:
        """Take lines until there are no more, or one says to end. Raises TwinstageError where nobody could mend it."""
        while (text := self._next_message()) is not None:
            if text.startswith("/") and not text.startswith("//"):
                if not self._command(text):
                    return
            elif text.strip():
                self._say(text.removeprefix("/") if text.startswith("//") else text)

    def _next_message(self) -> str | None:
        """The next message or command; Ctrl-C gives up what was typed."""
        pieces: list[str] = []
        while True:
            try:
                line = self.lines.read("... " if pieces else "> ")
            except KeyboardInterrupt:
                self.display.note("")
                pieces = []
                continue
            if line is None:
                return "\n".join(pieces) if pieces else None
            if not line.endswith("\\"):
                return "\n".join([*pieces, line])
            pieces.append(line[:-1])

    # --- messages ---------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Send a message, show the answer, and ask for the results of the calls in it."""
        said = len(self.messages)
        self.messages.append(ChatMessage(role="user", content=text))
        try:
            while results := self._results(self._answer()):
                self.messages += results
        except TwinstageError as error:
            del self.messages[said:]
            if not self.lines.is_interactive:
                raise
            self.display.note(str(error))

    def _answer(self) -> ChatMessage | None:
        """Show the next answer as it comes, and keep it; None when nothing came before it was cancelled."""
        finish: Finish | None = None
        options = replace(self.options, request_id="")
        prompt = ChatPrompt(messages=self._conversation(), reasoning_effort=self.effort)
        with self.client.chat_stream(prompt, options, tools=self.tools) as stream, _ended_by(stream):
            try:
                if self.as_json:
                    show_json(stream)
                    return self._keep(stream.message())
                for delta in stream:
                    self.display.delta(delta)
                    finish = delta.finish or finish
            except Cancelled:
                finish = Finish(reason=FinishReason.CANCELLED)
        message = stream.message()
        if finish is not None and finish.reason is not FinishReason.TOOL_CALLS:
            message = replace(message, tool_calls=())  # of calls that are not complete nobody has a result
        self.display.end(message)
        self.display.totals(finish, stream.summary)
        return self._keep(message)

    def _keep(self, message: ChatMessage) -> ChatMessage | None:
        """Put an answer into the conversation; one that said nothing goes with its question."""
        if not (message.content or message.tool_calls or message.reasoning):
            self.messages.pop()
            return None
        self.messages.append(message)
        return message

    def _results(self, message: ChatMessage | None) -> list[ChatMessage]:
        """What the calls of an answer gave, as the one at the keyboard has it."""
        results: list[ChatMessage] = []
        for call in message.tool_calls if message is not None else ():
            try:
                content = self.lines.read(f"result of {call.name}> ")
            except KeyboardInterrupt:
                content = None
            if content is None:
                raise Cancelled("without the results of its calls, the model cannot go on")
            results.append(ChatMessage(role="tool", content=content, tool_call_id=call.id))
        return results

    def _conversation(self) -> tuple[ChatMessage, ...]:
        system = [ChatMessage(role="system", content=self.system)] if self.system else []
        return (*system, *self.messages)

    # --- commands ---------------------------------------------------------------------------------

    def _command(self, text: str) -> bool:
        """Obey a command; return whether the conversation goes on."""
        name, _, argument = text.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/effort": self._set_effort,
            "/seed": self._set_seed,
            "/clear": self._clear,
            "/history": self._show_history,
            "/help": lambda _: self.display.note(HELP),
        }
        if name in commands:
            commands[name](argument.strip())
        else:
            self.display.note(f"there is no {name}; /help shows what there is")
        return True

    def _set_system(self, text: str) -> None:
        self.system = text
        self.display.note(f"system: {text}" if text else "no system message")

    def _set_effort(self, text: str) -> None:
        self.effort = text
        self.display.note(f"effort: {text}" if text else "effort as usual")

    def _set_seed(self, text: str) -> None:
        if text and not (text.isascii() and text.isdigit() and int(text) < 2**64):
            self.display.note("a seed is a number from 0 to 18446744073709551615")
            return
        self.options = replace(self.options, sampling=replace(self.options.sampling, seed=int(text) if text else None))
        self.display.note(f"seed: {text}" if text else "no seed")

    def _clear(self, _: str) -> None:
        self.messages.clear()
        self.display.note("the conversation is forgotten")

    def _show_history(self, _: str) -> None:
        for message in self._conversation():
            calls = "".join(f"\n  {call.name} {call.arguments}" for call in message.tool_calls)
            self.display.note(f"{message.role}: {message.content}{calls}")


def converse(client: TwinstageClient, *, options: Options, system: str, tools: Sequence[Tool], as_json: bool) -> None:
    """Hold a conversation with whoever is at standard input."""
    lines = lines_of_this_terminal()
    session = Session(
        client=client,
        options=options,
        display=AnswerDisplay(),
        lines=lines,
        tools=tools,
        system=system,
        as_json=as_json,
    )
    if lines.is_interactive:
        session.display.note("/help shows what there is besides messages; Ctrl-D ends")
    with client:
        session.run()


@contextmanager
def _ended_by(stream: GenerationStream) -> Iterator[None]:
    """While in scope, Ctrl-C cancels the stream and nothing else."""
    previous = signal.signal(signal.SIGINT, lambda *_: stream.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def read_tools(path: Path) -> tuple[Tool, ...]:
    """Tools from a JSON file: a list as OpenAI's API takes them. Raises ConfigError."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return tuple(_tool(entry.get("function", entry)) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--tools {path} is no list of tools with their names: {error}") from error


def _tool(function: dict[str, Any]) -> Tool:
    parameters = json.dumps(function["parameters"]) if "parameters" in function else ""
    return Tool(name=function["name"], description=function.get("description", ""), parameters=parameters)
