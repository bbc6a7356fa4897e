"""What a step is told: tables of 64-bit values, by which Python and the compiled code find everything. Free of Numba.

Addresses are those of 64-byte aligned memory; strides and sizes count elements unless they say bytes. A float field
holds a float32 in its first four bytes.
"""

from __future__ import annotations

from enum import IntEnum, auto

GROUP = 64  # int8 weights of one output that share a scale


class StepField(IntEnum):
    """One table for each model. The first part never changes, the second with buffers, the third with every step."""

    NUM_THREADS = 0
    SYNC = auto()
    SCRATCH = auto()  # of thread 0; the others follow
    SCRATCH_BYTES = auto()  # of one thread
    LAYERS = auto()  # [num_layers][LayerField]
    NUM_LAYERS = auto()
    HIDDEN_SIZE = auto()
    HIDDEN_STRIDE = auto()
    HIDDEN_PANELS = auto()
    NUM_HEADS = auto()
    NUM_KV_HEADS = auto()
    HEAD_DIM = auto()
    QKV_PANELS = auto()
    INTERMEDIATE_SIZE = auto()
    GATE_UP_PANELS = auto()
    VOCAB_PANELS = auto()
    EPSILON = auto()  # float
    ATTENTION_SCALE = auto()  # float
    EMBEDDING = auto()
    EMBEDDING_SCALE = auto()  # 0: the embedding is float32
    FINAL_NORM = auto()
    LM_HEAD = auto()
    LM_HEAD_SCALE = auto()
    ATTENTION = auto()  # the table of the attention, with block tables and the place of keys and values

    HIDDEN = auto()  # float32 [rows, HIDDEN_STRIDE]: the residual stream
    NORMED = auto()  # float32 [rows, hidden_size]
    QKV = auto()  # float32 [rows, QKV_PANELS * PANEL]: queries, keys, values
    ATTENDED = auto()  # float32 [rows, num_heads * head_dim]
    GATE_UP = auto()  # float32 [rows, GATE_UP_PANELS * PANEL]
    ACTIVATED = auto()  # float32 [rows, intermediate_size]
    LOGITS = auto()  # float32 [sampled, VOCAB_PANELS * PANEL]
    COSINES = auto()  # float32 [positions, head_dim / 2]
    SINES = auto()
    TOKEN_IDS = auto()  # int32 [rows]
    POSITIONS = auto()  # int64 [rows]
    SEQUENCES = auto()  # int64 [rows]: row of the block tables
    SAMPLED_ROWS = auto()  # int64 [sampled]

    NUM_ROWS = auto()
    NUM_SAMPLED = auto()


class LayerField(IntEnum):
    """One table for each layer. Where a model has no such tensor, the address is 0."""

    INPUT_NORM = 0
    QKV = auto()
    QKV_SCALE = auto()
    QKV_BIAS = auto()
    QUERY_NORM = auto()
    KEY_NORM = auto()
    OUTPUT = auto()
    OUTPUT_SCALE = auto()
    POST_NORM = auto()
    GATE_UP = auto()
    GATE_UP_SCALE = auto()
    DOWN = auto()
    DOWN_SCALE = auto()
    WINDOW = auto()  # tokens that a token sees, itself included; 0: all


class SyncPlace(IntEnum):
    """Byte offsets into the memory by which the threads of a team wait for one another, each on its own cache line.

    All are int64 but the semaphores, which are of type sem_t, one of SEMAPHORE_BYTES for each thread.
    """

    ARRIVED = 0  # threads that wait at the barrier
    GENERATION = 64  # barriers passed
    ASLEEP = 128  # threads that wait at the barrier and may need to be woken
    STOP = 192  # 1: members shall end
    SEMAPHORES = 256


SEMAPHORE_BYTES = 64
