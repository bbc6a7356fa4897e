"""One worker as the router sees it: an address, and what lives there now."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from router.discovery import WorkerSource
from router.ledger import Ledger
from router.pairing import Pairing, pairing_of
from router.placement import Candidate, WorkerKey
from twinstage.rpc.clients import DecodeSession, WorkerConnection
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import ModelDescription, Role, Task, WorkerDescription, WorkerLoad


class WorkerState(enum.Enum):
    """How the router sees a worker; the values are the names that AdminService shows."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(slots=True, kw_only=True)
class WorkerLife:
    """A worker from the first contact until it is lost. A restarted worker is another life.

    `load` is None until the first report. `refusal` says why the worker may not serve, and is empty if it may.
    """

    description: WorkerDescription
    connection: WorkerConnection
    tokenizer: TextTokenizer
    session: DecodeSession | None
    ledger: Ledger = field(default_factory=Ledger)
    load: WorkerLoad | None = None
    refusal: str = ""

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.description.worker_id, self.description.epoch)

    @property
    def pairing(self) -> Pairing:
        return pairing_of(self.description)

    @property
    def state(self) -> WorkerState:
        if self.load is None:
            return WorkerState.CONNECTING
        if self.load.draining:
            return WorkerState.DRAINING
        return WorkerState.REFUSED if self.refusal else WorkerState.READY

    def candidate(self) -> Candidate:
        """This worker for placement."""
        load = self.load or WorkerLoad()
        return Candidate(
            key=self.key,
            running=self.ledger.sequences(load),
            max_sequences=self.description.max_num_sequences,
            waiting_tokens=self.ledger.waiting_tokens(load),
            free_blocks=self.ledger.free_blocks(load, self.description.total_kv_blocks),
            total_blocks=self.description.total_kv_blocks,
            block_size=self.description.kv_block_size or 1,
        )


@dataclass(slots=True)
class WorkerEntry:
    """A row of the worker table. Description and load are the last ones known, also of a lost worker."""

    address: str
    wanted_by: set[WorkerSource]  # none: nobody names the address any more
    life: WorkerLife | None = None
    description: WorkerDescription | None = None
    load: WorkerLoad | None = None
    refusal: str = ""
    detail: str = ""
    logged_state: WorkerState = WorkerState.CONNECTING

    @property
    def wanted(self) -> bool:
        return bool(self.wanted_by)

    @property
    def state(self) -> WorkerState:
        if self.life is not None:
            return self.life.state
        if self.refusal:
            return WorkerState.REFUSED
        return WorkerState.LOST if self.load is not None else WorkerState.CONNECTING

    @property
    def shown_detail(self) -> str:
        """Why the worker is in its state, where that needs words."""
        if self.life is not None:
            return self.life.refusal
        return self.refusal or self.detail


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model at one moment: what it is, and the workers that are ready to serve it."""

    description: ModelDescription
    pairing: Pairing
    tokenizer: TextTokenizer
    prefill: tuple[WorkerLife, ...] = ()
    decode: tuple[WorkerLife, ...] = ()

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def ready(self) -> bool:
        """Whether requests can be served: pooling models need prefill workers alone."""
        return bool(self.prefill) and (bool(self.decode) or self.description.task is not Task.GENERATE)


def served_model(lives: list[WorkerLife]) -> ServedModel:
    """The model that these workers, all of one pairing and at least one of them, serve together."""
    first = lives[0]
    # Workers may be started with different limits; what the model promises is what all of them can do.
    max_model_len = min(life.description.model.max_model_len for life in lives)
    ready = [life for life in lives if life.state is WorkerState.READY]
    return ServedModel(
        description=replace(first.description.model, max_model_len=max_model_len),
        pairing=first.pairing,
        tokenizer=first.tokenizer,
        prefill=tuple(life for life in ready if life.description.role is Role.PREFILL),
        decode=tuple(life for life in ready if life.description.role is Role.DECODE),
    )
