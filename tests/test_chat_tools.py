"""Tools and reasoning through a whole router, on workers that say what they are told to."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import fake_workers
from fake_workers import ALPHABET, FakeCluster, make_bundle, make_model, until
from router.__main__ import Router
from router.config import RouterSettings
from twinstage.client import AsyncTwinstageClient, Options, Sampling, Tool, tool_from_function
from twinstage.errors import InvalidRequest
from twinstage.rpc.convert_chat import fill_conversation
from twinstage.settings import read_settings
from twinstage.types import ChatMessage, ChatPrompt, FinishReason, SequenceSpec
from twinstage.v1 import tokenizer_pb2, tokenizer_pb2_grpc

# <tool_call> makes hermes the parser, and </think> qwen3.
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}<tool_call>{% endif %}
{%- for message in messages %}{{ message.role }}:{{ message.content }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %};{% endfor %}
{%- if add_generation_prompt %}A:{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}
{%- if reasoning_effort == "high" %}<think>{% endif %}{% endif %}"""
BUNDLE = make_bundle(chat_template=TEMPLATE)
TOOL = Tool(name="add", parameters='{"type": "object", "properties": {"a": {"type": "integer"}}}')
ARGUMENTS = '{"a": [1, {"b": "ü}"}]}'
CALLS = (
    f'<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


def script(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the workers say this, and then end."""
    tokens = tokens_of(text)

    def scripted(spec: SequenceSpec, position: int) -> int:
        return tokens[min(position, len(tokens) - 1)]

    monkeypatch.setattr(fake_workers, "expected_token", scripted)


def tokens_of(text: str) -> list[int]:
    """The ids of the text's bytes, and the end."""
    letters = bytes_to_letters()
    return [*(ALPHABET.index(letters[byte]) for byte in text.encode()), 256]


def bytes_to_letters() -> dict[int, str]:
    """The letter by which a byte-level vocabulary spells each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    monkeypatch.setattr(fake_workers, "MAX_MODEL_LEN", 2048)
    model = make_model(bundle=BUNDLE, max_model_len=2048)
    async with FakeCluster(bundle=BUNDLE, model=model, total_blocks=1024) as cluster:
        flags = ["--listen", "127.0.0.1:0", "--workers", ",".join(cluster.addresses), "--report-interval", "0.1"]
        running = Router(read_settings(RouterSettings, flags))
        await running.start()
        try:
            await until(lambda: any(model.ready for model in running.workers.models.values()), what="ready")
            yield running
        finally:
            await running.stop()


@pytest.fixture
async def client(router: Router) -> AsyncIterator[AsyncTwinstageClient]:
    async with AsyncTwinstageClient(f"127.0.0.1:{router.port}") as connected:
        yield connected


OPTIONS = Options(sampling=Sampling(seed=1), timeout_s=20)


async def test_tool_calls_whole_and_streamed(client: AsyncTwinstageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, f"<think>Hm?</think>\n\nLet me add.\n{CALLS}")
    answer = await client.chat("1 + 1?", OPTIONS, tools=[TOOL])
    message = answer.message
    assert (message.content, message.reasoning) == ("Let me add.", "Hm?")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("add", ARGUMENTS), ("add", "{}")]
    assert len({call.id for call in message.tool_calls}) == 2
    assert answer.results[0].finish.reason is FinishReason.TOOL_CALLS
    async with client.chat_stream("1 + 1?", OPTIONS, tools=[TOOL]) as stream:
        deltas = [delta async for delta in stream]
    streamed = stream.message()
    assert "".join(delta.text for delta in deltas) == streamed.content == message.content
    assert streamed.reasoning == message.reasoning
    assert [call.arguments for call in streamed.tool_calls] == [call.arguments for call in message.tool_calls]
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.reason is FinishReason.TOOL_CALLS


async def test_each_choice_has_calls_of_its_own(client: AsyncTwinstageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, f"<think>Hm?</think>\n\nLet me add.\n{CALLS}")
    two = Options(sampling=Sampling(seed=1, n=2), timeout_s=20)
    answer = await client.chat("1 + 1?", two, tools=[TOOL])
    async with client.chat_stream("1 + 1?", two, tools=[TOOL]) as stream:
        assert len([delta async for delta in stream if delta.finish is not None]) == 2
    messages = [*(result.message for result in answer.results), stream.message(0), stream.message(1)]
    assert all(message is not None and message.reasoning == "Hm?" for message in messages)
    calls = [call for message in messages if message is not None for call in message.tool_calls]
    assert [call.arguments for call in calls] == [ARGUMENTS, "{}"] * 4
    assert len({call.id for call in calls}) == 8


async def test_an_answer_goes_back_with_its_result(
    client: AsyncTwinstageClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, CALLS)
    question = ChatMessage(role="user", content="1 + 1?")
    asked = (await client.chat([question], OPTIONS, tools=[TOOL])).message
    results = [ChatMessage(role="tool", content="2", tool_call_id=call.id) for call in asked.tool_calls]
    script(monkeypatch, "It is 2.")
    answer = await client.chat([question, asked, *results], OPTIONS, tools=[TOOL])
    assert answer.text == "It is 2."
    assert answer.results[0].finish.reason is FinishReason.STOP


async def test_choices(client: AsyncTwinstageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, CALLS)
    none = await client.chat("1 + 1?", OPTIONS, tools=[TOOL], tool_choice="none")
    assert (none.text, none.message.tool_calls) == (CALLS, ())
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="?"),), tools=(TOOL,), parallel_tool_calls=False)
    assert [call.arguments for call in (await client.chat(prompt, OPTIONS)).message.tool_calls] == [ARGUMENTS]


async def test_a_prompt_that_ends_in_reasoning(client: AsyncTwinstageClient, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, "Hm.</think>Yes.")
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="?"),), reasoning_effort="high")
    message = (await client.chat(prompt, OPTIONS)).message
    assert (message.reasoning, message.content) == ("Hm.", "Yes.")
    assert (await client.chat("?", OPTIONS)).text == "Hm.</think>Yes."


async def test_refusals(client: AsyncTwinstageClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.chat([ChatMessage(role="tool")], OPTIONS, tools=[TOOL, TOOL])
    assert {violation.field for violation in caught.value.violations} == {"messages[0].tool_call_id", "tools[1].name"}


async def test_rendering_is_that_of_chat(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text and ids with tools, and the same refusals."""
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="é"),), tools=(TOOL,), reasoning_effort="high")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        rendered = await stub.RenderChat(render_request(prompt), timeout=10)
        shown = {"type": "function", "function": {"name": "add", "parameters": json.loads(TOOL.parameters)}}
        assert rendered.text == f"{json.dumps([shown])}<tool_call>user:é;A:<think>"
        tokenized = await stub.Tokenize(
            tokenizer_pb2.TokenizeRequest(text=rendered.text, add_special_tokens=False), timeout=10
        )
        assert tokenized.token_ids == rendered.token_ids
        back = await stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=rendered.token_ids), timeout=10)
        assert back.text == rendered.text
        with pytest.raises(grpc.aio.AioRpcError, match=r"tools\[1\].name"):
            await stub.RenderChat(render_request(ChatPrompt(messages=prompt.messages, tools=(TOOL, TOOL))), timeout=10)
        script(monkeypatch, "x")
    async with AsyncTwinstageClient(f"127.0.0.1:{router.port}") as client:
        answer = await client.chat(prompt, OPTIONS)
    assert answer.summary.usage.prompt_tokens == len(rendered.token_ids)


def render_request(prompt: ChatPrompt) -> tokenizer_pb2.RenderChatRequest:
    request = tokenizer_pb2.RenderChatRequest()
    fill_conversation(request, prompt)
    return request


def look_up(city: str, days: int = 1, *, tags: list[str] | None = None) -> str:
    """Look it up."""
    return f"{city} {days} {tags}"


def by_position(city: str, /) -> str:
    return city


def any_number(*cities: str) -> str:
    return "".join(cities)


def of_no_schema(client: AsyncTwinstageClient) -> None:
    del client


def test_tools_from_functions() -> None:
    tool = tool_from_function(look_up)
    assert (tool.name, tool.description) == ("look_up", "Look it up.")
    schema = json.loads(tool.parameters)
    assert schema["required"] == ["city"]
    assert {name: entry.get("type") for name, entry in schema["properties"].items()} == {
        "city": "string",
        "days": "integer",
        "tags": None,
    }
    for function in (by_position, any_number, of_no_schema):
        with pytest.raises(TypeError, match=f"{function.__name__} cannot be a tool"):
            tool_from_function(function)


async def test_the_documented_tool_loop(
    router: Router, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of docs/chat.md, as it stands there: the model asks, gets the result, and answers."""
    document = (Path(__file__).parent.parent / "docs" / "chat.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    asks = tokens_of('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>')
    answers = tokens_of("Blue.")
    result = bytes(tokens_of('"sky": "blue"')[:-1])

    def scripted(spec: SequenceSpec, position: int) -> int:
        has_result = result in bytes(token_id for token_id in spec.prompt_token_ids if token_id < 256)
        tokens = answers if has_result else asks
        return tokens[min(position, len(tokens) - 1)]

    monkeypatch.setattr(fake_workers, "expected_token", scripted)
    code = compile(program.replace("localhost:50051", f"127.0.0.1:{router.port}"), "docs/chat.md", "exec")
    await asyncio.to_thread(exec, code, {})
    assert capsys.readouterr().out.splitlines()[-1] == "Blue."  # behind the log of the router
