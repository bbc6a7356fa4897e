"""What both ends of the worker protocol have to agree on, besides its messages."""

from __future__ import annotations

PROTOCOL_VERSION = 6  # of the worker protocol; raised with every change that an older side would misread
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # of every channel and server of ours: a batch of embeddings, a long prompt's ids
