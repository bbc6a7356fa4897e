"""gpt-oss: an answer is several messages, each to a channel: analysis is reasoning, commentary has the calls."""

from __future__ import annotations

import json
import re

from twinstage.text.answers.calls import ToolParser
from twinstage.text.answers.reader import Steps

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class ChannelMessages(ToolParser):
    """Reads headers, <|start|>assistant to=functions.name<|channel|>commentary json<|message|>, and what they head."""

    markers = ("<|message|>",)
    other_tokens = (*_ENDS, "<|channel|>", "<|constrain|>")

    def run(self) -> Steps[None]:
        while (yield from self.reader.peek()):
            self.reader.mark()
            yield from self._attempt(self._message())

    def _message(self) -> Steps[None]:
        """One message. Raises Malformed where no header begins one."""
        header, _ = yield from self.reader.head(*self.markers)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None:
            yield from self._call(self.known(recipient.group(1)))
            return
        self.reader.since_mark()
        is_reasoning = channel is not None and channel.group(1) == "analysis"
        yield from self.reader.until(*_ENDS, emit=self.builder.reasoning if is_reasoning else self.builder.content)

    def _call(self, name: str) -> Steps[None]:
        """The arguments of a call; the token that ends it may be left out of the text, as it ends the answer."""
        self.begin(name)
        pieces: list[str] = []

        def emit(text: str) -> None:
            pieces.append(text)
            self.builder.arguments(text)

        yield from self.reader.until(*_ENDS, emit=emit)
        try:
            json.loads("".join(pieces))
        except (ValueError, RecursionError):
            return
        self.complete()
