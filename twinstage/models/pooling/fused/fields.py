"""What a step is told: tables of 64-bit values, by which Python and the compiled code find everything. Free of Numba.

Addresses are those of 64-byte aligned memory; strides and sizes count elements unless they say bytes. A float field
holds a float32 in its first four bytes. What several threads work on at once is either *shared*, and they wait for one
another after each phase, or each takes *parts* of whole sequences and computes them alone.
"""

from __future__ import annotations

from enum import IntEnum, auto

from twinstage.models.fused.fields import StepField

MOST_PART_ROWS = 128  # unless a single sequence is longer: what is between layers stays in the second-level cache
SLACK_ROWS = 16  # behind queries, keys and values: register tiles read further than the last key


class EncoderField(IntEnum):
    """One table for each model. The first part never changes, the second with buffers, the third with every step."""

    NUM_THREADS = StepField.NUM_THREADS
    SYNC = StepField.SYNC
    LAYERS = auto()  # [num_layers][EncoderLayerField]
    NUM_LAYERS = auto()
    HIDDEN_SIZE = auto()
    INTERMEDIATE_SIZE = auto()
    NUM_HEADS = auto()
    HEAD_DIM = auto()
    EPSILON = auto()  # float
    ATTENTION_SCALE = auto()  # float: of scores, which are exponents of 2
    WORDS = auto()  # float32 [vocabulary, hidden_size]
    POSITIONS = auto()  # float32 [positions, hidden_size]
    TYPES = auto()  # float32 [token types, hidden_size]
    NORM = auto()
    NORM_BIAS = auto()

    SCRATCH = auto()  # of thread 0; the others follow
    SCRATCH_BYTES = auto()  # of one thread
    HIDDEN = auto()  # float32 [rows, hidden_size]: the result
    QKV = auto()  # float32 [work rows, 3 * hidden_size]: queries, keys, values
    ATTENDED = auto()  # float32 [work rows, hidden_size]
    INNER = auto()  # float32 [work rows, intermediate_size]
    TOKEN_IDS = auto()  # int32 [rows]
    POSITION_IDS = auto()  # int32 [rows]
    TYPE_IDS = auto()  # int32 [rows]
    STARTS = auto()  # int64 [sequences + 1]: first row of each sequence
    PARTS = auto()  # int64 [parts + 1]: first sequence of each part

    NUM_PARTS = auto()  # that threads compute alone
    NEXT_PART = auto()  # address of an int64: the part that is taken next
    PART_ROWS = auto()  # work rows of one thread, SLACK_ROWS included
    HAS_SHARED = auto()  # 1: one more part follows, which all threads share


class EncoderLayerField(IntEnum):
    """One table for each layer. A scale of 0 belongs to float32 weights."""

    QKV = 0
    QKV_SCALE = auto()
    QKV_BIAS = auto()
    OUTPUT = auto()
    OUTPUT_SCALE = auto()
    OUTPUT_BIAS = auto()
    OUTPUT_NORM = auto()
    OUTPUT_NORM_BIAS = auto()
    UP = auto()
    UP_SCALE = auto()
    UP_BIAS = auto()
    DOWN = auto()
    DOWN_SCALE = auto()
    DOWN_BIAS = auto()
    DOWN_NORM = auto()
    DOWN_NORM_BIAS = auto()
