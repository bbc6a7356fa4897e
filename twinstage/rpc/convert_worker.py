"""Conversion between domain types and the messages of `twinstage.worker.v1`.

One pair of functions per type, `x_to_proto` and `x_from_proto`. Router and workers trust each other's values but not
each other's version: enumerations that are unknown here raise ValueError.
"""

from __future__ import annotations

from array import array

from twinstage.rpc.convert_structured import output_constraint_from_proto, output_constraint_to_proto
from twinstage.types import (
    Finish,
    FinishReason,
    KvEndpoint,
    KvGrant,
    ProducedToken,
    PromptLogprobs,
    RequestId,
    SamplingParameters,
    SequenceSpec,
    TokenAlternative,
    TokenChunk,
    TokenLogprobs,
    WorkerId,
)
from twinstage.worker.v1 import worker_pb2

_CAUSE_TO_PROTO = {
    FinishReason.STOP: worker_pb2.STOP_CAUSE_TOKEN,
    FinishReason.LENGTH: worker_pb2.STOP_CAUSE_LENGTH,
    FinishReason.CONTEXT_LIMIT: worker_pb2.STOP_CAUSE_CONTEXT_LIMIT,
}
_CAUSE_FROM_PROTO = {value: key for key, value in _CAUSE_TO_PROTO.items()}


def sequence_spec_to_proto(spec: SequenceSpec) -> worker_pb2.SequenceSpec:
    sampling = spec.sampling
    return worker_pb2.SequenceSpec(
        request_id=spec.request_id,
        prompt_token_ids=spec.prompt_token_ids,
        resumed_token_ids=spec.resumed_token_ids,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        choice_index=sampling.choice_index,
        logit_bias=dict(sampling.logit_bias),
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        stop_token_ids=sorted(spec.stop_token_ids),
        logprobs=spec.logprobs,
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        num_choices=spec.num_choices,
        prompt_logprobs=spec.prompt_logprobs,
        traceparent=spec.traceparent,
        constraint=output_constraint_to_proto(spec.constraint) if spec.constraint is not None else None,
    )


def sequence_spec_from_proto(message: worker_pb2.SequenceSpec) -> SequenceSpec:
    return SequenceSpec(
        request_id=RequestId(message.request_id),
        prompt_token_ids=tuple(message.prompt_token_ids),
        resumed_token_ids=tuple(message.resumed_token_ids),
        sampling=SamplingParameters(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            seed=message.seed,
            choice_index=message.choice_index,
            logit_bias=dict(message.logit_bias),
        ),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        priority=message.priority,
        cache_salt=message.cache_salt,
        num_choices=message.num_choices or 1,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        traceparent=message.traceparent,
        constraint=output_constraint_from_proto(message.constraint) if message.HasField("constraint") else None,
    )


def kv_grant_to_proto(grant: KvGrant) -> worker_pb2.KvGrant:
    return worker_pb2.KvGrant(
        worker_id=grant.worker_id,
        epoch=grant.epoch,
        transfer_id=grant.transfer_id,
        generation=grant.generation,
        token=grant.token,
        block_ids=grant.block_ids,
        layout_fingerprint=grant.layout_fingerprint,
        endpoints=[
            worker_pb2.KvEndpoint(transport=endpoint.transport, address=endpoint.address, host_id=endpoint.host_id)
            for endpoint in grant.endpoints
        ],
        lease_ms=round(grant.lease_s * 1000),
        num_cached_blocks=grant.num_cached_blocks,
    )


def kv_grant_from_proto(message: worker_pb2.KvGrant) -> KvGrant:
    return KvGrant(
        worker_id=WorkerId(message.worker_id),
        epoch=message.epoch,
        transfer_id=message.transfer_id,
        generation=message.generation,
        token=message.token,
        block_ids=tuple(message.block_ids),
        layout_fingerprint=message.layout_fingerprint,
        endpoints=tuple(
            KvEndpoint(transport=endpoint.transport, address=endpoint.address, host_id=endpoint.host_id)
            for endpoint in message.endpoints
        ),
        lease_s=message.lease_ms / 1000,
        num_cached_blocks=message.num_cached_blocks,
    )


def _token_to_proto(token: ProducedToken) -> worker_pb2.Token:
    if token.logprobs is None:
        return worker_pb2.Token(id=token.token_id)
    return worker_pb2.Token(
        id=token.token_id,
        logprob=token.logprobs.logprob,
        rank=token.logprobs.rank,
        top_ids=[alternative.token_id for alternative in token.logprobs.top],
        top_logprobs=[alternative.logprob for alternative in token.logprobs.top],
    )


def _token_from_proto(message: worker_pb2.Token) -> ProducedToken:
    if not message.HasField("logprob"):
        return ProducedToken(token_id=message.id)
    top = tuple(
        TokenAlternative(token_id, logprob)
        for token_id, logprob in zip(message.top_ids, message.top_logprobs, strict=True)
    )
    return ProducedToken(
        token_id=message.id,
        logprobs=TokenLogprobs(logprob=message.logprob, rank=message.rank, top=top),
    )


def token_chunk_to_proto(chunk: TokenChunk) -> worker_pb2.Chunk:
    message = worker_pb2.Chunk(
        request_id=chunk.request_id,
        tokens=[_token_to_proto(token) for token in chunk.tokens],
        choice_index=chunk.choice_index,
    )
    if chunk.finish is not None:
        message.stop_cause = _CAUSE_TO_PROTO[chunk.finish.reason]
        if chunk.finish.matched_token_id is not None:
            message.matched_token_id = chunk.finish.matched_token_id
    return message


def token_chunk_from_proto(message: worker_pb2.Chunk) -> TokenChunk:
    finish = None
    if message.stop_cause != worker_pb2.STOP_CAUSE_UNSPECIFIED:
        if message.stop_cause not in _CAUSE_FROM_PROTO:
            raise ValueError(f"unknown stop cause {message.stop_cause}")
        finish = Finish(
            reason=_CAUSE_FROM_PROTO[message.stop_cause],
            matched_token_id=message.matched_token_id if message.HasField("matched_token_id") else None,
        )
    return TokenChunk(
        request_id=RequestId(message.request_id),
        tokens=tuple(_token_from_proto(token) for token in message.tokens),
        finish=finish,
        choice_index=message.choice_index,
    )


def prompt_logprobs_to_proto(scores: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        start=scores.start,
        token_ids=scores.token_ids,
        logprobs=scores.logprobs,
        ranks=scores.ranks,
        top_ids=scores.top_ids,
        top_logprobs=scores.top_logprobs,
    )


def prompt_logprobs_from_proto(message: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    """Raises ValueError when the numbers of entries do not agree."""
    count = len(message.token_ids)
    if not count == len(message.logprobs) == len(message.ranks):
        raise ValueError("prompt tokens, log probabilities and ranks differ in number")
    if len(message.top_ids) != len(message.top_logprobs) or len(message.top_ids) % max(1, count):
        raise ValueError("prompt tokens do not have equally many alternatives")
    return PromptLogprobs(
        start=message.start,
        token_ids=array("I", message.token_ids),
        logprobs=array("f", message.logprobs),
        ranks=array("I", message.ranks),
        top_ids=array("I", message.top_ids),
        top_logprobs=array("f", message.top_logprobs),
    )
