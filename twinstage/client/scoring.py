"""The messages of Score and Rerank, from the client's side."""

from __future__ import annotations

from collections.abc import Sequence

from twinstage.client.inputs import texts_of
from twinstage.client.requests import refusing, truncation_to_proto
from twinstage.client.responses import summary
from twinstage.client.results import RankedDocument, Ranking, Scores
from twinstage.types import Truncation
from twinstage.v1 import scoring_pb2


@refusing()
def score_request(
    queries: str | Sequence[str], documents: Sequence[str], *, model: str, truncation: Truncation | None
) -> scoring_pb2.ScoreRequest:
    return scoring_pb2.ScoreRequest(
        queries=texts_of(queries),
        documents=texts_of(documents),
        model=model,
        truncation=truncation_to_proto(truncation or Truncation()),
    )


@refusing()
def rerank_request(
    query: str, documents: Sequence[str], *, top_n: int | None, model: str, truncation: Truncation | None
) -> scoring_pb2.RerankRequest:
    return scoring_pb2.RerankRequest(
        query=query,
        documents=texts_of(documents),
        top_n=top_n,
        model=model,
        truncation=truncation_to_proto(truncation or Truncation()),
    )


def scores(message: scoring_pb2.ScoreResponse) -> Scores:
    return Scores(
        request_id=message.request_id,
        model=message.model,
        scores=tuple(entry.score for entry in message.scores),
        summary=summary(message),
    )


def ranking(message: scoring_pb2.RerankResponse) -> Ranking:
    return Ranking(
        request_id=message.request_id,
        model=message.model,
        documents=tuple(RankedDocument(index=entry.index, score=entry.score) for entry in message.results),
        summary=summary(message),
    )
