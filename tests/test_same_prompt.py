"""One prompt by every way to ask: the same text."""

from __future__ import annotations

import asyncio

import pytest

from harness import ProcessCluster
from node_client import stream_answer
from twinstage.client import AsyncTwinstageClient, Options, Sampling, Stopping, TwinstageClient
from twinstage.types import ChatMessage, TokenPrompt
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("tiny")

CONVERSATION = (
    ChatMessage(role="system", content="You are brief."),
    ChatMessage(role="user", content="Where does the Seine flow? 🌊"),
)
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 11}
STOPPING = {"max_tokens": 48, "ignore_eos": True}
OPTIONS = Options(sampling=Sampling(**SAMPLING), stopping=Stopping(**STOPPING))


def test_every_way_to_ask_gives_the_same_text(tiny_cluster: ProcessCluster) -> None:
    address = tiny_cluster.address
    with TwinstageClient(address) as client:
        rendered = client.render_chat(CONVERSATION)
        assert client.tokenize(rendered.text) == rendered.token_ids
        texts = {
            "SDK, chat": client.chat(CONVERSATION, OPTIONS).text,
            "SDK, chat stream": "".join(delta.text for delta in client.chat_stream(CONVERSATION, OPTIONS)),
            "SDK, token ids": client.generate(TokenPrompt(token_ids=rendered.token_ids), OPTIONS).text,
        }
    texts |= _of_stubs(tiny_cluster, rendered.text)
    texts["SDK, asyncio"] = asyncio.run(_of_asyncio(address, rendered.text))
    prompt = {"prompt": rendered.text, "sampling": SAMPLING, "stopping": STOPPING}
    texts["Node.js"] = stream_answer(address, prompt)["text"]
    assert len(texts["SDK, chat"]) > 10
    assert set(texts.values()) == {texts["SDK, chat"]}, texts


def _of_stubs(cluster: ProcessCluster, prompt: str) -> dict[str, str]:
    options = {
        "sampling": common_pb2.SamplingOptions(**SAMPLING),
        "stopping": common_pb2.StoppingOptions(**STOPPING),
    }
    generate = generation_pb2.GenerateRequest(prompt=prompt, **options)
    prompts = generation_pb2.PromptBatch(
        prompts=[generation_pb2.PromptInput(prompt=text) for text in ("other", prompt)]
    )
    batch = generation_pb2.GenerateRequest(batch=prompts, **options)
    chat = generation_pb2.ChatRequest(
        messages=[generation_pb2.ChatMessage(role=m.role, content=m.content) for m in CONVERSATION], **options
    )
    with cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return {
            "Generate": stub.Generate(generate, timeout=30).results[0].text,
            "Generate, second of a batch": stub.Generate(batch, timeout=30).results[1].text,
            "GenerateStream": "".join(event.delta.text for event in stub.GenerateStream(generate, timeout=30)),
            "Chat": stub.Chat(chat, timeout=30).results[0].message.content,
            "ChatStream": "".join(event.delta.text for event in stub.ChatStream(chat, timeout=30)),
        }


async def _of_asyncio(address: str, prompt: str) -> str:
    async with AsyncTwinstageClient(address) as client, client.generate_stream(prompt, OPTIONS) as stream:
        return "".join([delta.text async for delta in stream])
