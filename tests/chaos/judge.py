"""Whether what a client got is what it must get: the exact answer, or a fitting status and the answer's beginning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from chaos.cases import FINISH_REASONS, Answer
from chaos.faults import Saboteur
from chaos.load import Failure, Observation, Received
from chaos.pooling import PoolingAnswer, not_all_vectors, wrong_vectors
from twinstage.v1 import common_pb2

EARLY_S = 0.05  # by which a deadline may strike before the client's own clock says so
LATE_S = 3.0  # after its deadline or its cancellation, a call has ended, also on a busy machine
DEATHS_OF_A_POISON = 2  # the router cannot tell faults that hit one request twice from a request that kills workers
SILENCE_S = 0.3  # after which the router of a small run takes a worker for lost
_CODES = {code.value[0]: code for code in grpc.StatusCode}
LONG_S = 10.0  # a deadline from here on is only reached by what hangs


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be. `kind` is what the summary counts."""

    kind: str
    what: str
    seed: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}{f' (seed {self.seed})' if self.seed is not None else ''}: {self.what}"


def judge(
    observation: Observation, answer: Answer | PoolingAnswer, saboteur: Saboteur, *, observer_lag_s: float = 0.0
) -> list[Violation]:
    """All that is wrong with a call. By `observer_lag_s` its end may have been noticed too late."""
    found = list(_wrong_content(observation, answer))
    found += [("disorder", what) for what in observation.received.disorder]
    took_s = observation.ended_s - observation.began_s - observer_lag_s
    allowed_s = min(observation.call.deadline_s, observation.call.cancel_after_s or observation.call.deadline_s)
    if took_s > observation.call.deadline_s + LATE_S or (observation.failure and took_s > allowed_s + LATE_S):
        found.append(("hang", f"ended {took_s - allowed_s:.1f} s late"))
    if observation.failure is not None:
        found += _wrong_status(observation, observation.failure, saboteur, observer_lag_s)
    for error in observation.received.item_failures.values():
        # An item has no details, and what is no answer to the call may come before the call's deadline.
        code = _CODES[error.code]
        item = Failure(code=code, message=error.message, reason=error.reason, has_retry_info=True)
        found += _wrong_status(observation, item, saboteur, observer_lag_s)
    return [Violation(kind, f"{what}; {_describe(observation)}", observation.seed) for kind, what in found]


def _wrong_content(observation: Observation, answer: Answer | PoolingAnswer) -> Iterator[tuple[str, str]]:
    received, is_whole = observation.received, observation.failure is None
    if isinstance(answer, PoolingAnswer):
        yield from (("wrong vectors", what) for what in wrong_vectors(received, answer))
        if is_whole:
            yield from (("wrong totals", what) for what in not_all_vectors(received, answer))
        return
    yield from (("wrong tokens", what) for what in _not_a_beginning(received, answer))
    if is_whole:
        yield from (("wrong tokens", what) for what in _not_the_whole(received, answer))
        yield from (("wrong totals", what) for what in _wrong_totals(received, answer))


def _describe(observation: Observation) -> str:
    call, received, placement = observation.call, observation.received, observation.received.placement
    way = "stream" if call.is_streamed else "unary"
    on = f", on {placement.prefill_worker} and {placement.decode_worker or 'none'}" if placement else ""
    retries = f", {placement.retries} retries" if placement else ""
    return (
        f"case {call.case} as {way} at {call.at_s} s (began {observation.began_s:.3f}, took "
        f"{observation.ended_s - observation.began_s:.3f} s, deadline {call.deadline_s} s): "
        f"{observation.outcome} after {len(received.token_ids)} tokens{on}{retries}"
    )


def _not_a_beginning(received: Received, answer: Answer) -> Iterator[str]:
    """Nothing that was ever sent may be anything but the answer's beginning."""
    ids = tuple(received.token_ids)
    if ids != answer.token_ids[: len(ids)]:
        first = next(
            (index for index, pair in enumerate(zip(ids, answer.token_ids, strict=False)) if pair[0] != pair[1]), -1
        )
        yield f"other tokens from index {first} on: {ids[first : first + 4]}, not {answer.token_ids[first : first + 4]}"
    if not answer.text.startswith(received.text):
        yield f"other text: ...{received.text[-20:]!r} ({len(received.text)} characters)"
    if answer.bits and tuple(received.bits) != answer.bits[: len(received.bits)]:
        yield "other log probabilities"
    if tuple(received.prompt_bits) != answer.prompt_bits[: len(received.prompt_bits)]:
        yield "other log probabilities of the prompt"
    if received.prompt_tokens not in (None, answer.num_prompt_tokens):
        yield f"{received.prompt_tokens} prompt tokens, not {answer.num_prompt_tokens}"


def _not_the_whole(received: Received, answer: Answer) -> Iterator[str]:
    if len(received.token_ids) != len(answer.token_ids):
        yield f"{len(received.token_ids)} tokens, not {len(answer.token_ids)}"
    if received.text != answer.text:
        yield f"{len(received.text)} characters, not {len(answer.text)}"
    if len(received.bits) != len(answer.bits):
        yield f"{len(received.bits)} log probabilities, not {len(answer.bits)}"
    if len(received.prompt_bits) != len(answer.prompt_bits):
        yield f"{len(received.prompt_bits)} log probabilities of the prompt, not {len(answer.prompt_bits)}"
    finish = answer.finish
    # Of the two, which are alternatives, the one that is None stays unset.
    stop = common_pb2.MatchedStop()
    if finish.matched_text is not None:
        stop.text = finish.matched_text
    elif finish.matched_token_id is not None:
        stop.token_id = finish.matched_token_id
    if received.finishes != [(FINISH_REASONS[finish.reason], stop)]:
        yield f"ended with {received.finishes}, not {finish}"


def _wrong_totals(received: Received, answer: Answer) -> Iterator[str]:
    usage, placement = received.usage, received.placement
    if received.num_summaries != 1 or usage is None or placement is None:
        yield f"{received.num_summaries} summaries"
        return
    num_tokens = len(answer.token_ids) + answer.num_other_tokens
    if (usage.prompt_tokens, usage.completion_tokens) != (answer.num_prompt_tokens, num_tokens):
        yield (
            f"usage of {usage.prompt_tokens} and {usage.completion_tokens} tokens, not "
            f"{answer.num_prompt_tokens} and {num_tokens}"
        )
    if received.num_other_tokens != answer.num_other_tokens:
        yield f"{received.num_other_tokens} tokens of other choices, not {answer.num_other_tokens}"
    if not placement.prefill_worker:
        yield "no prefill worker is named"


def _wrong_status(
    observation: Observation, failure: Failure, saboteur: Saboteur, observer_lag_s: float
) -> Iterator[tuple[str, str]]:
    """The table of statuses: what may end a call, when, and with which details."""
    call, named = observation.call, f"{failure.code.name} {failure.reason}: {failure.message}"
    took_s = observation.ended_s - observation.began_s
    # A machine that leaves this process no time leaves workers none either, and who is silent counts as lost.
    has_cause = observer_lag_s > SILENCE_S or any(
        done.may_explain(observation.began_s, observation.ended_s) for done in saboteur.done
    )
    router_was_down = saboteur.router_was_down(observation.began_s, observation.ended_s)
    match failure.code:
        case grpc.StatusCode.CANCELLED:
            if call.cancel_after_s is None:
                yield "wrong status", f"nobody cancelled, but {named}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            if took_s < call.deadline_s - EARLY_S:
                yield "wrong status", f"the deadline is not over, but {named}"
            elif call.deadline_s >= LONG_S:
                yield "hang", f"nothing happened until the deadline; {named}"
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            if not failure.has_retry_info:
                yield "wrong status", f"no RetryInfo with {named}"
        case grpc.StatusCode.UNAVAILABLE if not failure.reason:  # gRPC's own word: there is no server
            if not router_was_down:
                yield "wrong status", f"the router was there, but {named}"
        case grpc.StatusCode.UNAVAILABLE:
            if not has_cause:
                yield "wrong status", f"nothing was broken, but {named}"
            if not failure.has_retry_info:
                yield "wrong status", f"no RetryInfo with {named}"
            if observation.received.token_ids and not router_was_down:
                yield "wrong status", f"tokens had been sent, but {named}"
        case grpc.StatusCode.ABORTED:
            if not has_cause:
                yield "wrong status", f"nothing was broken, but {named}"
            if failure.tokens_sent != observation.received.num_tokens:
                yield "wrong status", f"{failure.tokens_sent} tokens sent according to {named}"
        case grpc.StatusCode.INTERNAL if failure.reason == "POISONED_REQUEST":
            causes = [done for done in saboteur.done if done.may_explain(observation.began_s, observation.ended_s)]
            if len(causes) < DEATHS_OF_A_POISON:
                yield "wrong status", f"it cannot have lost so many workers, but {named}"
        case _:
            yield "wrong status", f"not a status for this: {named}"
