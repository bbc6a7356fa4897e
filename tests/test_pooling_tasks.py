"""What pooling models can do beside one vector a text, through the router, on workers without a model."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from fake_workers import FakeCluster, make_bundle, make_model, make_probabilities, make_score, make_vector, until
from router.__main__ import Router
from router.config import RouterSettings
from served_router import details, failing
from twinstage.settings import read_settings
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.score_template import tokenize_pair
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import ModelDescription, Task
from twinstage.v1 import embedding_pb2, embedding_pb2_grpc, model_pb2, model_pb2_grpc, scoring_pb2, scoring_pb2_grpc
from twinstage.worker.v1 import worker_pb2

BUNDLE = make_bundle(max_input_tokens=12)
TEMPLATE = "Q:{{ query }}|D:{{ document }}?"
TOKEN_EMBED = embedding_pb2.POOLING_TASK_TOKEN_EMBED


@contextlib.asynccontextmanager
async def pooling(model: ModelDescription, bundle: TokenizerBundle) -> AsyncIterator[grpc.aio.Channel]:
    model = replace(model, tokenizer_fingerprint=bundle.fingerprint)
    async with FakeCluster(prefill=1, decode=0, model=model, bundle=bundle) as cluster:
        flags = ["--listen", "127.0.0.1:0", "--workers", *cluster.addresses]
        router = Router(read_settings(RouterSettings, flags))
        await router.start()
        try:
            await until(lambda: router.workers.models, what="the model")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
                yield channel
        finally:
            await router.stop()


def embedding(channel: grpc.aio.Channel) -> Any:
    return embedding_pb2_grpc.EmbeddingServiceStub(channel)  # type: ignore[arg-type]


def scoring(channel: grpc.aio.Channel) -> Any:
    return scoring_pb2_grpc.ScoringServiceStub(channel)  # type: ignore[arg-type]


def scored(bundle: TokenizerBundle, query: str, document: str, **cut: Any) -> float:
    token_ids, types = tokenize_pair(TextTokenizer(bundle), query, document, **cut)
    return make_score(worker_pb2.EncodeInput(token_ids=token_ids, token_type_ids=types))


@pytest.mark.parametrize("template", [None, TEMPLATE])
async def test_a_scoring_model_reads_each_pair_as_a_whole(template: str | None) -> None:
    bundle = replace(BUNDLE, score_template=template)
    model = make_model(name="scorer", task=Task.SCORE, bundle=bundle)
    async with pooling(model, bundle) as channel:
        documents = ["b", "bcd", "bc"]
        request = scoring_pb2.ScoreRequest(queries=["a"], documents=documents)
        response = await scoring(channel).Score(request, timeout=10)
        expected = [scored(bundle, "a", document) for document in documents]
        assert [entry.score for entry in response.scores] == pytest.approx(expected)
        assert response.usage.prompt_tokens == sum(
            len(tokenize_pair(TextTokenizer(bundle), "a", document)[0]) for document in documents
        )
        ranked = await scoring(channel).Rerank(
            scoring_pb2.RerankRequest(query="a", documents=documents, top_n=2), timeout=10
        )
        assert [entry.index for entry in ranked.results] == [1, 2]
        wrong = scoring_pb2.ScoreRequest(queries=["", "a" * 9, "a"], documents=["b", "c" * 9, "x" * 2000])
        error = await failing(scoring(channel).Score(wrong, timeout=10))
        fields = [entry.field for entry in details(error)["BadRequest"].field_violations]
        assert fields == ["queries[0]", "documents[2]"], "what is wrong without tokenizing"
        wrong = scoring_pb2.ScoreRequest(queries=["a" * 9], documents=["b", "c" * 9])
        error = await failing(scoring(channel).Score(wrong, timeout=10))
        fields = [entry.field for entry in details(error)["BadRequest"].field_violations]
        assert fields[-1] == "documents[1]", "too long as a pair"
        wrong.truncation.tokens = 6 if template is None else 3
        if template is not None:  # its own words, and the query, leave no room
            error = await failing(scoring(channel).Score(wrong, timeout=10))
            (first, _) = details(error)["BadRequest"].field_violations
            assert (first.field, "when all is cut" in first.description) == ("documents[0]", True)
            wrong.truncation.model_limit.SetInParent()
            wrong.queries[0] = "a"
        response = await scoring(channel).Score(wrong, timeout=10)
        if template is None:
            assert response.scores[1].score == pytest.approx(scored(bundle, "a" * 9, "c" * 9, max_tokens=6))
        else:
            room = 12 - len(TextTokenizer(bundle).encode("Q:a|D:?", add_special_tokens=False))
            assert response.scores[1].score == pytest.approx(scored(bundle, "a", "c" * room))
        error = await failing(embedding(channel).Embed(embedding_pb2.EmbedRequest(texts=["a"]), timeout=10))
        assert details(error)["ErrorInfo"].reason == "TASK_NOT_SUPPORTED"


async def test_a_classifier_gives_the_probabilities_of_its_labels() -> None:
    model = replace(make_model(name="classifier", task=Task.CLASSIFY, bundle=BUNDLE), labels=("good", "bad"))
    async with pooling(model, BUNDLE) as channel:
        listed: Any = model_pb2_grpc.ModelServiceStub(channel)  # type: ignore[arg-type]
        described = (await listed.GetModel(model_pb2.GetModelRequest(), timeout=10)).model
        assert (list(described.labels), list(described.capabilities)) == (
            ["good", "bad"],
            [model_pb2.MODEL_CAPABILITY_CLASSIFY],
        )
        for task in (embedding_pb2.POOLING_TASK_UNSPECIFIED, embedding_pb2.POOLING_TASK_CLASSIFY):
            request = embedding_pb2.EncodeRequest(inputs=[embedding_pb2.EncodeInput(text="abc")], task=task)
            (result,) = (await embedding(channel).Encode(request, timeout=10)).embeddings
            assert list(result.values) == list(struct.unpack("<2f", make_probabilities([1, 2, 3])))
            assert (result.rows, result.dimensions) == (1, 2)
        request.dimensions = 1
        error = await failing(embedding(channel).Encode(request, timeout=10))
        assert [entry.field for entry in details(error)["BadRequest"].field_violations] == ["dimensions"]
        for task in (embedding_pb2.POOLING_TASK_EMBED, TOKEN_EMBED):
            request = embedding_pb2.EncodeRequest(inputs=[embedding_pb2.EncodeInput(text="abc")], task=task)
            error = await failing(embedding(channel).Encode(request, timeout=10))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_one_vector_per_token() -> None:
    async with pooling(make_model(task=Task.EMBED, bundle=BUNDLE), BUNDLE) as channel:
        inputs = [embedding_pb2.EncodeInput(text=text) for text in ("abc", "z")]
        request = embedding_pb2.EncodeRequest(inputs=inputs, task=TOKEN_EMBED, normalize=False, dimensions=2)
        results = (await embedding(channel).Encode(request, timeout=10)).embeddings
        assert [(result.rows, result.dimensions) for result in results] == [(3, 2), (1, 2)]
        token_ids = TextTokenizer(BUNDLE).encode("abc")
        assert list(results[0].values) == [float(value) for token_id in token_ids for value in (1, token_id)]


async def test_parameters_are_one_for_all_or_one_per_input() -> None:
    prompts = {"query": "qu"}
    bundle = replace(BUNDLE, prompts=prompts)
    async with pooling(make_model(task=Task.EMBED, bundle=bundle), bundle) as channel:
        inputs = [embedding_pb2.EncodeInput(text=text) for text in ("abc", "ab", "a")]
        each = [
            embedding_pb2.EncodeParameters(task=TOKEN_EMBED, normalize=False),
            embedding_pb2.EncodeParameters(prompt_name="query", dimensions=1),
            embedding_pb2.EncodeParameters(),
        ]
        request = embedding_pb2.EncodeRequest(inputs=inputs, parameters=each)
        before = request.SerializeToString(deterministic=True)
        results = (await embedding(channel).Encode(request, timeout=10)).embeddings
        assert request.SerializeToString(deterministic=True) == before
        assert [(result.rows, result.dimensions, result.prompt_tokens) for result in results] == [
            (3, 4, 3),
            (1, 1, 4),
            (1, 4, 1),
        ]
        assert results[0].values[0] == 1.0, "not scaled"
        request.task = embedding_pb2.POOLING_TASK_EMBED
        results = (await embedding(channel).Encode(request, timeout=10)).embeddings
        assert [result.rows for result in results] == [1, 1, 1], "the request's own task goes before"
        for_all = embedding_pb2.EncodeRequest(inputs=inputs, parameters=each[1:2])
        results = (await embedding(channel).Encode(for_all, timeout=10)).embeddings
        assert [(result.dimensions, result.prompt_tokens) for result in results] == [(1, 5), (1, 4), (1, 3)]
        wrong = embedding_pb2.EncodeRequest(inputs=inputs, parameters=each[:2])
        error = await failing(embedding(channel).Encode(wrong, timeout=10))
        (violation,) = details(error)["BadRequest"].field_violations
        assert violation.field == "parameters"
        assert "has 2 entries, inputs has 3" in violation.description
        each[2].dimensions = 99
        wrong = embedding_pb2.EncodeRequest(inputs=inputs, parameters=each)
        error = await failing(embedding(channel).Encode(wrong, timeout=10))
        assert [entry.field for entry in details(error)["BadRequest"].field_violations] == ["parameters[2].dimensions"]
        each[2].truncation.side = 9  # type: ignore[assignment]
        wrong = embedding_pb2.EncodeRequest(inputs=inputs, parameters=each)
        error = await failing(embedding(channel).Encode(wrong, timeout=10))
        fields = [entry.field for entry in details(error)["BadRequest"].field_violations]
        assert fields == ["parameters[2].truncation.side"]
        each[2] = embedding_pb2.EncodeParameters(task=embedding_pb2.POOLING_TASK_CLASSIFY)
        wrong = embedding_pb2.EncodeRequest(inputs=inputs, parameters=each)
        error = await failing(embedding(channel).Encode(wrong, timeout=10))
        assert details(error)["ErrorInfo"].reason == "TASK_NOT_SUPPORTED"


async def test_a_thousand_vectors_of_a_thousand_numbers_fit_into_a_stream() -> None:
    bundle = make_bundle(max_input_tokens=1024)
    model = make_model(task=Task.EMBED, bundle=bundle, max_model_len=1024)
    text = "ab" * 512
    async with pooling(replace(model, embedding_dimensions=1024, token_dimensions=1024), bundle) as channel:
        entry = embedding_pb2.EncodeInput(text=text)
        error = await failing(
            embedding(channel).Encode(embedding_pb2.EncodeRequest(inputs=[entry], task=TOKEN_EMBED), timeout=30)
        )
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "gRPC's own limit of a client"
        requests = [
            embedding_pb2.EncodeStreamRequest(input=entry, task=TOKEN_EMBED),
            embedding_pb2.EncodeStreamRequest(input=entry),
        ]
        responses = [response async for response in embedding(channel).EncodeStream(iter(requests), timeout=30)]
        parts = [response for response in responses if response.index == 0]
        assert [response.more_follows for response in parts] == [True] * (len(parts) - 1) + [False]
        assert sum(part.embedding.rows for part in parts) == 1024
        assert all(len(part.embedding.values) == 1024 * part.embedding.rows for part in parts)
        expected = [make_vector([token_id], normalize=True) for token_id in TextTokenizer(bundle).encode("ab")]
        values = [value for part in parts for value in part.embedding.values]
        for row in (0, 511, 1022, 1023):
            assert values[1024 * row : 1024 * row + 4] == pytest.approx(struct.unpack("<4f", expected[row % 2]))
        assert [response.index for response in responses[len(parts) :]] == [1]


@pytest.mark.parametrize("similarity", ["dot", "euclidean", "manhattan"])
async def test_vectors_are_compared_as_the_model_says(similarity: str) -> None:
    bundle = replace(BUNDLE, similarity=similarity)
    async with pooling(make_model(task=Task.EMBED, bundle=bundle), bundle) as channel:
        request = scoring_pb2.ScoreRequest(queries=["abc"], documents=["abc", "cx"])
        scores = [entry.score for entry in (await scoring(channel).Score(request, timeout=10)).scores]
        vectors = [
            np.frombuffer(make_vector(TextTokenizer(bundle).encode(text), normalize=False), "<f4")
            for text in ("abc", "cx")
        ]
        similar = sentence_transformers_similarity(similarity)
        assert scores == pytest.approx([similar(vectors[0], vector) for vector in vectors], abs=1e-5)


def sentence_transformers_similarity(name: str) -> Callable[[Any, Any], float]:
    """By their definition in `sentence_transformers.util`."""
    return {
        "dot": lambda left, right: float(left @ right),
        "euclidean": lambda left, right: -float(np.linalg.norm(left - right)),
        "manhattan": lambda left, right: -float(np.abs(left - right).sum()),
    }[name]


async def test_a_prompt_stays_where_the_beginning_of_a_text_is_cut() -> None:
    bundle = replace(BUNDLE, prompts={"query": "qu"}, pools_prompt=False)
    async with pooling(make_model(task=Task.EMBED, bundle=bundle), bundle) as channel:
        vectors = []
        for text, cut in (("abcde" * 300 + "xyz", 5), ("xyz", None), ("xyz", 5)):
            request = embedding_pb2.EmbedRequest(texts=[text], normalize=False, prompt_name="query")
            if cut is not None:
                request.truncation.tokens = cut
            response = await embedding(channel).Embed(request, timeout=10)
            assert response.usage.prompt_tokens == 5
            vectors.append(list(response.embeddings[0].values))
        assert vectors[0] == vectors[1] == vectors[2], "the prompt is not pooled, and the text is cut to its end"


async def test_vectors_of_tokens_have_a_size_of_their_own() -> None:
    model = replace(make_model(task=Task.EMBED, bundle=BUNDLE), embedding_dimensions=3, token_dimensions=8)
    async with pooling(model, BUNDLE) as channel:
        entry = embedding_pb2.EncodeInput(text="abc")
        for wanted in (3, 6, 8):
            request = embedding_pb2.EncodeRequest(inputs=[entry], task=TOKEN_EMBED, dimensions=wanted, normalize=False)
            (result,) = (await embedding(channel).Encode(request, timeout=10)).embeddings
            assert (result.rows, result.dimensions, len(result.values)) == (3, wanted, 3 * wanted)
            assert list(result.values[wanted:])[:2] == [1.0, TextTokenizer(BUNDLE).encode("b")[0]]
        request.dimensions = 9
        error = await failing(embedding(channel).Encode(request, timeout=10))
        assert [entry.field for entry in details(error)["BadRequest"].field_violations] == ["dimensions"]


async def test_an_answer_that_no_message_holds_is_refused_before_it_is_computed() -> None:
    size = 1_000_000
    model = replace(make_model(task=Task.EMBED, bundle=BUNDLE), embedding_dimensions=size, token_dimensions=size)
    async with pooling(model, BUNDLE) as channel:
        inputs = [embedding_pb2.EncodeInput(text="abcdefgh")] * 2
        error = await failing(
            embedding(channel).Encode(embedding_pb2.EncodeRequest(inputs=inputs, task=TOKEN_EMBED), timeout=10)
        )
        (violation,) = details(error)["BadRequest"].field_violations
        assert (violation.field, "16000000 numbers" in violation.description) == ("inputs", True)
        assert "use EncodeStream" in violation.description


async def test_prompts_go_before_texts_by_name() -> None:
    prompts = {"query": "qu", "passage": "p"}
    bundle = replace(BUNDLE, prompts=prompts, default_prompt_name="passage", pools_prompt=False)
    async with pooling(make_model(task=Task.EMBED, bundle=bundle), bundle) as channel:
        vectors = {}
        for name in (None, "", "query"):
            request = embedding_pb2.EmbedRequest(texts=["abc"], normalize=False, prompt_name=name)
            response = await embedding(channel).Embed(request, timeout=10)
            assert response.usage.prompt_tokens == {None: 4, "": 3, "query": 5}[name]
            vectors[name] = list(response.embeddings[0].values)
        assert vectors[None] == vectors[""] == vectors["query"], "the prompt is not pooled"
        request.prompt_name = "other"
        error = await failing(embedding(channel).Embed(request, timeout=10))
        (violation,) = details(error)["BadRequest"].field_violations
        assert (violation.field, "passage, query" in violation.description) == ("prompt_name", True)
        compared = await scoring(channel).Score(scoring_pb2.ScoreRequest(queries=["a"], documents=["b"]), timeout=10)
        assert compared.usage.prompt_tokens == len("qua") + len("pb")
