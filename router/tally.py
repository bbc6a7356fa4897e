"""The tally of one request: what it consumed, where its time went, and which workers served it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from router.trace import ROUTER, RequestTrace
from twinstage.errors import TwinstageError
from twinstage.rpc.clients import FirstTokenEvent, HandedOverEvent, SequenceTotals
from twinstage.types import AdmittedRequest, Placement, Timing, Usage


@dataclass(slots=True)
class Tally:
    """Collected while the request runs. Times of attempts that failed count too: they were spent on the request."""

    request: AdmittedRequest
    queue_s: float
    trace: RequestTrace
    prefill_s: float = 0.0
    kv_transfer_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float | None = None
    decoding_since_s: float | None = None
    cached_prompt_tokens: int = 0
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    placement: Placement = field(default_factory=Placement)
    placed_s: float = 0.0

    def placed(self, *, prefill_worker: str, decode_worker: str, retries: int) -> None:
        """A new attempt begins; it is the one that the placement tells of."""
        self._stop_decoding()
        self.placed_s = time.monotonic()
        self.placement = Placement(prefill_worker=prefill_worker, decode_worker=decode_worker, retries=retries)

    def failed(self, error: TwinstageError) -> None:
        """The attempt failed, and the request goes on elsewhere or not at all."""
        self._stop_decoding()
        self.trace.ended_now(
            "attempt", time.monotonic() - self.placed_s, attempt=self._attempt, error=f"{error.reason}: {error}"
        )

    @property
    def _attempt(self) -> int:
        return self.placement.retries + 1

    def _span(self, name: str, duration_s: float, *, process: str, ago_s: float = 0.0) -> None:
        self.trace.ended_now(name, duration_s, process=process, attempt=self._attempt, ago_s=ago_s)

    def reserved(self, queue_s: float) -> None:
        self.queue_s += queue_s
        self._span("reserve", queue_s, process=self.placement.decode_worker)

    def prefilled(self, event: FirstTokenEvent) -> None:
        self.queue_s += event.queue_s
        self.prefill_s += event.prefill_s
        worker = self.placement.prefill_worker
        self._span("prefill_queue", event.queue_s, process=worker, ago_s=event.prefill_s)
        self._span("prefill", event.prefill_s, process=worker)
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
            self._span("first_token", 0.0, process=ROUTER)
            # Of the prompt as the client sent it. A replay finds there what this very request left behind.
            self.cached_prompt_tokens = event.cached_prompt_tokens

    def ended_on_prefill(self) -> None:
        """No decode worker took part in this attempt, although one may have been asked to stand by."""
        self.placement = replace(self.placement, decode_worker="")

    def handed_over(self, event: HandedOverEvent) -> None:
        self.kv_transfer_s += event.transfer_s
        self._span("kv_transfer", event.transfer_s, process=self.placement.prefill_worker)
        self.placement = replace(self.placement, transport=event.transport, kv_bytes=event.kv_bytes)
        self.decoding_since_s = time.monotonic()

    def decoded(self, totals: SequenceTotals) -> None:
        """The decode worker's own account; it replaces what was measured from here."""
        self.decoding_since_s = None
        self.queue_s += totals.queue_s
        self.decode_s += totals.decode_s
        self.proposed_draft_tokens += totals.proposed_draft_tokens
        self.accepted_draft_tokens += totals.accepted_draft_tokens
        worker = self.placement.decode_worker
        self._span("decode_queue", totals.queue_s, process=worker, ago_s=totals.decode_s)
        self._span("decode", totals.decode_s, process=worker)
        self.placement = replace(
            self.placement,
            kv_bytes=totals.kv_bytes_received,
            decode_computed_prompt_tokens=totals.computed_prompt_tokens,
        )

    def _stop_decoding(self) -> None:
        """A decode that was cut short (stop string, time limit, loss) sends no account; count what was seen of it."""
        if self.decoding_since_s is not None:
            seen_s = time.monotonic() - self.decoding_since_s
            self.decode_s += seen_s
            self.decoding_since_s = None
            self._span("decode", seen_s, process=self.placement.decode_worker)

    def continued(self) -> Tally:
        """That of a part of the request that goes on by itself: what was spent on all was spent on it."""
        return replace(self)

    def usage(self, completion_tokens: int) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.spec.prompt_token_ids),
            completion_tokens=completion_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            proposed_draft_tokens=self.proposed_draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
        )

    def timing(self) -> Timing:
        """Where the time went until now."""
        self._stop_decoding()
        arrived_s = self.request.arrived_s
        return Timing(
            queue_s=self.queue_s,
            tokenize_s=self.request.tokenize_s,
            prefill_s=self.prefill_s,
            kv_transfer_s=self.kv_transfer_s,
            time_to_first_token_s=self.first_token_s - arrived_s if self.first_token_s is not None else 0.0,
            decode_s=self.decode_s,
            total_s=time.monotonic() - arrived_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a request consumed, where its time went, and which workers served it."""

    usage: Usage
    timing: Timing
    placement: Placement


def report_of(tallies: Sequence[Tally], completion_tokens: int) -> Report:
    """Of one prompt, whose choices may have gone on apart: then the longest times and the most retries count."""
    last = tallies[-1]
    return Report(
        usage=last.usage(completion_tokens),
        timing=_longest([tally.timing() for tally in tallies]),
        placement=replace(last.placement, retries=max(tally.placement.retries for tally in tallies)),
    )


def report_of_batch(reports: Sequence[Report]) -> Report:
    """Of several prompts: tokens and bytes of all, the longest times but the shortest until the first token.

    The workers are those of the first prompt.
    """
    if len(reports) == 1:
        return reports[0]
    first_token_s = min(report.timing.time_to_first_token_s for report in reports)
    placements = [report.placement for report in reports]
    computed = sum(placement.decode_computed_prompt_tokens for placement in placements)
    return Report(
        usage=Usage(**{name: sum(getattr(report.usage, name) for report in reports) for name in _names(Usage)}),
        timing=replace(_longest([report.timing for report in reports]), time_to_first_token_s=first_token_s),
        placement=replace(
            placements[0],
            kv_bytes=sum(placement.kv_bytes for placement in placements),
            decode_computed_prompt_tokens=computed,
            retries=max(placement.retries for placement in placements),
        ),
    )


def _longest(timings: Sequence[Timing]) -> Timing:
    return Timing(**{name: max(getattr(timing, name) for timing in timings) for name in _names(Timing)})


def _names(kind: type[Usage] | type[Timing]) -> list[str]:
    return [field.name for field in fields(kind)]
