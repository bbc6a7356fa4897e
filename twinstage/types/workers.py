"""What workers say of themselves, and the hand-over between them."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.types.basics import Role, Task, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model as a worker serves it. `embedding_dimensions` and `token_dimensions` are 0 unless the task is EMBED.

    `labels` are those of a classifier, in the order of its probabilities; none for other tasks.
    """

    name: str
    fingerprint: str
    task: Task
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    embedding_dimensions: int = 0
    token_dimensions: int = 0
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What a worker says of itself; constant while it lives. `epoch` is drawn at every start.

    `numerics` names all that decides the bits of its results, in deterministic mode; empty otherwise.
    """

    worker_id: WorkerId
    epoch: int
    role: Role
    protocol_version: int
    model: ModelDescription
    kv_layout_fingerprint: str
    total_kv_blocks: int
    kv_block_size: int
    kv_block_bytes: int
    max_num_sequences: int
    transports: tuple[str, ...]
    numerics: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The load of a worker at one moment.

    The free blocks include the `cached` ones, which the prefix cache knows until they are needed. Since the start,
    `looked_up` blocks of prompts were looked for there, and the `found` ones need not be computed or sent.
    `unfinished` requests hold or wait for something, in whatever phase; `leaked` blocks are held by none of them.
    """

    free_kv_blocks: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    finished: int = 0
    kv_bytes_received: int = 0
    draining: bool = False
    cached_kv_blocks: int = 0
    prefix_looked_up_blocks: int = 0
    prefix_found_blocks: int = 0
    unfinished: int = 0
    leaked_kv_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEndpoint:
    """A way to reach a decode worker's blocks: `shm` with the path of a unix socket, or `tcp` with host:port.

    `host_id` identifies the host; shared memory needs the same one on both sides.
    """

    transport: str
    address: str
    host_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGrant:
    """The right to fill some blocks of a decode worker, once.

    The handle is (`worker_id`, `epoch`, `transfer_id`, `generation`): a restarted worker has another epoch, and a
    block that was given to somebody else since has another generation. `block_ids` are in prompt order and follow the
    first `num_cached_blocks` of the prompt, which the decode worker has already and which nobody may write.
    """

    worker_id: WorkerId
    epoch: int
    transfer_id: int
    generation: int
    token: bytes
    block_ids: tuple[int, ...]
    layout_fingerprint: str
    endpoints: tuple[KvEndpoint, ...]
    lease_s: float
    num_cached_blocks: int = 0
