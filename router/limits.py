"""The most of everything that one request may bring; docs/limits.md lists them with those of whole connections.

They are far above what a request that could be served needs. What depends on the model (tokens of a prompt, ids of its
vocabulary) is judged in admission.
"""

from __future__ import annotations

# Checked at the door, on the message itself: conversion and admission run on the event loop.
MAX_ENTRIES = 1024  # of logit_bias, stop, stop_token_ids and batch
MAX_TOKEN_IDS = 1024 * 1024  # of one prompt, whatever the model
MAX_MESSAGES = 4096  # of a conversation
MAX_NAME_CHARACTERS = 256  # of a message's role or name, and of a model's name
MAX_TOOLS = 128  # of a request, and calls of a message
MAX_SCHEMAS = 8192  # within the schemas of all tools of a request
MAX_TOOL_BYTES = 256 * 1024  # of all tools of a request
MAX_TEMPLATE_CHARACTERS = 64 * 1024  # of a request's own chat template
MAX_TEMPLATE_OPTIONS_BYTES = 256 * 1024  # of chat_template_kwargs
MAX_STRUCTURED_OUTPUT_BYTES = 256 * 1024  # of a schema, grammar or other constraint
MAX_INPUTS = 2048  # of an embedding request

# Checked in admission.
MAX_REQUEST_ID_LENGTH = 128
MAX_CHOICES = 128  # sampling.n
MAX_CONTINUATIONS = 1024  # of one call: prompts times choices
MAX_LOGPROBS = 20
MAX_UNARY_PROMPT_LOGPROBS = (
    100_000  # with alternatives; some 3 MB, where clients of gRPC take 4 MiB unless told otherwise
)
MAX_NUMBERS = 15_000_000  # of vectors in a unary answer, and of one input: 60 MB, where a message has 64 MiB at most
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one stop string
MAX_PATTERN_SIZE = 256  # tokens of a pattern that repetition_detection looks for
MAX_PATTERN_COUNT = 1024 * 1024  # its repetitions
MAX_PRIORITY = 100
MAX_SALT_BYTES = 128
MAX_BIAS = 100.0
MAX_TOOL_NAME_CHARACTERS = 64
