"""Conversion between domain types and the messages of conversations and tools, for the router and for clients."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import struct_pb2

from twinstage.rpc.convert_values import optional_from_proto, struct_from_proto
from twinstage.types import ChatMessage, ChatPrompt, Tool, ToolCall, ToolCallDelta, ToolChoice, ToolChoiceMode
from twinstage.v1 import generation_pb2, tokenizer_pb2

_MODES = {
    generation_pb2.TOOL_CHOICE_MODE_UNSPECIFIED: ToolChoiceMode.AUTO,
    generation_pb2.TOOL_CHOICE_MODE_AUTO: ToolChoiceMode.AUTO,
    generation_pb2.TOOL_CHOICE_MODE_NONE: ToolChoiceMode.NONE,
    generation_pb2.TOOL_CHOICE_MODE_REQUIRED: ToolChoiceMode.REQUIRED,
}
_MODES_TO_PROTO = {
    ToolChoiceMode.AUTO: generation_pb2.TOOL_CHOICE_MODE_AUTO,
    ToolChoiceMode.NONE: generation_pb2.TOOL_CHOICE_MODE_NONE,
    ToolChoiceMode.REQUIRED: generation_pb2.TOOL_CHOICE_MODE_REQUIRED,
}

ConversationRequest = generation_pb2.ChatRequest | tokenizer_pb2.RenderChatRequest


# --- what a client sends --------------------------------------------------------------------------


def fill_conversation(request: ConversationRequest, prompt: ChatPrompt) -> None:
    """Put a conversation into a request. Raises ValueError and TypeError for what no message can hold."""
    request.messages.extend(map(message_to_proto, prompt.messages))
    request.tools.extend(map(_tool_to_proto, prompt.tools))
    request.chat_template = prompt.chat_template or ""
    request.continue_final_message = prompt.continue_final_message
    request.reasoning_effort = prompt.reasoning_effort
    if prompt.tool_choice is not None:
        request.tool_choice.CopyFrom(_choice_to_proto(prompt.tool_choice))
    if prompt.add_generation_prompt is not None:
        request.add_generation_prompt = prompt.add_generation_prompt
    if prompt.parallel_tool_calls is not None and isinstance(request, generation_pb2.ChatRequest):
        request.parallel_tool_calls = prompt.parallel_tool_calls
    if prompt.chat_template_kwargs:
        variables = struct_pb2.Struct()
        variables.update(dict(prompt.chat_template_kwargs))
        request.chat_template_kwargs.CopyFrom(variables)


def message_to_proto(message: ChatMessage) -> generation_pb2.ChatMessage:
    return generation_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name or "",
        tool_calls=[
            generation_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _tool_to_proto(tool: Tool) -> generation_pb2.Tool:
    return generation_pb2.Tool(name=tool.name, description=tool.description, parameters=tool.parameters)


def _choice_to_proto(choice: ToolChoice) -> generation_pb2.ToolChoice:
    if choice.mode is ToolChoiceMode.NAMED:
        return generation_pb2.ToolChoice(function=choice.function)
    return generation_pb2.ToolChoice(mode=_MODES_TO_PROTO[choice.mode])


# --- what the router makes of it ------------------------------------------------------------------


def chat_prompt_from_proto(request: ConversationRequest) -> ChatPrompt:
    is_chat = isinstance(request, generation_pb2.ChatRequest)
    return ChatPrompt(
        messages=tuple(map(message_from_proto, request.messages)),
        tools=tuple(
            Tool(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in request.tools
        ),
        tool_choice=_choice_from_proto(request.tool_choice) if request.HasField("tool_choice") else None,
        parallel_tool_calls=optional_from_proto(request, "parallel_tool_calls") if is_chat else None,
        reasoning_effort=request.reasoning_effort,
        chat_template=request.chat_template or None,
        chat_template_kwargs=struct_from_proto(request.chat_template_kwargs),
        add_generation_prompt=optional_from_proto(request, "add_generation_prompt"),
        continue_final_message=request.continue_final_message,
    )


def message_from_proto(message: generation_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name or None,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments=call.arguments or "{}") for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _choice_from_proto(choice: generation_pb2.ToolChoice) -> ToolChoice:
    if choice.WhichOneof("choice") == "function":
        return ToolChoice(mode=ToolChoiceMode.NAMED, function=choice.function)
    return ToolChoice(mode=_MODES.get(choice.mode, ToolChoiceMode.UNKNOWN))


# --- what comes back ------------------------------------------------------------------------------


def tool_call_deltas_to_proto(deltas: Iterable[ToolCallDelta]) -> list[generation_pb2.ToolCallDelta]:
    return [
        generation_pb2.ToolCallDelta(index=delta.index, id=delta.id, name=delta.name, arguments=delta.arguments)
        for delta in deltas
    ]


def tool_call_deltas_from_proto(messages: Iterable[generation_pb2.ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    return tuple(
        ToolCallDelta(index=message.index, id=message.id, name=message.name, arguments=message.arguments)
        for message in messages
    )
