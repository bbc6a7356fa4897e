"""Several choices of one prompt: computed together up to their first tokens, then each a sequence of its own."""

from __future__ import annotations

from dataclasses import replace

from twinstage.engine.sequence import Sequence
from twinstage.types import Finish, ProducedToken, RequestId, SequenceSpec, TokenChunk


def choice_id(request_id: RequestId, index: int) -> RequestId:
    """The name of a choice in an engine: that of the request for the first one."""
    return RequestId(f"{request_id}/{index}") if index else request_id


def choice_spec(spec: SequenceSpec, index: int) -> SequenceSpec:
    """What one of the choices that `spec` asks for is, counted from 0."""
    sampling = replace(spec.sampling, choice_index=spec.sampling.choice_index + index)
    return replace(spec, request_id=choice_id(spec.request_id, index), num_choices=1, sampling=sampling)


def choices_of(sequence: Sequence) -> list[Sequence]:
    """A sequence for each choice, as far as `sequence` is; their table is that of all until it is forked."""
    return [
        replace(
            sequence,
            spec=choice_spec(sequence.spec, index),
            output_token_ids=list(sequence.output_token_ids),
            hashes=sequence.hashes.copy() if sequence.hashes is not None else None,
            matcher=sequence.matcher.copy() if sequence.matcher is not None else None,
            num_spare_blocks=0,
        )
        for index in range(sequence.spec.num_choices)
    ]


def begin_choices(
    sequence: Sequence, tokens: list[ProducedToken], *, max_model_len: int
) -> list[tuple[Sequence, Finish | None]]:
    """Each choice after its first token, and how it ended, if it did."""
    begun: list[tuple[Sequence, Finish | None]] = []
    for choice, token in zip(choices_of(sequence), tokens, strict=True):
        choice.output_token_ids.append(token.token_id)
        choice.follow(token.token_id)
        begun.append((choice, choice.finish_after(token.token_id, max_model_len=max_model_len)))
    return begun


def chunks_of_each(begun: list[tuple[Sequence, Finish | None]], tokens: list[ProducedToken]) -> list[TokenChunk]:
    """What is told of the first tokens where each choice is a sequence of its own."""
    return [
        TokenChunk(request_id=choice.request_id, tokens=(token,), finish=finish)
        for (choice, finish), token in zip(begun, tokens, strict=True)
    ]


def chunks_of_one(
    sequence: Sequence, begun: list[tuple[Sequence, Finish | None]], tokens: list[ProducedToken]
) -> list[TokenChunk]:
    """What is told of them where `sequence` stands for all."""
    return [
        TokenChunk(request_id=sequence.request_id, tokens=(token,), finish=finish, choice_index=index)
        for index, ((_, finish), token) in enumerate(zip(begun, tokens, strict=True))
    ]
