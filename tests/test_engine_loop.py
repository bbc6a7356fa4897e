"""The engine's thread: commands, wake-ups without polling, errors that do not end it, and an orderly stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fake_runner import Collected, generate_alone, make_core, make_spec
from twinstage.engine.core import EngineCore, StepOutput
from twinstage.engine.loop import EngineLoop
from twinstage.errors import AlreadyExists, Draining, IllegalTransition, IntegrityError, InternalError
from twinstage.kv.block_pool import BlockPool
from twinstage.types import RequestId

WAIT_S = 20.0


class Listener:
    """Collects what the loop reports and lets a test wait for it."""

    def __init__(self) -> None:
        self.collected = Collected()
        self.changed = threading.Condition()
        self.fail_next: Exception | None = None

    def __call__(self, output: StepOutput) -> None:
        with self.changed:
            self.collected.take(output)
            self.changed.notify_all()
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error

    def wait_for(self, predicate: Callable[[Collected], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: predicate(self.collected), timeout=WAIT_S)


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


@pytest.fixture
def engine() -> Iterator[tuple[EngineLoop, Listener, BlockPool, EngineCore]]:
    core, _, pool = make_core(num_blocks=16)
    listener = Listener()
    loop = EngineLoop(core, listener, name="test-engine")
    loop.start()
    yield loop, listener, pool, core
    loop.stop()
    pool.check_integrity()


Engine = tuple[EngineLoop, Listener, BlockPool, EngineCore]


def test_requests_from_many_threads_all_complete(engine: Engine) -> None:
    loop, listener, pool, _ = engine
    specs = [make_spec(f"r{i}", prompt=range(1 + i % 7), seed=i, temperature=1.0) for i in range(40)]
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(lambda spec: loop.submit(lambda core: core.add(spec)).result(WAIT_S), specs))
    listener.wait_for(lambda collected: len(collected.finished) == 40)
    for spec in specs:
        assert listener.collected.tokens[spec.request_id] == generate_alone(spec)[0]
    assert loop.submit(lambda core: None).result(WAIT_S) is None
    assert pool.num_free == pool.num_blocks
    assert loop.load().finished == 40
    assert loop.load().running == loop.load().waiting == 0


def test_callbacks_and_commands_run_on_the_engine_thread(engine: Engine) -> None:
    loop, _, _, _ = engine
    names: list[str] = []
    loop.submit(lambda core: names.append(threading.current_thread().name)).result(WAIT_S)
    assert names == ["test-engine"]


def test_freed_blocks_wake_an_engine_that_waits_for_them(engine: Engine) -> None:
    loop, listener, pool, core = engine
    steps = 0
    step = core.step

    def counted() -> StepOutput:
        nonlocal steps
        steps += 1
        return step()

    core.step = counted  # type: ignore[method-assign]
    reservation = pool.allocate(16, owner="reservation")
    loop.submit(lambda core: core.add(make_spec("r"))).result(WAIT_S)
    loop.submit(lambda core: None).result(WAIT_S)
    loop.submit(lambda core: None).result(WAIT_S)
    assert loop.load().waiting == 1
    assert steps <= 3, "it steps when there is news, not all the time"
    reservation.release()
    listener.wait_for(lambda collected: "r" in collected.finish)


def test_a_failing_command_is_told_to_its_submitter_and_to_nobody_else(engine: Engine) -> None:
    loop, listener, _, _ = engine
    spec, gate = make_spec("r"), threading.Event()
    loop.submit(lambda core: assert_set(gate))  # the two that follow run between the same steps
    first = loop.submit(lambda core: core.add(spec))
    second = loop.submit(lambda core: core.add(spec))
    gate.set()
    first.result(WAIT_S)
    with pytest.raises(AlreadyExists):
        second.result(WAIT_S)
    listener.wait_for(lambda collected: "r" in collected.finish)


def test_a_cancelled_command_does_not_run() -> None:
    core, _, _ = make_core()
    loop = EngineLoop(core, lambda output: None, name="test-engine")
    ran: list[int] = []
    first, second = loop.submit(lambda core: ran.append(1)), loop.submit(lambda core: ran.append(2))
    assert first.cancel()
    loop.start()
    second.result(WAIT_S)
    loop.stop()
    assert ran == [2]


def test_a_bug_in_the_engine_fails_its_requests_and_the_thread_lives(engine: Engine) -> None:
    loop, listener, pool, core = engine
    step = core.step

    def broken() -> StepOutput:
        core.step = step  # type: ignore[method-assign]
        raise IntegrityError("bug")

    core.step = broken  # type: ignore[method-assign]
    loop.submit(lambda core: core.add(make_spec("a"))).result(WAIT_S)
    listener.wait_for(lambda collected: "a" in collected.errors)
    assert isinstance(listener.collected.errors["a"], InternalError)
    loop.submit(lambda core: core.add(make_spec("b"))).result(WAIT_S)
    listener.wait_for(lambda collected: "b" in collected.finish)
    loop.submit(lambda core: None).result(WAIT_S)
    assert pool.num_free == pool.num_blocks


def test_a_bug_in_the_listener_does_not_end_the_thread(engine: Engine) -> None:
    loop, listener, _, _ = engine
    listener.fail_next = RuntimeError("listener")
    loop.submit(lambda core: core.add(make_spec("a"))).result(WAIT_S)
    listener.wait_for(lambda collected: "a" in collected.finish)


def test_the_load_is_fresh_when_a_command_is_done(engine: Engine) -> None:
    """Who waits for a command, and then looks whether there is room, is not told again."""
    loop, _, _, _ = engine
    may_go, seen = threading.Event(), []
    loop.submit(lambda core: may_go.wait(WAIT_S) and None)
    added = loop.submit(lambda core: core.add(make_spec("a", max_tokens=50)))
    aborted = loop.submit(lambda core: core.abort(RequestId("a")) and None)
    added.add_done_callback(lambda _: seen.append(loop.load().waiting))
    aborted.add_done_callback(lambda _: seen.append(loop.load().waiting))
    may_go.set()
    aborted.result(WAIT_S)
    loop.submit(lambda core: None).result(WAIT_S)
    assert seen == [1, 0]


def test_stop_runs_what_was_submitted_and_frees_what_lives() -> None:
    core, _, pool = make_core(num_blocks=16, max_model_len=60, hold=True)
    loop = EngineLoop(core, lambda output: None, name="test-engine")
    loop.start()
    ran = threading.Event()
    for name in ("a", "b", "c"):
        loop.submit(lambda core, name=name: core.add(make_spec(name, prompt=range(30))))  # type: ignore[misc]
    last = loop.submit(lambda core: ran.set())
    loop.stop()
    loop.stop()
    assert last.done()
    assert ran.is_set()
    assert pool.num_free == pool.num_blocks
    assert not any(thread.name == "test-engine" for thread in threading.enumerate())
    with pytest.raises(Draining):
        loop.submit(lambda core: None).result(WAIT_S)
    with pytest.raises(IllegalTransition):
        loop.start()


def test_stop_before_start_and_from_its_own_thread() -> None:
    core, _, _ = make_core()
    loop = EngineLoop(core, lambda output: None, name="test-engine")
    pending = loop.submit(lambda core: None)
    loop.stop()
    with pytest.raises(Draining):
        pending.result(WAIT_S)

    core, _, pool = make_core()
    stopped = threading.Event()

    def stop_at_once(output: StepOutput) -> None:
        loop.stop()
        stopped.set()

    loop = EngineLoop(core, stop_at_once, name="test-engine")
    loop.start()
    loop.submit(lambda core: core.add(make_spec("r", max_tokens=50)))
    assert stopped.wait(WAIT_S)
    loop.stop()
    assert pool.num_free == pool.num_blocks


def test_aborts_race_with_steps_and_lose_nothing(engine: Engine) -> None:
    loop, listener, pool, _ = engine
    names = [f"r{i}" for i in range(60)]
    aborted: list[str] = []

    def churn(name: str) -> None:
        loop.submit(lambda core: core.add(make_spec(name, prompt=range(5), max_tokens=6))).result(WAIT_S)
        if int(name[1:]) % 2:
            loop.submit(lambda core: aborted.append(name) if core.abort(RequestId(name)) else None).result(WAIT_S)

    with ThreadPoolExecutor(6) as executor:
        list(executor.map(churn, names))
    listener.wait_for(lambda collected: len(collected.finished) + len(aborted) == 60)
    loop.submit(lambda core: None).result(WAIT_S)
    assert pool.num_free == pool.num_blocks
    assert not set(aborted) & set(listener.collected.finished)
