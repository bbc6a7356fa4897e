"""The books of a run: what is counted while it goes on, in memory that does not grow with its length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from twinstage.bench.histogram import DurationHistogram
from twinstage.bench.options import Slo
from twinstage.bench.results import Distribution, ErrorCount, Outcome, RequestRecord
from twinstage.bench.target import Answer, RequestFailed
from twinstage.bench.timeline import Timeline

Clock = Callable[[], float]
OnRequest = Callable[[RequestRecord], None]

_MAX_ERROR_KINDS = 50  # beyond these, failures are counted together


@dataclass(slots=True)
class Totals:
    """Sums over all requests."""

    sent: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    capped: int = 0
    wrong_length: int = 0
    retried: int = 0
    good: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_prompt_tokens: int = 0
    messages: int = 0
    kv_bytes: int = 0


class Track:
    """One request in progress. The driver calls `tokens` for each message as it arrives."""

    __slots__ = ("_books", "_last_s", "first_s", "output_tokens", "prompt_tokens", "scheduled_s", "sent_s")

    def __init__(self, books: Books, *, scheduled_s: float, sent_s: float, prompt_tokens: int) -> None:
        self._books = books
        self._last_s = 0.0
        self.scheduled_s = scheduled_s
        self.sent_s = sent_s
        self.prompt_tokens = prompt_tokens  # what was meant to be sent
        self.first_s: float | None = None
        self.output_tokens = 0

    def tokens(self, count: int) -> None:
        """`count` tokens arrived in one message."""
        if count <= 0:
            return
        now_s = self._books.clock()
        books_slice = self._books.timeline.at(now_s)
        if self.first_s is None:
            self.first_s = now_s
            self._books.ttft.add(now_s - self.scheduled_s)
        else:
            gap_s = now_s - self._last_s
            self._books.itl.add(gap_s)
            books_slice.gaps.add(gap_s)
        self._last_s = now_s
        self.output_tokens += count
        books_slice.output_tokens += count
        self._books.totals.output_tokens += count
        self._books.totals.messages += 1

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None before it."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def mean_gap_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self._last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class Books:
    """Everything that is counted. `clock` gives monotonic seconds; `on_request` gets each request as it ends."""

    clock: Clock
    slo: Slo
    start_s: float
    on_request: OnRequest | None = None
    timeline: Timeline = field(init=False)
    totals: Totals = field(default_factory=Totals)
    in_flight: int = 0
    end_s: float = field(init=False)  # when the last answer ended
    ttft: DurationHistogram = field(default_factory=DurationHistogram)
    itl: DurationHistogram = field(default_factory=DurationHistogram)
    tpot: DurationHistogram = field(default_factory=DurationHistogram)
    e2e: DurationHistogram = field(default_factory=DurationHistogram)
    sending_end_s: float | None = None  # when the last request was sent
    sending_end_tokens: int = 0  # output tokens until then
    start_delay: DurationHistogram = field(default_factory=DurationHistogram)
    _server: dict[str, DurationHistogram] = field(default_factory=dict)
    _errors: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.start_s)
        self.end_s = self.start_s

    def begin(self, *, scheduled_s: float, prompt_tokens: int, was_capped: bool = False) -> Track:
        """A request is being sent now that was scheduled for `scheduled_s`."""
        now_s = self.clock()
        self.totals.sent += 1
        self.totals.capped += was_capped
        self.in_flight += 1
        self.start_delay.add(max(0.0, now_s - scheduled_s))
        self.timeline.set_in_flight(self.in_flight, now_s)
        return Track(self, scheduled_s=scheduled_s, sent_s=now_s, prompt_tokens=prompt_tokens)

    def succeed(self, track: Track, answer: Answer) -> None:
        """The answer is complete."""
        now_s = self._end()
        e2e_s = now_s - track.scheduled_s
        self.totals.succeeded += 1
        self.timeline.at(now_s).finished += 1
        self._correct_output(track, answer)
        self.e2e.add(e2e_s)
        mean_gap_s = track.mean_gap_s
        if mean_gap_s is not None:
            self.tpot.add(mean_gap_s)
        if self._is_good(track, mean_gap_s, e2e_s):
            self.totals.good += 1
        self._take(answer, track)
        self._record(track, Outcome.SUCCEEDED, now_s=now_s, answer=answer)

    def fail(self, track: Track, error: RequestFailed) -> None:
        """The request failed."""
        now_s = self._end()
        self.totals.failed += 1
        self.timeline.at(now_s).failed += 1
        key = (error.code, error.reason)
        if key not in self._errors and len(self._errors) >= _MAX_ERROR_KINDS:
            key = ("OTHER", "")
        count, example = self._errors.get(key, (0, str(error)))
        self._errors[key] = (count + 1, example)
        self._record(track, Outcome.FAILED, now_s=now_s, error=" ".join(filter(None, (error.code, error.reason))))

    def cancel(self, track: Track) -> None:
        """The run ended before the request did."""
        now_s = self._end()
        self.totals.cancelled += 1
        self._record(track, Outcome.CANCELLED, now_s=now_s)

    def end_sending(self) -> None:
        """Nothing more will be sent; what is in progress goes on."""
        self.sending_end_s, self.sending_end_tokens = self.clock(), self.totals.output_tokens

    @property
    def server(self) -> dict[str, Distribution]:
        """The phases that the server reported."""
        found = {name: histogram.distribution() for name, histogram in self._server.items()}
        return {name: distribution for name, distribution in found.items() if distribution is not None}

    @property
    def errors(self) -> tuple[ErrorCount, ...]:
        """Failures by kind, the most frequent first."""
        counts = [
            ErrorCount(code=code, reason=reason, count=count, example=example)
            for (code, reason), (count, example) in self._errors.items()
        ]
        return tuple(sorted(counts, key=lambda entry: -entry.count))

    def _end(self) -> float:
        now_s = self.clock()
        self.in_flight -= 1
        self.timeline.set_in_flight(self.in_flight, now_s)
        self.end_s = now_s
        return now_s

    def _correct_output(self, track: Track, answer: Answer) -> None:
        """A server that does not say how many tokens a message holds, or sends none for some, says so at the end."""
        if answer.output_tokens is not None:
            self.totals.output_tokens += answer.output_tokens - track.output_tokens
            track.output_tokens = answer.output_tokens

    def _is_good(self, track: Track, mean_gap_s: float | None, e2e_s: float) -> bool:
        ttft_s = math.inf if track.ttft_s is None else track.ttft_s
        measured = ((self.slo.ttft_s, ttft_s), (self.slo.itl_s, mean_gap_s), (self.slo.e2e_s, e2e_s))
        return all(limit is None or value is None or value <= limit for limit, value in measured)

    def _take(self, answer: Answer, track: Track) -> None:
        totals = self.totals
        totals.prompt_tokens += track.prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens
        totals.cached_prompt_tokens += answer.cached_prompt_tokens
        totals.kv_bytes += answer.kv_bytes
        totals.retried += answer.retries > 0
        totals.wrong_length += answer.prompt_tokens not in (None, track.prompt_tokens)
        for name, seconds in answer.phases_s.items():
            self._server.setdefault(name, DurationHistogram()).add(seconds)

    def _record(
        self, track: Track, outcome: Outcome, *, now_s: float, answer: Answer | None = None, error: str = ""
    ) -> None:
        if self.on_request is None:
            return
        counted = None if answer is None else answer.prompt_tokens
        record = RequestRecord(
            offset_s=track.scheduled_s - self.start_s,
            sent_s=track.sent_s - track.scheduled_s,
            ttft_s=track.ttft_s,
            mean_gap_s=track.mean_gap_s,
            e2e_s=now_s - track.scheduled_s,
            prompt_tokens=track.prompt_tokens if counted is None else counted,
            output_tokens=track.output_tokens,
            cached_prompt_tokens=0 if answer is None else answer.cached_prompt_tokens,
            outcome=outcome,
            error=error,
        )
        self.on_request(record)
