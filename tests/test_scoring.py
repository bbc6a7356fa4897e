"""Score and Rerank as clients see them, on workers without a model; and each service's health by model."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from router import limits
from router.service import EMBEDDING_SERVICE, GENERATION_SERVICE, SCORING_SERVICE, WORK_OF_SERVICE
from served_router import MAX_INPUT_TOKENS, Service, details, failing, serving, vector_of
from twinstage.errors import ComputeFailed
from twinstage.v1 import embedding_pb2, scoring_pb2, scoring_pb2_grpc

DOCUMENTS = ["abc", "zzzzzzzzz", "abz", "b", "abc"]


def scoring(service: Service) -> Any:
    return scoring_pb2_grpc.ScoringServiceStub(service.channel)


def cosine(first: str, second: str) -> float:
    pair = zip(vector_of(first, normalize=True), vector_of(second, normalize=True), strict=True)
    return sum(left * right for left, right in pair)


async def score(service: Service, queries: list[str], documents: list[str], **fields: Any) -> Any:
    request = scoring_pb2.ScoreRequest(queries=queries, documents=documents, **fields)
    return await scoring(service).Score(request, timeout=10)


async def test_one_query_scores_all_documents_and_many_score_their_own() -> None:
    async with serving(embed=2) as service:
        one_to_many = await score(service, ["abz"], DOCUMENTS)
        assert [entry.index for entry in one_to_many.scores] == list(range(len(DOCUMENTS)))
        expected = [cosine("abz", document) for document in DOCUMENTS]
        assert [entry.score for entry in one_to_many.scores] == pytest.approx(expected, abs=1e-6)
        assert one_to_many.usage.prompt_tokens == len("abz") + sum(map(len, DOCUMENTS)), "the query counts once"
        assert one_to_many.placement.prefill_worker.startswith("embed-")
        assert one_to_many.timing.total.ToTimedelta() >= one_to_many.timing.prefill.ToTimedelta()
        assert one_to_many.timing.prefill.ToMicroseconds() > 0
        queries = DOCUMENTS[::-1]
        each = await score(service, queries, DOCUMENTS, request_id="mine")
        expected = [cosine(*pair) for pair in zip(queries, DOCUMENTS, strict=True)]
        assert [entry.score for entry in each.scores] == pytest.approx(expected, abs=1e-6)
        assert (each.request_id, each.model) == ("mine", "embedder")
        single = await score(service, ["b"], ["b"])
        assert [entry.score for entry in single.scores] == pytest.approx([1.0])
        assert max(entry.score for entry in single.scores) <= 1.0


async def test_nothing_scores_nothing() -> None:
    async with serving() as service:
        for queries in ([], ["abc"]):
            response = await score(service, queries, [])
            assert (list(response.scores), response.usage.prompt_tokens) == ([], 0)
        ranked = await scoring(service).Rerank(scoring_pb2.RerankRequest(query="abc"), timeout=10)
        assert list(ranked.results) == []
        assert not service.embedders.prefill[0].encode_batches


@pytest.mark.parametrize(
    ("queries", "documents"), [(["a", "b", "c"], ["d"]), (["a", "b"], ["c", "d", "e"]), ([], ["a"]), (["a", "b"], [])]
)
async def test_lengths_that_do_not_pair_are_refused_with_both(queries: list[str], documents: list[str]) -> None:
    async with serving() as service:
        error = await failing(score(service, queries, documents))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = details(error)["BadRequest"].field_violations
        assert violation.field == "documents"
        assert f"has {len(documents)} entries, queries has {len(queries)}" in violation.description


async def test_rerank_sorts_and_keeps_the_index() -> None:
    async with serving() as service:
        response = await scoring(service).Rerank(
            scoring_pb2.RerankRequest(query="abc", documents=DOCUMENTS), timeout=10
        )
        scores = {index: cosine("abc", document) for index, document in enumerate(DOCUMENTS)}
        assert [entry.index for entry in response.results] == sorted(scores, key=lambda index: -round(scores[index], 6))
        assert [entry.index for entry in response.results][:2] == [0, 4], "equal ones stay in their order"
        for entry in response.results:
            assert entry.score == pytest.approx(scores[entry.index], abs=1e-6)
        for top_n, expected in ((2, 2), (99, len(DOCUMENTS))):
            request = scoring_pb2.RerankRequest(query="abc", documents=DOCUMENTS, top_n=top_n)
            best = await scoring(service).Rerank(request, timeout=10)
            assert list(best.results) == list(response.results)[:expected]
            assert best.usage.prompt_tokens == response.usage.prompt_tokens


async def test_all_that_is_wrong_is_told_at_once() -> None:
    async with serving() as service:
        error = await failing(score(service, ["x" * (MAX_INPUT_TOKENS + 1), "a"], ["", "b"]))
        assert [entry.field for entry in details(error)["BadRequest"].field_violations] == [
            "queries[0]",
            "documents[0]",
        ]
        request = scoring_pb2.RerankRequest(
            documents=["a"], top_n=0, request_id="\n", truncation=embedding_pb2.Truncation(tokens=99)
        )
        error = await failing(scoring(service).Rerank(request, timeout=10))
        fields = [entry.field for entry in details(error)["BadRequest"].field_violations]
        assert fields == ["request_id", "truncation.tokens", "top_n"]
        error = await failing(scoring(service).Rerank(scoring_pb2.RerankRequest(documents=["a"]), timeout=10))
        assert [entry.field for entry in details(error)["BadRequest"].field_violations] == ["query"]
        error = await failing(score(service, ["a"], ["a"] * (limits.MAX_INPUTS + 1)))
        (violation,) = details(error)["BadRequest"].field_violations
        assert (violation.field, str(limits.MAX_INPUTS) in violation.description) == ("documents", True)


async def test_long_texts_are_cut_when_asked() -> None:
    async with serving() as service:
        cut = embedding_pb2.Truncation(tokens=2, side=embedding_pb2.TRUNCATION_SIDE_RIGHT)
        response = await score(service, ["abxyz"], ["acxyz"], truncation=cut)
        assert [entry.score for entry in response.scores] == pytest.approx([cosine("ab", "ac")], abs=1e-6)


async def test_a_worker_that_fails_is_replaced_and_a_deadline_holds() -> None:
    async with serving(embed=2) as service:
        service.embedders.prefill[0].script.fail("encode", ComputeFailed("no"), times=99)
        for _ in range(2):
            assert (await score(service, ["a"], ["b"])).placement.prefill_worker == "embed-prefill-1"
        for worker in service.embedders.prefill:
            worker.script.stall("encode")
            worker.script.stall("encode")
        request = scoring_pb2.ScoreRequest(queries=["a"], documents=["b"])
        error = await failing(scoring(service).Score(request, timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_what_a_model_cannot_do_is_refused_and_its_service_does_not_serve() -> None:
    async with serving() as service:
        error = await failing(score(service, ["a"], ["b"], model="fake"))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details(error)["ErrorInfo"].reason == "TASK_NOT_SUPPORTED"
        listed = await service.health.List(health_pb2.HealthListRequest())
        serving_now = {
            name
            for name, response in listed.statuses.items()
            if response.status == health_pb2.HealthCheckResponse.SERVING and name.partition("/")[0] in WORK_OF_SERVICE
        }
        assert serving_now == {
            GENERATION_SERVICE,
            EMBEDDING_SERVICE,
            SCORING_SERVICE,
            f"{GENERATION_SERVICE}/fake",
            f"{EMBEDDING_SERVICE}/embedder",
            f"{SCORING_SERVICE}/embedder",
        }
        status = await service.health.Check(health_pb2.HealthCheckRequest(service=f"{SCORING_SERVICE}/fake"))
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
