"""Score and Rerank: pairs of texts in, numbers out.

A scoring model reads each pair as a whole. An embedding model scores a pair by comparing its two vectors, by the cosine
unless its files name another way; every text is encoded once, whatever the number of its pairs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul, sub

from router.catalog import Work
from router.embedding import Embedding, EmbeddingResult, PoolingCall
from router.encoder import Vector
from router.scoring_admission import admit_pairs, admit_texts
from twinstage.types import RawScoreRequest, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringResult:
    """The answer to one call: a document's index and its score, in the order that the call wants."""

    scores: tuple[tuple[int, float], ...]
    totals: EmbeddingResult


class Scoring:
    """Serves calls that score."""

    def __init__(self, embedding: Embedding) -> None:
        """`embedding` computes the vectors, among its own calls."""
        self._embedding = embedding

    async def score(
        self, raw: RawScoreRequest, *, timeout_s: float | None, caller: str = "", fallback_id: str = ""
    ) -> ScoringResult:
        """One score per document, in order. Raises TwinstageError."""
        model = self._embedding.find_model(raw.model, Work.SCORE)
        reads_pairs = model.description.task is Task.SCORE
        call = PoolingCall(
            raw=raw,
            model=model,
            num_inputs=len(raw.documents) if reads_pairs else len(raw.queries) + len(raw.documents),
            admit=partial(admit_pairs if reads_pairs else admit_texts, raw, model),
            fallback_id=fallback_id,
            caller=caller,
        )
        result = await self._embedding.run(call, timeout_s=timeout_s)
        num_documents = len(raw.documents)
        if not num_documents:
            return ScoringResult(scores=(), totals=result)
        if reads_pairs:
            scores = (array("f", vector.data)[0] for vector in result.vectors)
            return ScoringResult(scores=tuple(enumerate(scores)), totals=result)
        queries, documents = result.vectors[:-num_documents], result.vectors[-num_documents:]
        similarity = _SIMILARITIES[model.tokenizer.bundle.similarity]
        compared = await self._embedding.in_thread(partial(_compared, similarity, queries, documents))
        return ScoringResult(scores=tuple(enumerate(compared)), totals=result)

    async def rerank(
        self, raw: RawScoreRequest, *, timeout_s: float | None, caller: str = "", fallback_id: str = ""
    ) -> ScoringResult:
        """The `top_n` best documents, best first; equal ones in the order in which they came. Raises TwinstageError."""
        result = await self.score(raw, timeout_s=timeout_s, caller=caller, fallback_id=fallback_id)
        best = sorted(result.scores, key=lambda entry: -entry[1])
        return ScoringResult(scores=tuple(best[: raw.top_n]), totals=result.totals)


def _compared(
    similarity: Callable[[array[float], array[float]], float], queries: Sequence[Vector], documents: Sequence[Vector]
) -> list[float]:
    """One query with every document, or each with its own."""
    sides = [array("f", query.data) for query in queries]
    first = sides * len(documents) if len(sides) == 1 else sides
    others = (array("f", document.data) for document in documents)
    return [similarity(query, document) for query, document in zip(first, others, strict=True)]


def _dot(left: array[float], right: array[float]) -> float:
    return float(sum(map(mul, left, right)))


_SIMILARITIES: Mapping[str, Callable[[array[float], array[float]], float]] = {
    "cosine": lambda left, right: min(1.0, max(-1.0, _dot(left, right))),  # the vectors have length 1
    "dot": _dot,
    "euclidean": lambda left, right: -math.dist(left, right),
    "manhattan": lambda left, right: -sum(map(abs, map(sub, left, right))),
}
