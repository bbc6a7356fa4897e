"""The compiled grammars of one process, kept while there is room, and matchers of them for sequences."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from twinstage.errors import Overloaded, Unavailable
from twinstage.grammar.compile import Compilers
from twinstage.grammar.matcher import BackendMatcher, SequenceMatcher, refused
from twinstage.text.bundle import TokenizerBundle
from twinstage.types.constraints import Constraint, GrammarBackend, OutputConstraint

# Of a busy machine, and for the import of a backend; the router has seen the grammar compile in seconds of a processor.
COMPILE_TIMEOUT_S = 120.0
MAX_KEPT = 256
MAX_KEPT_BYTES = 256 * 1024 * 1024
_THREADS = 2
_APART = frozenset({GrammarBackend.XGRAMMAR})  # importing it would hold up a serving process: see `apart`


class CompiledGrammars:
    """Grammars for one tokenizer, compiled on threads of their own. Any thread may use it."""

    def __init__(
        self,
        bundle: TokenizerBundle,
        *,
        max_kept: int = MAX_KEPT,
        max_bytes: int = MAX_KEPT_BYTES,
        apart: Collection[GrammarBackend] = _APART,
    ) -> None:
        self._compilers = Compilers(bundle, apart=apart)
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Constraint, BackendMatcher] = OrderedDict()  # unused ones, from which others are copied
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    async def start(self, constraint: OutputConstraint, token_ids: Sequence[int] = ()) -> SequenceMatcher:
        """As `start_now`, on a thread. Raises Overloaded when that takes too long."""
        work = asyncio.get_running_loop().run_in_executor(self._executor, self.start_now, constraint, token_ids)
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                return await work
        except TimeoutError:
            raise Overloaded(f"the output's grammar was not compiled within {COMPILE_TIMEOUT_S:g} s") from None

    def start_now(self, constraint: OutputConstraint, token_ids: Sequence[int] = ()) -> SequenceMatcher:
        """The matcher of an output that has got `token_ids` already.

        Raises InvalidRequest for a grammar that cannot be compiled, and for tokens that do not follow it; Unavailable
        when a process that matches grammars ended.
        """
        reasoning = self._matcher(constraint.reasoning) if constraint.reasoning is not None else None
        matcher = SequenceMatcher(
            self._matcher(constraint.answer), marker=constraint.reasoning_end_ids, reasoning=reasoning
        )
        for position, token_id in enumerate(token_ids):
            if not matcher.accept(token_id):
                raise refused(f"does not allow token {token_id}, which the output has got at position {position}")
        return matcher

    def close(self) -> None:
        """Compile nothing any more, and end the processes of backends that have one."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._compilers.close()

    def _matcher(self, constraint: Constraint) -> BackendMatcher:
        with self._lock:
            if (kept := self._kept.get(constraint)) is not None:
                self._kept.move_to_end(constraint)
                try:
                    return kept.copy()
                except Unavailable:  # its process is gone
                    self._drop(constraint)
        compiled = self._compilers.compile(constraint)
        with self._lock:
            self._keep(constraint, compiled)
            return compiled.copy()

    def _keep(self, constraint: Constraint, compiled: BackendMatcher) -> None:
        if constraint in self._kept or compiled.memory_bytes > self._max_bytes:
            return
        self._kept[constraint] = compiled
        self._kept_bytes += compiled.memory_bytes
        while len(self._kept) > self._max_kept or self._kept_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, constraint: Constraint) -> None:
        self._kept_bytes -= self._kept.pop(constraint).memory_bytes
