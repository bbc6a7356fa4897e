"""Tool parsers of models that write a call as its name, a separator, and its arguments as JSON."""

from __future__ import annotations

import re

from twinstage.text.answers.json_calls import JsonCalls
from twinstage.text.answers.reader import Malformed, Steps

_CALL_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class MistralCalls(JsonCalls):
    """Mistral: [TOOL_CALLS] and an array of objects, or, since 2025, [TOOL_CALLS]name[ARGS]{...} for each call."""

    markers = ("[TOOL_CALLS]",)
    other_tokens = ("[ARGS]", "[CALL_ID]")

    def calls(self, marker: str) -> Steps[None]:
        yield from self.reader.spaces()
        if (yield from self.reader.peek()) in ("[", "{"):
            yield from self.objects()
            return
        head, found = yield from self.reader.head("[ARGS]", "[CALL_ID]", "{")
        name = self.known(head.strip())
        if found == "[CALL_ID]":
            yield from self.reader.head("[ARGS]")
        if found == "{":
            self.reader.back(1)
        yield from self.call_with_object(name)


class DeepSeekCalls(JsonCalls):
    """DeepSeek R1 and V3, with the arguments in a fenced block, and V3.1, without."""

    markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    other_tokens = ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def calls(self, marker: str) -> Steps[None]:
        if marker == self.markers[0]:
            yield from self.reader.spaces()
            yield from self.reader.expect(self.markers[1])
        while True:
            yield from self._call()
            yield from self.reader.spaces()
            if not (yield from self.reader.literal(self.markers[1])):
                break
        yield from self.reader.literal("<｜tool▁calls▁end｜>")

    def _call(self) -> Steps[None]:
        name, _ = yield from self.reader.head("<｜tool▁sep｜>")
        fenced = name.strip() == "function"
        if fenced:
            name, _ = yield from self.reader.head("\n")
            yield from self.reader.spaces()
            yield from self.reader.expect("```json")
        yield from self.call_with_object(self.known(name.strip()))
        yield from self.reader.spaces()
        if fenced:
            yield from self.reader.literal("```")
        yield from self.reader.literal("<｜tool▁call▁end｜>")


class KimiCalls(JsonCalls):
    """Kimi K2, whose calls have ids of the model: functions.name:0."""

    markers = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    other_tokens = ("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>")

    def calls(self, marker: str) -> Steps[None]:
        if marker == self.markers[0]:
            yield from self.reader.spaces()
            yield from self.reader.expect(self.markers[1])
        while True:
            yield from self._call()
            yield from self.reader.spaces()
            if not (yield from self.reader.literal(self.markers[1])):
                break
        yield from self.reader.literal("<|tool_calls_section_end|>")

    def _call(self) -> Steps[None]:
        head, _ = yield from self.reader.head("<|tool_call_argument_begin|>")
        call_id = head.strip()
        if not _CALL_ID.fullmatch(call_id):
            raise Malformed
        name = call_id.removeprefix("functions.")
        yield from self.call_with_object(self.known(name.rpartition(":")[0] or name), call_id)
        yield from self.reader.spaces()
        yield from self.reader.literal("<|tool_call_end|>")
