"""What a run found: a summary for people, and all of it as JSON."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from chaos.faults import Done
from chaos.load import Observation
from chaos.run import Result
from chaos.schedule import CLIENTS, ROUTER, to_json

_TAIL_LINES = 12
_FELT_WITHIN_S = 1.0


def document(result: Result) -> dict[str, Any]:
    """The whole report, as JSON takes it."""
    violations = Counter(violation.kind for violation in result.violations)
    return {
        "seeds": [schedule.seed for schedule in result.schedules],
        "seconds": round(result.seconds, 1),
        "faults": dict(Counter(done.fault.kind.value for done in result.saboteur.done)),
        "faults_total": len(result.saboteur.done),
        "faults_skipped": len(result.saboteur.skipped),
        "requests": dict(Counter(observation.outcome for observation in result.observations)),
        "longest_lag_s": round(result.longest_lag_s, 3),
        "failures": dict(_failures(result.observations)),
        "requests_total": len(result.observations),
        "tokens_retried_requests": sum(
            bool(observation.received.placement and observation.received.placement.retries)
            for observation in result.observations
        ),
        "resets": result.resets,
        "wrong_tokens": violations["wrong tokens"] + violations["wrong totals"] + violations["wrong vectors"],
        "leaked_blocks": violations["leaked blocks"],
        "hangs": violations["hang"],
        "violations": [asdict(violation) for violation in result.violations],
        "blocks_free_after_s": _spread(result.idle_after_s),
        "failure_messages": _messages(result.observations),
        "longest_waits": _longest_gaps(result),
        "recovery_s": dict(_recoveries(result)),
        "processes": {name: asdict(footprint) for name, footprint in result.footprints.items()},
    }


def summary(report: dict[str, Any]) -> str:
    """The report in some lines of text."""
    lines = [
        f"{report['faults_total']} faults in {report['seconds']:.0f} s ({report['faults_skipped']} skipped, whose "
        f"target was down or failing already): {_counts(report['faults'])}",
        f"{report['requests_total']} requests, {report['tokens_retried_requests']} of them retried: "
        f"{_counts(report['requests'])}; prefix caches emptied: {_counts(report['resets'])}",
        f"failed with: {_counts(report['failures'])}",
        f"blocks free again after {_shown(report['blocks_free_after_s'])}; this process was up to "
        f"{report['longest_lag_s']:.2f} s late",
        "longest wait for a token that a fault caused to a stream it touched, and time to the end of the next new "
        "request that succeeds:",
    ]
    for kind, times in report["recovery_s"].items():
        lines.append(f"  {kind:13} {_shown(times['next_token']):45} {_shown(times['next_success'])}")
    lines.append(
        f"wrong tokens or vectors {report['wrong_tokens']}, leaked blocks {report['leaked_blocks']}, "
        f"hangs {report['hangs']}, violations {len(report['violations'])}"
    )
    return "\n".join(lines)


def explanation(result: Result, directory: Path) -> str:
    """What is needed to look for the cause: the violations, the schedules of their seeds, and the ends of all logs."""
    lines = ["violations:", *(f"- {violation}" for violation in result.violations)]
    seeds = {violation.seed for violation in result.violations}
    lines += [f"schedule: {to_json([schedule])}" for schedule in result.schedules if schedule.seed in seeds]
    for path in sorted(directory.glob("*.log")):
        lines += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]]
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1])) or "none"


def _spread(values: Sequence[float]) -> dict[str, float | int]:
    """Count, median and maximum, in seconds."""
    if not values:
        return {"count": 0}
    return {"count": len(values), "p50": round(statistics.median(values), 3), "max": round(max(values), 3)}


def _shown(spread: dict[str, float | int]) -> str:
    if not spread["count"]:
        return "(none)"
    return f"p50 {spread['p50']:.2f} s, max {spread['max']:.2f} s of {spread['count']}"


def _recoveries(result: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    """By kind of fault: what streams in progress and new requests felt of it. Faults may overlap."""
    by_end = sorted((item for item in result.observations if item.failure is None), key=lambda item: item.ended_s)
    ends = [item.ended_s for item in by_end]
    kinds = sorted({done.fault.kind for done in result.saboteur.done}, key=lambda kind: kind.value)
    for kind in kinds:
        done = [item for item in result.saboteur.done if item.fault.kind is kind]
        waits = [wait for item in done if (wait := _longest_wait(item, result.observations)) is not None]
        successes = []
        for item in done:
            later = by_end[bisect_right(ends, item.began_s) :]
            success = next((call for call in later if call.began_s >= item.began_s), None)
            if success is not None:
                successes.append(success.ended_s - item.began_s)
        yield kind.value, {"next_token": _spread(waits), "next_success": _spread(successes)}


def _longest_wait(done: Done, observations: Sequence[Observation]) -> float | None:
    """How long the fault held up the stream that it held up most, of those it touched; None if it touched none."""
    waits = [
        wait_s(done.began_s, observation.received.event_times)
        for observation in observations
        if observation.began_s < done.began_s < observation.ended_s and _touched(done, observation)
    ]
    return max((wait for wait in waits if wait is not None), default=None)


def wait_s(fault_s: float, times: Sequence[float]) -> float | None:
    """The longest wait for a token that began at the fault or soon after: what was on its way still arrives."""
    start = bisect_right(times, fault_s)
    soon = bisect_right(times, fault_s + _FELT_WITHIN_S)
    moments = [fault_s, *times[start : soon + 1]]
    return max((later - earlier for earlier, later in pairwise(moments)), default=None)


def _touched(done: Done, observation: Observation) -> bool:
    """Whether a stream was where the fault struck: on that worker, or on one that it is not on any more."""
    worker, placement = done.fault.target.split(":")[-1], observation.received.placement
    if worker in (ROUTER, CLIENTS) or placement is None or placement.retries:
        return True
    had_tokens = bisect_right(observation.received.event_times, done.began_s) > 0
    return placement.decode_worker == worker or (placement.prefill_worker == worker and not had_tokens)


def _failures(observations: Sequence[Observation]) -> Counter[str]:
    """Statuses that faults gave to calls, with the service's reasons; "none" is gRPC's own, from where no router is."""
    failures = [observation.failure for observation in observations if observation.failure is not None]
    return Counter(
        f"{failure.code.name} {failure.reason or 'none'}"
        for failure in failures
        if failure.code not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
    )


def _messages(observations: Sequence[Observation]) -> dict[str, int]:
    """What failed calls were told, without the numbers in it, and how often."""
    failures = [observation.failure for observation in observations if observation.failure is not None]
    return dict(Counter(re.sub(r"[0-9]+", "N", f"{failure.code.name} {failure.message}") for failure in failures))


def _longest_gaps(result: Result, *, count: int = 20) -> list[dict[str, Any]]:
    """The longest times that a stream waited for its next token, when it did, and who served it in the end."""
    gaps: list[dict[str, Any]] = []
    for item in result.observations:
        times, placement = item.received.event_times, item.received.placement
        if len(times) < 2:
            continue
        gap_s, since_s = max((later - earlier, earlier) for earlier, later in pairwise(times))
        gaps.append(
            {
                "wait_s": round(gap_s, 3),
                "since_s": round(since_s - result.began_s, 3),
                "case": item.call.case,
                "outcome": item.outcome,
                "retries": placement.retries if placement else None,
                "prefill": placement.prefill_worker if placement else "",
                "decode": placement.decode_worker if placement else "",
            }
        )
    return sorted(gaps, key=lambda gap: -gap["wait_s"])[:count]
