"""Where a model's reasoning ends and its answer begins."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.text.answers.parts import AnswerBuilder
from twinstage.text.answers.reader import Emit, Reader, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningStyle:
    """How a family marks its reasoning. Special tokens in the tags are `tokens`, by default the tags themselves."""

    start: str
    end: str
    tokens: tuple[str, ...] = ()

    def is_open_at_end(self, prompt: str) -> bool:
        """Whether an answer to this prompt goes on with reasoning: the prompt ends with the start tag."""
        return prompt.rstrip().endswith(self.start.rstrip())

    def is_open_in(self, message: str) -> bool:
        """Whether a message that is continued stops within its reasoning."""
        return message.rfind(self.start) > message.rfind(self.end)

    @property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(self.tokens or (self.start, self.end))


REASONING_STYLES = {
    "qwen3": ReasoningStyle(start="<think>", end="</think>"),
    "deepseek_r1": ReasoningStyle(start="<think>", end="</think>"),
    "mistral": ReasoningStyle(start="[THINK]", end="[/THINK]"),
    "granite": ReasoningStyle(start="Here is my thought process:", end="Here is my response:"),
    "command_a": ReasoningStyle(start="<|START_THINKING|>", end="<|END_THINKING|>"),
    "seed_oss": ReasoningStyle(start="<seed:think>", end="</seed:think>"),
    "kimi": ReasoningStyle(start="◁think▷", end="◁/think▷"),
    "gemma4": ReasoningStyle(start="<|channel>thought\n", end="<channel|>", tokens=("<|channel>", "<channel|>")),
}


def split_reasoning(
    reader: Reader, style: ReasoningStyle, builder: AnswerBuilder, *, starts_inside: bool, emit: Emit
) -> Steps[None]:
    """Give reasoning to the builder, and the answer behind it to `emit`. It stands at the beginning or nowhere."""
    reader.mark()
    yield from reader.spaces()
    has_tag = bool((yield from reader.literal(style.start)))  # some models repeat the tag that the prompt ends with
    if has_tag or starts_inside:
        reader.since_mark()
        if not (yield from reader.until(style.end, emit=builder.reasoning)):
            return
        yield from reader.spaces()
    else:
        emit(reader.since_mark())
    yield from reader.rest(emit)
