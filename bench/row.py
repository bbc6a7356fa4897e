"""A row of the table: what it measures, with what, and within which time.

Each module in `bench/rows/` has one, named `ROW`:

    def measure(context: Context) -> RowResult: ...

    ROW = Row(name="decode", title="Decode throughput", measure=measure, limit_s=600)

A row measures every engine in turn, again and again (A B A B), so that whatever slows the machine down for a while
slows all of them; a comparison is the ratio within a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.engines.client import EngineProcess
from bench.engines.launch import Engines
from bench.peers import Peers
from bench.results import RowResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a row may use.

    `rounds`: how often to measure. `peers` is None when only Twinstage is to be measured. `directory` is the row's own,
    empty at first and gone afterwards.
    """

    quick: bool
    rounds: int
    peers: Peers | None
    engines: Engines
    directory: Path
    progress: Callable[[str], None]

    def engine(self, name: str, **options: str) -> EngineProcess:
        """A process that computes on command, ended with the row. Raises EngineFailed, PeerMissing."""
        return self.engines.start(name, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. `limit_s` bounds its time; it is ended and reported as failed when it takes longer.

    `quick`: whether `make bench-quick` runs it. `peers`: those that are installed for it. `needs_vllm`: it measures
    vLLM's server too, which takes minutes to start and is started before the row's time begins to count;
    `needs_llama_server`: that of llama.cpp, whose settings are tried before.
    """

    name: str
    title: str
    measure: Callable[[Context], RowResult]
    limit_s: float
    quick: bool = True
    peers: tuple[str, ...] = ()
    needs_vllm: bool = False
    needs_llama_server: bool = False
