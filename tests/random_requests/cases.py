"""What random callers do: any method of the public API, with requests that are right, nearly right, or anything.

Messages are drawn by their descriptors, so a new field is drawn from the day on which it exists; `_GOOD` knows what is
plausible in fields where a random value would nearly always be refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from hypothesis import strategies as st

from fuzz.messages import messages, set_field
from tiny_models import VOCABULARY_SIZE
from twinstage.v1 import admin_pb2, common_pb2, embedding_pb2, generation_pb2, model_pb2, scoring_pb2, tokenizer_pb2

FILES = (admin_pb2, embedding_pb2, generation_pb2, model_pb2, scoring_pb2, tokenizer_pb2)
ENDLESS = frozenset({"WatchLoad"})  # they end when their caller leaves
GENERATING = ("Generate", "GenerateStream", "Chat", "ChatStream")

# About one in ten: Hypothesis likes the ends of a range better than its middle.
_SOMETIMES = st.integers(0, 9).map(lambda number: number == 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call. `leaves_after_s`: the caller cancels it then; `deadline_s`: the call's own."""

    path: str
    requests: tuple[Message, ...]  # one, unless the method takes a stream
    deadline_s: float | None = None
    leaves_after_s: float | None = None

    @property
    def method(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the public API."""

    path: str
    request: type[Message]
    takes_stream: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def _methods() -> tuple[Method, ...]:
    return tuple(
        Method(f"/{service.full_name}/{method.name}", method.input_type._concrete_class, method.client_streaming)
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    )


METHODS = _methods()


@st.composite
def calls_of(draw: st.DrawFn, method: Method) -> Case:
    """A call of a method."""
    count = draw(st.integers(0, 4)) if method.takes_stream else 1
    requests = tuple(draw(_requests(method.request)) for _ in range(count))
    leaves = method.name in ENDLESS or draw(_SOMETIMES)
    return Case(
        path=method.path,
        requests=requests,
        deadline_s=draw(st.sampled_from((0.001, 0.05, 5.0))) if draw(_SOMETIMES) else None,
        leaves_after_s=draw(st.sampled_from((0.0, 0.002, 0.02, 0.1))) if leaves else None,
    )


@st.composite
def _requests(draw: st.DrawFn, kind: type[Message]) -> Message:
    """Of ten requests six are right, three right but for one thing, and one is anything."""
    dice = draw(st.integers(0, 9))
    if dice == 9:
        return draw(messages(kind))
    message = draw(_good(kind.DESCRIPTOR))
    if dice >= 6 and kind.DESCRIPTOR.fields:
        _spoil(draw, message)
    return message


def _spoil(draw: st.DrawFn, message: Message) -> None:
    """Set one field of the message, or of a message in it, to anything."""
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    if (
        field.message_type is not None
        and not field.is_repeated
        and message.HasField(field.name)
        and draw(st.booleans())
    ):
        if getattr(message, field.name).DESCRIPTOR.fields:
            _spoil(draw, getattr(message, field.name))
    else:
        message.ClearField(field.name)
        set_field(draw, message, field, 1)


def spare_xgrammar(case: Case) -> None:
    """Have the case ask for llguidance instead, as the first grammar of xgrammar costs each worker seconds."""
    for request in case.requests:
        if "structured_output" in request.DESCRIPTOR.fields_by_name and request.HasField("structured_output"):
            _spare_xgrammar(request.structured_output)


def _spare_xgrammar(output: common_pb2.StructuredOutput) -> None:
    if output.backend == common_pb2.GRAMMAR_BACKEND_XGRAMMAR or output.structural_tag or "::=" in output.grammar:
        output.backend = common_pb2.GRAMMAR_BACKEND_LLGUIDANCE
    if output.reasoning.HasField("constraint"):
        _spare_xgrammar(output.reasoning.constraint)


# --- right requests --------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x1F700), min_size=1, max_size=40)
_TOKEN = st.integers(0, VOCABULARY_SIZE - 1)
_TAG = (
    '{"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"}}'
)
_KWARGS = ({}, {"enable_thinking": False}, {"custom": [1.0, None, "x"]})
_GOOD: dict[str, st.SearchStrategy[Any]] = {
    "TokenIds.ids": st.lists(_TOKEN, min_size=1, max_size=40),
    "SamplingOptions.n": st.integers(1, 3),
    "SamplingOptions.temperature": st.sampled_from((0.0, 0.5, 1.0, 3.0)),
    "SamplingOptions.top_p": st.sampled_from((0.01, 0.5, 1.0)),
    "SamplingOptions.top_k": st.integers(1, 500),
    "SamplingOptions.min_p": st.sampled_from((0.0, 0.1, 1.0)),
    "SamplingOptions.repetition_penalty": st.sampled_from((0.5, 1.0, 2.0)),
    "SamplingOptions.presence_penalty": st.sampled_from((-2.0, 0.0, 2.0)),
    "SamplingOptions.frequency_penalty": st.sampled_from((-2.0, 0.0, 2.0)),
    "SamplingOptions.logit_bias": st.dictionaries(_TOKEN, st.sampled_from((-100.0, 1.0, 100.0)), max_size=3),
    "StoppingOptions.max_tokens": st.integers(1, 12),
    "StoppingOptions.min_tokens": st.just(1),
    "StoppingOptions.stop": st.lists(st.text("abe .", min_size=1, max_size=3), max_size=3),
    "StoppingOptions.stop_token_ids": st.lists(_TOKEN, max_size=3),
    "StoppingOptions.time_limit": st.integers(1, 10**9).map(lambda nanos: Duration(nanos=min(nanos, 10**9 - 1))),
    "RepetitionDetection.min_pattern_size": st.just(1),
    "RepetitionDetection.max_pattern_size": st.integers(1, 4),
    "RepetitionDetection.min_count": st.integers(2, 4),
    "OutputOptions.logprobs": st.integers(0, 20),
    "OutputOptions.prompt_logprobs": st.integers(0, 3),
    "StructuredOutput.json_schema": st.sampled_from(('{"type": "integer"}', '{"enum": ["a", "b"]}')),
    "StructuredOutput.json_object": st.just(True),
    "StructuredOutput.regex": st.sampled_from(("[ab]{1,4}", "(yes|no)")),
    "StructuredOutput.grammar": st.just('start: "a" | "b"'),
    "StructuredOutput.structural_tag": st.sampled_from((_TAG, "{}")),
    "ReasoningConstraint.end": st.sampled_from(("<|im_start|>", "<|endoftext|>")),
    "ChoiceConstraint.values": st.just(["yes", "no"]),
    "GenerateRequest.prompt": _TEXT,
    "PromptInput.prompt": _TEXT,
    "PromptBatch.prompts": st.integers(1, 3),  # how many
    "ChatRequest.messages": st.integers(1, 3),
    "RenderChatRequest.messages": st.integers(1, 3),
    "ChatMessage.role": st.sampled_from(("user", "assistant", "system")),
    "ChatMessage.content": _TEXT,
    "ChatRequest.tools": st.integers(1, 1),
    "RenderChatRequest.tools": st.integers(1, 1),
    "Tool.name": st.sampled_from(("search", "add")),
    "Tool.parameters": st.just('{"type": "object"}'),
    "ToolChoice.function": st.sampled_from(("search", "add")),
    "*.chat_template_kwargs": st.sampled_from(_KWARGS).map(lambda values: json_format.ParseDict(values, Struct())),
    "*.reasoning_effort": st.sampled_from(("none", "low", "high")),
    "*.text": _TEXT,
    "EmbedRequest.texts": st.lists(_TEXT, min_size=1, max_size=3),
    "EncodeRequest.inputs": st.integers(1, 3),
    "ScoreRequest.queries": st.lists(_TEXT, min_size=1, max_size=1),
    "RerankRequest.query": _TEXT,
    "*.documents": st.lists(_TEXT, min_size=1, max_size=3),
    "DetokenizeRequest.token_ids": st.lists(_TOKEN, max_size=20),
    "WatchLoadRequest.interval": st.just(Duration(nanos=10**8)),
    "*.request_id": st.sampled_from(("", "", "", "", "mine-1", "mine-2", "mine-3")),
    "*.priority": st.integers(-100, 100),
    "*.cache_salt": st.sampled_from(("", "tenant")),
}
_ALWAYS = frozenset(
    {
        "StoppingOptions.max_tokens",
        "GenerateRequest.stopping",
        "ChatRequest.stopping",
        "ChatMessage.content",
        "Tool.name",
        "ReasoningConstraint.end",
        "ScoreRequest.queries",
        "RerankRequest.query",
        "*.documents",
        *(f"*.{name}" for name in ("ids", "inputs", "messages", "prompts", "role", "text", "texts", "values")),
    }
)
# Not drawn where a right request is wanted: they name what is not there, change what later requests need, or have no
# value that is right by itself.
_NEVER = frozenset(
    {
        "*.model",
        "*.chat_template",
        "*.worker_id",
        "*.tool_calls",
        "*.tool_call_id",
        "*.tool_choice",  # but for those with tools
        "ChatMessage.reasoning",
        "*.add_generation_prompt",
    }
)


@st.composite
def _good(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    message = descriptor._concrete_class()
    for oneof in descriptor.oneofs:
        real = [field for field in oneof.fields if not _is_optional(field)]
        if real:
            _set(draw, message, draw(st.sampled_from(real)))
    for field in descriptor.fields:
        in_real_oneof = field.containing_oneof is not None and not _is_optional(field)
        wanted = _names(field, _ALWAYS) or draw(st.integers(0, 3)) == 0
        if not in_real_oneof and wanted and not _names(field, _NEVER):
            _set(draw, message, field)
    if "tool_choice" in descriptor.fields_by_name and message.tools and draw(st.booleans()):
        _set(draw, message, descriptor.fields_by_name["tool_choice"])
        if message.tool_choice.function:
            message.tool_choice.function = message.tools[0].name
    return message


def _is_optional(field: FieldDescriptor) -> bool:
    """Whether the field's oneof is only how proto3 says `optional`."""
    return field.containing_oneof is not None and len(field.containing_oneof.fields) == 1 and field.has_presence


def _keys(field: FieldDescriptor) -> tuple[str, str]:
    return f"{field.containing_type.name}.{field.name}", f"*.{field.name}"


def _names(field: FieldDescriptor, names: frozenset[str]) -> bool:
    return not names.isdisjoint(_keys(field))


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    """Set a field to something that may be right, as far as that is known."""
    known = next((_GOOD[key] for key in _keys(field) if key in _GOOD), None)
    if known is not None:
        _assign(draw, message, field, draw(known))
    elif field.message_type is not None and field.message_type.file.package == "twinstage.v1":
        made = draw(_good(field.message_type))
        if field.is_repeated:
            getattr(message, field.name).append(made)
        else:
            getattr(message, field.name).CopyFrom(made)
    elif field.enum_type is not None and not field.is_repeated:
        setattr(message, field.name, draw(st.sampled_from([value.number for value in field.enum_type.values])))
    elif field.type == FieldDescriptor.TYPE_BOOL:
        setattr(message, field.name, draw(st.booleans()))


def _assign(draw: st.DrawFn, message: Message, field: FieldDescriptor, value: Any) -> None:
    target = getattr(message, field.name)
    if isinstance(value, dict):
        target.update(value)
    elif isinstance(value, Message):
        target.CopyFrom(value)
    elif field.is_repeated and isinstance(value, int):  # so many messages
        target.extend(draw(_good(field.message_type)) for _ in range(value))
    elif field.is_repeated:
        target.extend(value)
    else:
        setattr(message, field.name, value)
