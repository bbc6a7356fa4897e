"""Requests to an embedding model: what it alone answers to them, how they are made, and whether that came back."""

from __future__ import annotations

import enum
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertConfig, BertModel

from chaos.cases import AnsweredCase, Prompt
from test_embedding_model import _write_folder
from tiny_models import VOCABULARY_SIZE
from twinstage.models.pooling.load import load_pooling
from twinstage.models.pooling.model import PoolingModel
from twinstage.models.resolve import resolve_model
from twinstage.text.bundle import read_bundle
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import PoolingInput, PoolingTask
from twinstage.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc, scoring_pb2, scoring_pb2_grpc

if TYPE_CHECKING:
    from chaos.load import Received

MODEL_NAME = "embedder"
_TOLERANCE = 1e-5  # float32, in batches of whatever others are there
_WORDS = ("river", "old", "clock", "the", "copper", "train", "wheat", "and", "night", "two", "map", "sea")

Vector = NDArray[np.float32]


class Way(enum.Enum):
    """What is asked."""

    EMBED = embedding_pb2.POOLING_TASK_EMBED
    TOKEN_EMBED = embedding_pb2.POOLING_TASK_TOKEN_EMBED
    SCORE = "score"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCase:
    """Inputs to encode, or a query and documents to score; those are texts."""

    way: Way
    inputs: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingAnswer:
    """What a client must get: one array per input [numbers], or per document [1], the score."""

    vectors: tuple[Vector, ...]
    num_prompt_tokens: int


def make_embedder(directory: Path) -> Path:
    """Write a random BERT of 2 layers as a sentence-transformers folder."""
    torch.manual_seed(11)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
    }
    model = BertModel(BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))
    return _write_folder(directory, model)


def pooling_cases(model: Path, *, count: int, longest: int) -> list[AnsweredCase]:
    """`count` requests of at most `longest` inputs, always the same, with their answers."""
    random = Random(count)
    resolved = resolve_model(str(model))
    tokenizer, pooling = TextTokenizer(read_bundle(resolved.directory)), load_pooling(resolved)
    ways = [list(Way)[number % len(Way)] for number in range(count)]
    return [_answered(PoolingCase(way=way, inputs=_inputs(random, way, longest)), tokenizer, pooling) for way in ways]


def _inputs(random: Random, way: Way, longest: int) -> tuple[Prompt, ...]:
    count = random.choice((2, 5, longest // 4, longest))
    texts = [f"{number} {' '.join(random.choices(_WORDS, k=random.randint(1, 7)))}" for number in range(count)]
    if way in (Way.SCORE, Way.RERANK) or random.random() < 0.5:
        return tuple(texts)
    lengths = [random.randint(1, 40) for _ in texts]
    return tuple(tuple(random.randrange(3, VOCABULARY_SIZE) for _ in range(length)) for length in lengths)


def _answered(case: PoolingCase, tokenizer: TextTokenizer, model: PoolingModel) -> AnsweredCase:
    ids = [tokenizer.encode(entry) if isinstance(entry, str) else entry for entry in case.inputs]
    task = PoolingTask.TOKEN_EMBED if case.way is Way.TOKEN_EMBED else PoolingTask.EMBED
    vectors = model.encode([PoolingInput(token_ids=entry) for entry in ids], task=task)
    if case.way in (Way.SCORE, Way.RERANK):
        query, *documents = vectors
        vectors = [np.array([query @ document], dtype=np.float32) for document in documents]
    answer = PoolingAnswer(
        vectors=tuple(vector.reshape(-1) for vector in vectors), num_prompt_tokens=sum(len(entry) for entry in ids)
    )
    return AnsweredCase(case=case, answer=answer)


# --- calls ----------------------------------------------------------------------------------------


def open_call(channel: grpc.aio.Channel, case: PoolingCase, *, is_streamed: bool, timeout_s: float) -> Any:
    """The call, which has begun."""
    if case.way in (Way.SCORE, Way.RERANK):
        query, *documents = [str(entry) for entry in case.inputs]
        scoring = scoring_pb2_grpc.ScoringServiceStub(channel)
        if case.way is Way.SCORE:
            score = scoring_pb2.ScoreRequest(queries=[query], documents=documents, model=MODEL_NAME)
            return scoring.Score(score, timeout=timeout_s)
        rerank = scoring_pb2.RerankRequest(query=query, documents=documents, model=MODEL_NAME)
        return scoring.Rerank(rerank, timeout=timeout_s)
    stub = embedding_pb2_grpc.EmbeddingServiceStub(channel)
    inputs = [_encode_input(entry) for entry in case.inputs]
    if is_streamed:
        return stub.EncodeStream(_requests(inputs, case.way.value), timeout=timeout_s)
    request = embedding_pb2.EncodeRequest(inputs=inputs, model=MODEL_NAME, task=case.way.value)
    return stub.Encode(request, timeout=timeout_s)


async def _requests(
    inputs: list[embedding_pb2.EncodeInput], task: Any
) -> AsyncIterator[embedding_pb2.EncodeStreamRequest]:
    for entry in inputs:
        yield embedding_pb2.EncodeStreamRequest(input=entry, model=MODEL_NAME, task=task)


def _encode_input(entry: Prompt) -> embedding_pb2.EncodeInput:
    if isinstance(entry, str):
        return embedding_pb2.EncodeInput(text=entry)
    return embedding_pb2.EncodeInput(token_ids=common_pb2.TokenIds(ids=entry))


async def take(rpc: Any, received: Received, case: PoolingCase, *, is_streamed: bool) -> None:
    """Put all that comes back into `received`. Raises the status of the call."""
    if case.way in (Way.EMBED, Way.TOKEN_EMBED) and is_streamed:
        async for response in rpc:
            received.event_times.append(time.monotonic())
            _take_item(received, response)
        return
    response = await rpc
    received.usage, received.placement, received.num_summaries = response.usage, response.placement, 1
    if case.way is Way.RERANK:
        scores = [result.score for result in response.results]
        if scores != sorted(scores, reverse=True):
            received.disorder.append(f"documents in the order of {scores}")
        received.vectors = {result.index: np.array([result.score], np.float32) for result in response.results}
    elif case.way is Way.SCORE:
        received.vectors = {result.index: np.array([result.score], np.float32) for result in response.scores}
    else:
        received.vectors = {entry.index: np.array(entry.values, np.float32) for entry in response.embeddings}


def _take_item(received: Received, response: embedding_pb2.EncodeStreamResponse) -> None:
    known = [*received.vectors, *received.item_failures]
    if response.index not in (len(known), len(known) - 1):
        received.disorder.append(f"item {response.index} after {len(known)} others")
    if response.HasField("error"):
        received.item_failures[response.index] = response.error
        return
    part = np.array(response.embedding.values, np.float32)
    before = received.vectors.get(response.index)
    received.vectors[response.index] = part if before is None else np.concatenate([before, part])


# --- judging --------------------------------------------------------------------------------------


def wrong_vectors(received: Received, answer: PoolingAnswer) -> Iterator[str]:
    """Nothing that was ever sent may be anything but what the model alone computes."""
    for index, vector in received.vectors.items():
        if index >= len(answer.vectors):
            yield f"item {index} of {len(answer.vectors)}"
        elif vector.shape != answer.vectors[index].shape or not np.allclose(
            vector, answer.vectors[index], atol=_TOLERANCE, rtol=0
        ):
            yield f"other numbers for item {index}: {vector[:3]}, not {answer.vectors[index][:3]}"


def not_all_vectors(received: Received, answer: PoolingAnswer) -> Iterator[str]:
    """What is missing in an answer that is said to be whole."""
    if len(received.vectors) + len(received.item_failures) != len(answer.vectors):
        yield f"{len(received.vectors)} items and {len(received.item_failures)} errors for {len(answer.vectors)}"
    if received.usage is not None and received.usage.prompt_tokens != answer.num_prompt_tokens:
        yield f"usage of {received.usage.prompt_tokens} tokens, not {answer.num_prompt_tokens}"
