"""Conversion between domain types and the scoring messages of `twinstage.v1`, on the router's side."""

from __future__ import annotations

from collections.abc import Iterable

from twinstage.rpc.convert_embedding import truncation_from_proto
from twinstage.rpc.convert_values import optional_from_proto
from twinstage.types import RawScoreRequest
from twinstage.v1 import scoring_pb2


def score_request_from_proto(request: scoring_pb2.ScoreRequest) -> RawScoreRequest:
    """Raises InvalidRequest for enumeration values that this version does not know."""
    return RawScoreRequest(
        queries=tuple(request.queries),
        documents=tuple(request.documents),
        model=request.model,
        request_id=request.request_id,
        truncation=truncation_from_proto(request.truncation),
    )


def rerank_request_from_proto(request: scoring_pb2.RerankRequest) -> RawScoreRequest:
    """Raises InvalidRequest for enumeration values that this version does not know."""
    return RawScoreRequest(
        queries=(request.query,),
        documents=tuple(request.documents),
        query_field="query",
        model=request.model,
        request_id=request.request_id,
        truncation=truncation_from_proto(request.truncation),
        top_n=optional_from_proto(request, "top_n"),
    )


def scores_to_proto(scores: Iterable[tuple[int, float]]) -> list[scoring_pb2.Score]:
    """`scores` are pairs of a document's index and its score."""
    return [scoring_pb2.Score(index=index, score=score) for index, score in scores]
