"""Starts engines by name, each as a process of its own, and ends them together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.engines.client import START_LIMIT_S, EngineProcess
from bench.peers import Peers
from bench.peers.install import PeerMissing
from twinstage.hosting.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
OwnOptions = Mapping[str, str]
_DEFAULT_WEIGHTS = ("int8", "fp32", "stock")


def own_options(weights: Sequence[str] | None = None) -> tuple[OwnOptions, ...]:
    """How our own engine is measured: in these precisions. The first is what others are compared with."""
    if "weights" not in WorkerSettings.model_fields:  # there is only one way to compute
        return ({},)
    return tuple({"weights": value} for value in weights or _DEFAULT_WEIGHTS)


def worker_flags(options: OwnOptions) -> list[str]:
    """A way to compute, for the command line of a worker."""
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]


def precision_of(options: OwnOptions) -> str:
    """A way to compute, for a label."""
    return options.get("weights", "stock")


def available_threads() -> int:
    """What an engine computes with: a thread for each core that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(kw_only=True)
class Engines:
    """The engines of one row; all are ended when the scope is left. `threads` is what each computes with."""

    peers: Peers | None
    log_directory: Path
    progress: Callable[[str], None]
    own: Sequence[OwnOptions]
    threads: int = field(default_factory=available_threads)
    start_limit_s: float = START_LIMIT_S
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def own_flags(self) -> list[str]:
        """Our first way to compute, for the command line of a worker."""
        return worker_flags(self.own[0])

    @property
    def precision(self) -> str:
        """Our first way to compute, for a label."""
        return precision_of(self.own[0])

    def start(self, name: str, **options: str) -> EngineProcess:
        """Start `twinstage`, `transformers`, `llama`, or another module of `bench.engines`.

        Options go to `twinstage` with their names, to other modules as they are.

        Raises EngineFailed when it does not start, PeerMissing when it is not there.
        """
        commands = {"twinstage": self._twinstage, "transformers": self._transformers, "llama": self._llama}
        command = commands[name](options) if name in commands else _helper(name, options)
        label = "-".join([name, *options.values()])
        self.progress(f"starting {label}")
        engine = EngineProcess(
            command,
            environment={"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": str(self.threads)},
            log_path=self.log_directory / f"engine-{label}.log",
            start_timeout_s=self.start_limit_s,
        )
        self._stack.callback(engine.close)
        return engine

    def _twinstage(self, options: Mapping[str, str]) -> list[str]:
        values = [f"{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "bench.engines.twinstage", "demo", str(self.threads), *values]

    def _transformers(self, _options: Mapping[str, str]) -> list[str]:
        from twinstage.models.resolve import resolve_model

        directory = resolve_model("demo", progress=self.progress).directory
        return [sys.executable, "-m", "bench.engines.transformers", str(directory), str(self.threads)]

    def _llama(self, _options: Mapping[str, str]) -> list[str]:
        if self.peers is None:
            raise PeerMissing("peers are not wanted")
        model = self.peers.q8_0_model()
        return [str(self.peers.python("llama")), "-m", "bench.engines.llama_cpp", str(model), str(self.threads)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


def _helper(name: str, options: Mapping[str, str]) -> list[str]:
    return [sys.executable, "-m", f"bench.engines.{name}", *options.values()]
