"""A real worker of either role that goes wrong when it computes a marked prompt: `python -m faulty_worker ROLE flags`.

A prompt is marked by its first two tokens, MARK and what is to happen. Only workers named in TWINSTAGE_TEST_FAULTY, in
their environment, go wrong; slow prompts are slow on all of them.
"""

from __future__ import annotations

import enum
import importlib
import os
import signal
import sys
import time

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.engine.step_model import Runner, StepModel

MARK = 211
SLOW_CHUNK_S, SLOW_TOKEN_S = 0.05, 0.004
LAST_WORD_S = 0.2  # from when a worker computes its last step until it dies
FAULTY = "TWINSTAGE_TEST_FAULTY"  # the roles and worker ids that do, separated by commas


class Wrong(enum.IntEnum):
    """What goes wrong; also the second token of the prompt."""

    FIRST_CHUNK = 220  # the forward pass of the first chunk raises
    LAST_CHUNK = 221  # that of the chunk that gives the first token
    DEATH_ON_PREFILL = 222  # kill -9 while the prompt is computed
    DEATH_ON_DECODE = 223  # kill -9 while a later token is computed
    SLOW_PREFILL = 224  # each chunk takes SLOW_CHUNK_S longer, so that there is time to disturb it on any machine
    SLOW_DECODE = 225  # each step takes SLOW_TOKEN_S longer


_SLOW = {Wrong.SLOW_PREFILL: SLOW_CHUNK_S, Wrong.SLOW_DECODE: SLOW_TOKEN_S}


def _goes_wrong(chunk: ScheduledChunk, role: str) -> Wrong | None:
    marks = chunk.sequence.spec.prompt_token_ids[:2]
    if len(marks) < 2 or marks[0] != MARK or marks[1] not in set(Wrong):
        return None
    wrong = Wrong(marks[1])
    happens = {
        Wrong.FIRST_CHUNK: role == "prefill" and chunk.start == 0,
        Wrong.LAST_CHUNK: role == "prefill" and chunk.samples,
        Wrong.DEATH_ON_PREFILL: role == "prefill",
        Wrong.DEATH_ON_DECODE: role == "decode" and len(chunk.sequence.output_token_ids) >= 8,
        Wrong.SLOW_PREFILL: role == "prefill",
        Wrong.SLOW_DECODE: role == "decode",
    }
    return wrong if happens[wrong] else None


class _FaultyRunner:
    """A forward pass that may take its time, and where it `may_fail` may not come back."""

    def __init__(self, runner: Runner, role: str, *, may_fail: bool) -> None:
        self._runner = runner
        self._role = role
        self._may_fail = may_fail

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        happening = {wrong for chunk in plan.chunks if (wrong := _goes_wrong(chunk, self._role)) is not None}
        for wrong in happening & _SLOW.keys():
            time.sleep(_SLOW[wrong])
        for wrong in happening - _SLOW.keys() if self._may_fail else ():
            if wrong in (Wrong.DEATH_ON_PREFILL, Wrong.DEATH_ON_DECODE):
                time.sleep(LAST_WORD_S)  # what was computed before has been told
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"{wrong.name} of a marked prompt")
        return self._runner.run(plan)


def main() -> int:
    role = sys.argv.pop(1)
    worker_id = sys.argv[sys.argv.index("--worker-id") + 1]
    make = StepModel.__init__
    may_fail = bool({role, worker_id} & set(os.environ.get(FAULTY, "").split(",")))

    def make_faulty(model: StepModel, runner: Runner) -> None:
        make(model, _FaultyRunner(runner, role, may_fail=may_fail))

    StepModel.__init__ = make_faulty  # type: ignore[method-assign]
    return int(importlib.import_module(f"{role}_worker.__main__").main())


if __name__ == "__main__":
    sys.exit(main())
