"""ScoringService: Score and Rerank."""

from __future__ import annotations

from typing import Any

from router.scoring import Scoring, ScoringResult
from router.service.context import caller_of, seconds_left
from router.service.door import check_rerank, check_score
from twinstage.rpc.call_context import current_request_id
from twinstage.rpc.convert_public import placement_to_proto, timing_to_proto, usage_to_proto
from twinstage.rpc.convert_scoring import rerank_request_from_proto, score_request_from_proto, scores_to_proto
from twinstage.v1 import scoring_pb2, scoring_pb2_grpc


class ScoringServicer(scoring_pb2_grpc.ScoringServiceServicer):
    """Score and Rerank."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring

    async def Score(  # noqa: N802 - the names of methods are the proto's
        self, request: scoring_pb2.ScoreRequest, context: Any
    ) -> scoring_pb2.ScoreResponse:
        check_score(request)
        raw = score_request_from_proto(request)
        result = await self._scoring.score(raw, **_call(context))
        return scoring_pb2.ScoreResponse(scores=scores_to_proto(result.scores), **_totals(result))

    async def Rerank(  # noqa: N802
        self, request: scoring_pb2.RerankRequest, context: Any
    ) -> scoring_pb2.RerankResponse:
        check_rerank(request)
        raw = rerank_request_from_proto(request)
        result = await self._scoring.rerank(raw, **_call(context))
        return scoring_pb2.RerankResponse(results=scores_to_proto(result.scores), **_totals(result))


def _call(context: Any) -> dict[str, Any]:
    return {"timeout_s": seconds_left(context), "caller": caller_of(context), "fallback_id": current_request_id()}


def _totals(result: ScoringResult) -> dict[str, Any]:
    """What every answer says beside its scores."""
    totals = result.totals
    return {
        "request_id": totals.request_id,
        "model": totals.model,
        "usage": usage_to_proto(totals.usage),
        "timing": timing_to_proto(totals.timing),
        "placement": placement_to_proto(totals.placement),
    }
