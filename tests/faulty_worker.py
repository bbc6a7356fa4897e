"""A real worker of either role that goes wrong when it computes a marked prompt: `python -m faulty_worker ROLE flags`.

A prompt is marked by its first two tokens, MARK and what is to happen. Only workers started with TWINSTAGE_TEST_FAULTY
in their environment go wrong.
"""

from __future__ import annotations

import enum
import importlib
import os
import signal
import sys

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.engine.step_model import Runner, StepModel

MARK = 211
FAULTY = "TWINSTAGE_TEST_FAULTY"  # the roles and worker ids that do, separated by commas


class Wrong(enum.IntEnum):
    """What goes wrong; also the second token of the prompt."""

    FIRST_CHUNK = 220  # the forward pass of the first chunk raises
    LAST_CHUNK = 221  # that of the chunk that gives the first token
    DEATH_ON_PREFILL = 222  # kill -9 while the prompt is computed
    DEATH_ON_DECODE = 223  # kill -9 while a later token is computed


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
    }
    return wrong if happens[wrong] else None


class _FaultyRunner:
    """A forward pass that may not come back."""

    def __init__(self, runner: Runner, role: str) -> None:
        self._runner = runner
        self._role = role

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        for chunk in plan.chunks:
            wrong = _goes_wrong(chunk, self._role)
            if wrong in (Wrong.DEATH_ON_PREFILL, Wrong.DEATH_ON_DECODE):
                os.kill(os.getpid(), signal.SIGKILL)
            if wrong is not None:
                raise RuntimeError(f"{wrong.name} of a marked prompt")
        return self._runner.run(plan)


def main() -> int:
    role = sys.argv.pop(1)
    worker_id = sys.argv[sys.argv.index("--worker-id") + 1]
    make = StepModel.__init__
    if {role, worker_id} & set(os.environ.get(FAULTY, "").split(",")):
        StepModel.__init__ = lambda model, runner: make(model, _FaultyRunner(runner, role))  # type: ignore[method-assign]
    return int(importlib.import_module(f"{role}_worker.__main__").main())


if __name__ == "__main__":
    sys.exit(main())
