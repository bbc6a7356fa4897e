"""The tally of one request: what it consumed, where its time went, and which workers served it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from twinstage.rpc.clients import FirstTokenEvent, HandedOverEvent, SequenceTotals
from twinstage.types import AdmittedRequest, Placement, Timing, Usage


@dataclass(slots=True)
class Tally:
    """Collected while the request runs. Times of attempts that failed count too: they were spent on the request."""

    request: AdmittedRequest
    queue_s: float
    prefill_s: float = 0.0
    kv_transfer_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float | None = None
    decoding_since_s: float | None = None
    cached_prompt_tokens: int = 0
    placement: Placement = field(default_factory=Placement)

    def placed(self, *, prefill_worker: str, decode_worker: str, retries: int) -> None:
        """A new attempt begins; it is the one that the placement tells of."""
        self._stop_decoding()
        self.placement = Placement(prefill_worker=prefill_worker, decode_worker=decode_worker, retries=retries)

    def reserved(self, queue_s: float) -> None:
        self.queue_s += queue_s

    def prefilled(self, event: FirstTokenEvent) -> None:
        self.queue_s += event.queue_s
        self.prefill_s += event.prefill_s
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
            # Of the prompt as the client sent it. A replay finds there what this very request left behind.
            self.cached_prompt_tokens = event.cached_prompt_tokens

    def ended_on_prefill(self) -> None:
        """No decode worker took part in this attempt, although one may have been asked to stand by."""
        self.placement = replace(self.placement, decode_worker="")

    def handed_over(self, event: HandedOverEvent) -> None:
        self.kv_transfer_s += event.transfer_s
        self.placement = replace(self.placement, transport=event.transport, kv_bytes=event.kv_bytes)
        self.decoding_since_s = time.monotonic()

    def decoded(self, totals: SequenceTotals) -> None:
        """The decode worker's own account; it replaces what was measured from here."""
        self.decoding_since_s = None
        self.queue_s += totals.queue_s
        self.decode_s += totals.decode_s
        self.placement = replace(
            self.placement,
            kv_bytes=totals.kv_bytes_received,
            decode_computed_prompt_tokens=totals.computed_prompt_tokens,
        )

    def _stop_decoding(self) -> None:
        """A decode that was cut short (stop string, time limit, loss) sends no account; count what was seen of it."""
        if self.decoding_since_s is not None:
            self.decode_s += time.monotonic() - self.decoding_since_s
            self.decoding_since_s = None

    def usage(self, completion_tokens: int) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.spec.prompt_token_ids),
            completion_tokens=completion_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
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
