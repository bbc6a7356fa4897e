"""What a step of the engine means for requests, and what their routers are told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from decode_worker.request import DecodeRequest, RequestBook, totals_of
from decode_worker.sessions import SequenceTotals, Session, SessionMessage, StepMessages
from twinstage.engine.output import SequenceFailure, StepOutput
from twinstage.engine.sequence import SequenceStats
from twinstage.lifecycle import DecodePhase, Failed, Finished, Outcome
from twinstage.types import Finish


class Deliveries:
    """Takes the output of steps. Belongs to the worker's event loop."""

    def __init__(
        self,
        requests: RequestBook,
        *,
        tell: Callable[[Session, SessionMessage], None],
        settle: Callable[[DecodeRequest, Outcome], None],
        end: Callable[[DecodeRequest, Outcome], None],
    ) -> None:
        """`settle` is for requests that the engine holds nothing of any more, `end` for others."""
        self._requests = requests
        self._tell = tell
        self._settle = settle
        self._end = end

    def deliver(self, output: StepOutput) -> None:
        """The tokens go to their sessions; requests move on, and end with their last choice."""
        told = StepMessages()
        stats = {entry.request_id: entry for entry in output.finished}
        for name in output.preempted:
            preempted = self._requests.choice(name)
            if preempted is not None and preempted[0].lifecycle.phase is DecodePhase.DECODING:
                preempted[0].lifecycle.advance(DecodePhase.QUEUED)
        for chunk in output.chunks:
            if (found := self._requests.choice(chunk.request_id)) is None:
                continue  # ended while the step ran
            request, index = found
            if request.lifecycle.phase is DecodePhase.QUEUED:
                request.lifecycle.advance(DecodePhase.DECODING)
            totals = None
            if chunk.finish is not None:
                totals = self._finish(request, index, stats[chunk.request_id], chunk.finish)
            said = replace(chunk, request_id=request.spec.request_id, choice_index=index)
            told.add(request.session, said, totals)
        for session, message in told.messages():
            self._tell(session, message)
        for failure in output.failed:
            self._fail(failure)

    def _finish(
        self, request: DecodeRequest, index: int, stats: SequenceStats, finish: Finish
    ) -> SequenceTotals | None:
        """A choice has ended by itself; the totals of the request if it was the last one."""
        request.finished.append(stats)
        self._requests.end_choice(request, index)
        if request.running:
            return None
        self._settle(request, Finished(finish.reason))
        return totals_of(request)

    def _fail(self, failure: SequenceFailure) -> None:
        """A choice has failed in the engine, and with it its request: the router goes on with the others elsewhere."""
        if (found := self._requests.choice(failure.request_id)) is None:
            return
        request, index = found
        self._requests.end_choice(request, index)
        if request.running:
            self._end(request, Failed(failure.error))
        else:
            self._settle(request, Failed(failure.error))
