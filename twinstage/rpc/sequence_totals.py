"""What a decode worker says of a request at its end, on the router's side."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.worker.v1 import worker_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTotals:
    """What a finished request did on the decode worker."""

    queue_s: float
    decode_s: float
    kv_bytes_received: int
    computed_prompt_tokens: int
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0


def sequence_totals_from_proto(totals: worker_pb2.SequenceTotals) -> SequenceTotals:
    return SequenceTotals(
        queue_s=totals.queue_us / 1e6,
        decode_s=totals.decode_us / 1e6,
        kv_bytes_received=totals.kv_bytes_received,
        computed_prompt_tokens=totals.computed_prompt_tokens,
        proposed_draft_tokens=totals.proposed_draft_tokens,
        accepted_draft_tokens=totals.accepted_draft_tokens,
    )
