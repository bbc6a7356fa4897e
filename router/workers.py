"""The worker table: who is there, what they serve, and whether they can be trusted to serve it together.

    one task per address      describe -> tokenizer bundle -> session (decode) -> load reports, for as long as they come
    READY                     reports its load and fits the model's other workers
    DRAINING                  finishes what it has
    REFUSED                   would serve, but does not fit; it is asked again when those who serve are gone
    LOST                      the connection broke, or three report intervals passed in silence; dialled again
    CONNECTING                not reached yet

Everything here runs on the event loop; tables and models change between awaits only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import NoReturn

from router.backoff import Backoff
from router.catalog import Work, find_model
from router.discovery import NameWatcher, WorkerSource
from router.pairing import choose_pairing, disagreement
from router.placement import Snapshot, WorkerKey
from router.prefix_memory import PrefixMemory
from router.reset_book import ResetBook
from router.tokenizer_cache import TokenizerCache
from router.waiting import first_of
from router.worker_entry import ServedModel, WorkerEntry, WorkerLife, WorkerState, served_model
from twinstage.errors import HandshakeRefused, TwinstageError, WorkerLost
from twinstage.rpc.access import OPEN_ACCESS, Access
from twinstage.rpc.clients import WorkerConnection
from twinstage.rpc.protocol import PROTOCOL_VERSION
from twinstage.telemetry.log import get_logger
from twinstage.types import Role, WorkerDescription

CONTACT_TIMEOUT_S = 5.0

logger = get_logger(__name__)


class WorkerTable:
    """All workers, and the models that they serve. `on_change` is called after every change of a state or a model."""

    def __init__(
        self,
        *,
        report_interval_s: float = 0.5,
        lookup_interval_s: float = 5.0,
        access: Callable[[], Access] = lambda: OPEN_ACCESS,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._report_interval_s = report_interval_s
        self._lookup_interval_s = lookup_interval_s
        self._access = access
        self._beside: dict[str, asyncio.Task[None]] = {}
        self._on_change = on_change
        self._entries: dict[str, WorkerEntry] = {}
        self._models: dict[str, ServedModel] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watchers: list[tuple[NameWatcher, asyncio.Task[None]]] = []
        self._tokenizers = TokenizerCache()
        self._next_change = asyncio.Event()
        self._closing = False
        self.prefixes = PrefixMemory()
        self.resets = ResetBook()

    # --- what the router asks ---------------------------------------------------------------------

    @property
    def entries(self) -> tuple[WorkerEntry, ...]:
        return tuple(self._entries.values())

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """Every model that a worker has announced, also when nobody serves it now."""
        return self._models

    def find_model(self, name: str, *, work: Work | None, field: str = "model") -> ServedModel:
        """As `catalog.find_model`."""
        unheard = [entry.address for entry in self._entries.values() if entry.state is WorkerState.CONNECTING]
        return find_model(self._models, name, work=work, field=field, unheard=unheard)

    @property
    def decode_rows(self) -> int:
        """Sequences that the ready decode workers can compute at once."""
        return sum(life.description.max_num_sequences for model in self._models.values() for life in model.decode)

    def snapshot(self, model: ServedModel) -> Snapshot:
        """The workers that could serve a request admitted for `model` now: none, if they are of another kind since."""
        current = self._models.get(model.name)
        if current is None or current.pairing != model.pairing:
            return Snapshot(prefill=(), decode=())
        return Snapshot(
            prefill=tuple(life.candidate() for life in current.prefill),
            decode=tuple(life.candidate() for life in current.decode),
        )

    def life(self, key: WorkerKey) -> WorkerLife:
        """The worker with this key. Raises WorkerLost."""
        for entry in self._entries.values():
            if entry.life is not None and entry.life.key == key:
                return entry.life
        raise WorkerLost(f"worker {key.worker_id} is lost")

    async def changed(self, *, until_s: float) -> bool:
        """Wait for the next change of a state or a model; False when none came until `until_s` (monotonic)."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._next_change.wait()
        except TimeoutError:
            return False
        return True

    # --- coming and going -------------------------------------------------------------------------

    def start(self, sources: Sequence[WorkerSource]) -> None:
        """Begin to connect; returns at once."""
        for source in sources:
            if source.is_dns_name:
                self._watch(source)
            else:
                self._add(source.address, source)

    async def close(self) -> None:
        """End every connection. Idempotent."""
        self._closing = True
        tasks = [*self._tasks.values(), *self._beside.values(), *(task for _, task in self._watchers)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def beside(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Do something beside everything else, until it is done or the table ends; one of a name at a time."""
        task = self._beside.get(name)
        if task is None or task.done():
            self._beside[name] = asyncio.create_task(work(), name=name)

    def _watch(self, source: WorkerSource) -> None:
        known: set[str] = set()

        def on_addresses(addresses: frozenset[str]) -> None:
            for address in addresses - known:
                self._add(address, source)
            for address in known - addresses:
                self._remove(address, source)
            known.clear()
            known.update(addresses)

        watcher = NameWatcher(source, interval_s=self._lookup_interval_s, on_addresses=on_addresses)
        self._watchers.append((watcher, asyncio.create_task(watcher.run(), name=f"look up {source.host}")))

    def _add(self, address: str, source: WorkerSource) -> None:
        entry = self._entries.get(address)
        if entry is not None:
            entry.wanted_by.add(source)
            return
        entry = self._entries[address] = WorkerEntry(address, wanted_by={source})
        self._tasks[address] = asyncio.create_task(self._stay_connected(entry), name=f"worker {address}")

    def _remove(self, address: str, source: WorkerSource) -> None:
        """The name has no such address any more. A worker that still answers there is kept until it is lost."""
        entry = self._entries.get(address)
        if entry is None:
            return
        entry.wanted_by.discard(source)
        if not entry.wanted and entry.life is None:
            del self._entries[address]
            self._tasks.pop(address).cancel()

    async def _stay_connected(self, entry: WorkerEntry) -> None:
        """Connect, serve until the worker is lost, and again; until nobody wants the address."""
        backoff = Backoff()
        try:
            while entry.wanted:
                try:
                    await self._live(entry, backoff)
                except HandshakeRefused as error:
                    entry.refusal = str(error)
                except TwinstageError as error:
                    entry.refusal, entry.detail = "", str(error)
                except (
                    Exception
                ) as error:  # the outermost frame of this task: a bug must not end the watch over a worker
                    logger.exception("worker task failed", address=entry.address)
                    entry.refusal, entry.detail = "", f"internal error: {type(error).__name__}"
                self._changed()
                for watcher, _ in self._watchers:
                    watcher.look_again()
                if entry.wanted:
                    await backoff.wait()
        finally:
            if self._entries.get(entry.address) is entry:
                del self._entries[entry.address]
                del self._tasks[entry.address]
            self._changed()

    async def _live(self, entry: WorkerEntry, backoff: Backoff) -> NoReturn:
        """One life of a worker. Ends with an error, however it ends."""
        connection = WorkerConnection(entry.address, self._access())
        try:
            entry.description = description = await connection.describe(timeout_s=CONTACT_TIMEOUT_S)
            _check_protocol(description)
            tokenizer = await self._tokenizers.get(connection, description.model.tokenizer_fingerprint)
            session = None
            if description.role is Role.DECODE:
                session = await connection.open_session(timeout_s=CONTACT_TIMEOUT_S)
            life = WorkerLife(description=description, connection=connection, tokenizer=tokenizer, session=session)
            await self._pay_resets(life)
            self._check_known_once(entry, description)
            entry.life = life  # no await since the last look: a reset was either seen there or sees this life
            backoff.reset()
            if session is None:
                await self._follow_load(entry, life)
            await first_of(self._follow_load(entry, life), session.run())
        except TwinstageError as error:
            entry.detail = str(error)
            raise
        finally:
            life_ended, entry.life = entry.life, None
            if life_ended is not None:
                if life_ended.session is not None:
                    life_ended.session.close()
                self._changed()  # at once: to end the connection may take its time
            await connection.close()

    async def _pay_resets(self, life: WorkerLife) -> None:
        """Let a worker that does not serve yet forget what it may have from before a reset that it has not had."""
        while number := self.resets.owed(life.description):
            await life.connection.reset_prefix_cache(timeout_s=CONTACT_TIMEOUT_S)
            self.resets.had(life.description, number)

    def _check_known_once(self, entry: WorkerEntry, description: WorkerDescription) -> None:
        """Raises HandshakeRefused for a worker that is known by another address already."""
        for other in self._entries.values():
            if other.life is not None and other is not entry and other.life.description == description:
                raise HandshakeRefused(f"is the same worker as the one at {other.address}")

    async def _follow_load(self, entry: WorkerEntry, life: WorkerLife) -> NoReturn:
        reports = life.connection.watch_load(interval_s=self._report_interval_s)
        async with contextlib.aclosing(reports):
            async for load in reports:
                is_news = life.load is None or life.load.draining != load.draining
                is_news = is_news or (load.draining and load != life.load)  # somebody may wait for its end
                life.load = entry.load = load
                life.ledger.report_arrived()
                if is_news:
                    entry.refusal = entry.detail = ""
                    self._changed()
        raise WorkerLost(f"the worker at {entry.address} ended its load reports")

    # --- who serves -------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Settle which workers serve each model, log what changed, and tell."""
        lives: dict[str, list[WorkerLife]] = {name: [] for name in self._models}
        for entry in self._entries.values():
            if entry.life is not None and entry.life.load is not None:
                lives.setdefault(entry.life.description.model.name, []).append(entry.life)
        for name, members in lives.items():
            self._settle(name, members)
        for entry in self._entries.values():
            self._log_state(entry)
        self._next_change.set()
        self._next_change = asyncio.Event()
        self._on_change()

    def _settle(self, name: str, members: Sequence[WorkerLife]) -> None:
        known = self._models.get(name)
        able = [life.pairing for life in members if life.state is not WorkerState.DRAINING]
        chosen = choose_pairing(known.pairing if known is not None else None, able)
        for life in members:
            differs = chosen is not None and life.pairing != chosen
            life.refusal = disagreement(life.pairing, chosen) if chosen is not None and differs else ""
        pairing = chosen or (known.pairing if known is not None else None)
        serving = [life for life in members if life.pairing == pairing]
        if serving:
            self._models[name] = served_model(serving)
        elif known is not None:
            self._models[name] = ServedModel(
                description=known.description, pairing=known.pairing, tokenizer=known.tokenizer
            )

    def _log_state(self, entry: WorkerEntry) -> None:
        state = entry.state
        if state is entry.logged_state or self._closing:  # who is left is not lost
            return
        entry.logged_state = state
        worker_id = entry.description.worker_id if entry.description is not None else ""
        log = logger.warning if state in {WorkerState.LOST, WorkerState.REFUSED} else logger.info
        log(f"worker {state.value}", worker=worker_id, address=entry.address, detail=entry.shown_detail)


def _check_protocol(description: WorkerDescription) -> None:
    """Raises HandshakeRefused for a worker that speaks another version."""
    if description.protocol_version != PROTOCOL_VERSION:
        raise HandshakeRefused(
            f"speaks version {description.protocol_version} of the worker protocol, this router speaks "
            f"{PROTOCOL_VERSION}; run router and workers of one release"
        )
