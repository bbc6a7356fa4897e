"""What requests to a model may ask for: one table, by which ModelService tells and admission refuses."""

from __future__ import annotations

import enum
from collections.abc import Callable

from router.admission.answers import ParserChoice
from router.worker_entry import ServedModel
from twinstage.errors import Unimplemented
from twinstage.types import BatchPrompt, RawGenerationRequest, Task


class Capability(enum.Enum):
    """The names are those of the public API's ModelCapability."""

    GENERATE = "generate"
    CHAT = "chat"
    CHOICES = "choices"
    BATCH = "batch"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    REPETITION_DETECTION = "repetition_detection"
    STRUCTURED_OUTPUT = "structured_output"
    TOOLS = "tools"
    REASONING = "reasoning"
    EMBED = "embed"
    SCORE = "score"
    CLASSIFY = "classify"


# What every model that generates can do; what else there is depends on the model.
_OF_GENERATION = frozenset(
    {
        Capability.GENERATE,
        Capability.CHOICES,
        Capability.BATCH,
        Capability.LOGPROBS,
        Capability.PROMPT_LOGPROBS,
        Capability.REPETITION_DETECTION,
        Capability.STRUCTURED_OUTPUT,
    }
)
_OF_POOLING = {
    Task.EMBED: frozenset({Capability.EMBED, Capability.SCORE}),
    Task.CLASSIFY: frozenset({Capability.CLASSIFY}),
    Task.SCORE: frozenset({Capability.SCORE}),
}

# How a request asks for what not every version or model has: the field as its client knows it, and whether it is set.
_ASKED: tuple[tuple[Capability, str, Callable[[RawGenerationRequest], bool]], ...] = (
    (Capability.CHOICES, "sampling.n above 1", lambda raw: (raw.sampling.n or 1) > 1),
    (Capability.BATCH, "batch", lambda raw: isinstance(raw.prompt, BatchPrompt)),
    (Capability.STRUCTURED_OUTPUT, "structured_output", lambda raw: raw.structured_output is not None),
    (Capability.PROMPT_LOGPROBS, "output.prompt_logprobs", lambda raw: raw.output.prompt_logprobs is not None),
    (
        Capability.REPETITION_DETECTION,
        "stopping.repetition_detection",
        lambda raw: raw.stopping.repetition is not None,
    ),
)


def capabilities_of(model: ServedModel, parsers: ParserChoice | None = None) -> frozenset[Capability]:
    """What requests to `model` may ask for, where `parsers` read its answers."""
    if model.description.task is not Task.GENERATE:
        return _OF_POOLING[model.description.task]
    template = model.tokenizer.bundle.chat_template
    if template is None:
        return _OF_GENERATION
    parsers = parsers or ParserChoice()
    has = {
        Capability.CHAT: True,
        Capability.TOOLS: bool(parsers.tool_parser(model.name, template)),
        Capability.REASONING: bool(parsers.reasoning_parser(model.name, template)),
    }
    return _OF_GENERATION | {capability for capability, is_there in has.items() if is_there}


def check_capabilities(raw: RawGenerationRequest, model: ServedModel) -> None:
    """Raises Unimplemented that names every field by which the request asks for more than there is."""
    able = capabilities_of(model)
    missing = [field for capability, field, is_asked in _ASKED if capability not in able and is_asked(raw)]
    if missing:
        raise Unimplemented(f"this version does not implement {', '.join(missing)}; leave it out")
