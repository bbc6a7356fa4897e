"""What a client knows of a running stream: the same for the blocking and the asyncio client."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from twinstage.client import responses
from twinstage.client.results import Delta, PromptInfo, PromptLogprobs, Summary
from twinstage.errors import InternalError
from twinstage.text.answers.joining import MessageJoiner
from twinstage.types import ChatMessage
from twinstage.v1 import generation_pb2

StreamEvent = generation_pb2.GenerateStreamResponse | generation_pb2.ChatStreamResponse


@dataclass(slots=True)
class StreamState:
    """Takes the events of a stream in order."""

    prompt_info: PromptInfo | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # in parts, before the first delta
    summary: Summary | None = None
    began: bool = False  # an event came
    _joiners: defaultdict[int, MessageJoiner] = field(default_factory=lambda: defaultdict(MessageJoiner))

    def message(self, index: int) -> ChatMessage:
        """What has come of an answer, as a message that can be sent back."""
        return self._joiners[index].message()

    def take(self, event: StreamEvent) -> Delta | None:
        """Take one event; return the delta in it. Events of kinds that this version does not know are skipped."""
        self.began = True
        match event.WhichOneof("event"):
            case "prompt_info":
                self.prompt_info = responses.prompt_info(event.prompt_info)
            case "prompt_logprobs":
                self.prompt_logprobs.append(responses.prompt_logprobs(event.prompt_logprobs))
            case "delta":
                delta = responses.delta(event.delta)
                self._joiners[delta.index].add(
                    content=delta.text, reasoning=delta.reasoning, tool_calls=delta.tool_calls
                )
                return delta
            case "finished":
                return responses.finished(event.finished)
            case "summary":
                self.summary = responses.summary(event.summary)
        return None

    def check_complete(self) -> None:
        """Raise InternalError when the stream ended without its summary: the end of a stream alone proves nothing."""
        if self.summary is None:
            raise InternalError("the stream ended without a summary; the answer may be incomplete")
