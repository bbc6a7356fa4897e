"""The thread that drives an engine.

    submit (any thread) ──commands──> [ run commands -> step -> on_step ] ──> load()

Commands run between steps. The thread sleeps on one condition while there is nothing to do, or while all that is live
waits for blocks; a command or a freed block wakes it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from twinstage.engine.core import EngineCore
from twinstage.engine.output import EngineLoad, StepOutput
from twinstage.errors import Draining, IllegalTransition, InternalError
from twinstage.telemetry.log import get_logger

logger = get_logger(__name__)

Command = Callable[[EngineCore], None]


class EngineLoop:
    """Owns the thread of one `EngineCore`.

    `on_step` is called on that thread after each step that has output; it must be quick and must not raise.
    """

    def __init__(self, core: EngineCore, on_step: Callable[[StepOutput], None], *, name: str) -> None:
        self._core = core
        self._on_step = on_step
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._news = threading.Condition()
        self._commands: deque[tuple[Command, Future[None]]] = deque()  # these four under `_news`
        self._has_news = False
        self._started = False
        self._stopping = False
        self._load = core.load()
        core.pool.add_free_listener(self._wake)

    def start(self) -> None:
        """Start the thread. Raises IllegalTransition the second time, or after `stop`."""
        with self._news:
            if self._started or self._stopping:
                raise IllegalTransition("the engine loop was started before")
            self._started = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its present step and the commands that were submitted; waits for that. Idempotent.

        What is still live is aborted, so that all its blocks are free afterwards.
        """
        with self._news:
            self._stopping = True
            self._has_news = True
            self._news.notify()
            started = self._started
        if started and threading.current_thread() is not self._thread:
            self._thread.join()
        if not started:
            self._refuse_commands()

    def submit(self, command: Command) -> Future[None]:
        """Run `command` with the core between two steps.

        The future has its outcome; errors are logged as well. After `stop` it fails with Draining.
        """
        outcome: Future[None] = Future()
        with self._news:
            if not self._stopping:
                self._commands.append((command, outcome))
                self._has_news = True
                self._news.notify()
                return outcome
        outcome.set_exception(Draining("the engine has stopped"))
        return outcome

    def load(self) -> EngineLoad:
        """The load after the last step or command."""
        return self._load

    # --- on the engine thread --------------------------------------------------------------------

    def _run(self) -> None:
        can_advance = False
        while True:
            commands, stopping = self._next_commands(wait=not can_advance)
            for command, outcome in commands:
                self._execute(command, outcome)
            if stopping:
                break
            output = self._step() if self._core.has_work else StepOutput()
            self._load = self._core.load()
            if not output.is_empty:
                self._report(output)
            # When nothing could run, only a command or a freed block changes that, and both are news.
            can_advance = output.num_computed_tokens > 0
        self._core.abort_all()
        self._load = self._core.load()

    def _next_commands(self, *, wait: bool) -> tuple[list[tuple[Command, Future[None]]], bool]:
        """The commands to run now, and whether to stop after them."""
        with self._news:
            while wait and not self._has_news:
                self._news.wait()
            self._has_news = False
            commands = list(self._commands)
            self._commands.clear()
            return commands, self._stopping

    def _execute(self, command: Command, outcome: Future[None]) -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            command(self._core)
        # The thread's boundary: a command that fails is its submitter's business, told by the future.
        except Exception as error:
            logger.warning("engine command failed", error=repr(error))
            outcome.set_exception(error)
        else:
            self._load = self._core.load()  # before anybody acts on the outcome
            outcome.set_result(None)

    def _step(self) -> StepOutput:
        try:
            return self._core.step()
        # The thread's boundary: a bug in the engine ends the requests it has, not the worker.
        except Exception as error:
            logger.exception("engine step failed")
            return self._core.fail_all(InternalError(f"the engine failed: {error!r:.200}"))

    def _report(self, output: StepOutput) -> None:
        try:
            self._on_step(output)
        # The thread's boundary: the listener's bug must not end the requests of others.
        except Exception:
            logger.exception("engine listener failed")

    def _wake(self) -> None:
        with self._news:
            self._has_news = True
            self._news.notify()

    def _refuse_commands(self) -> None:
        with self._news:
            commands = list(self._commands)
            self._commands.clear()
        for _, outcome in commands:
            outcome.set_exception(Draining("the engine has stopped"))
