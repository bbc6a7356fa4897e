"""`twinstage trace`: where the time of a request went, part by part, in all processes."""

from __future__ import annotations

from twinstage.cli.json_output import print_json
from twinstage.client import Trace, TwinstageClient


def show(client: TwinstageClient, request_id: str, *, as_json: bool) -> None:
    """Print the trace of a request."""
    with client:
        trace = client.trace(request_id)
    if as_json:
        print_json(trace)
    else:
        print("\n".join(lines(trace)))


def lines(trace: Trace) -> list[str]:
    """A line about the request, then one for each part: when it began, how long it took, where, and what it was."""
    took = "in progress" if trace.duration_s is None else f"{trace.duration_s * 1e3:.1f} ms"
    ended = f", failed: {trace.error_reason}" if trace.error_reason else ""
    width = max((len(span.process) for span in trace.spans), default=0)
    told = [f"{trace.request_id}  {trace.model}  {took}{ended}  trace {trace.trace_id}"]
    for span in sorted(trace.spans, key=lambda span: span.start_s):
        attempt = f" (attempt {span.attempt})" if span.attempt > 1 else ""
        error = f": {span.error}" if span.error else ""
        told.append(
            f"{span.start_s * 1e3:10.1f} ms {span.duration_s * 1e3:10.1f} ms  {span.process:{width}}  "
            f"{span.name}{attempt}{error}"
        )
    return told
