"""Conversion between domain types and the messages of the public API, `twinstage.v1`: all that the router's door needs.

Requests come as `Raw...` types for admission to judge; results go out as messages.
"""

from __future__ import annotations

from twinstage.rpc.convert_catalog import model_to_proto, worker_to_proto
from twinstage.rpc.convert_chat import chat_prompt_from_proto
from twinstage.rpc.convert_embedding import (
    embed_request_from_proto,
    embedding_to_proto,
    encode_request_from_proto,
    encode_stream_request_from_proto,
)
from twinstage.rpc.convert_generation import (
    Speller,
    chat_request_from_proto,
    chat_result_to_proto,
    delta_to_proto,
    finished_to_proto,
    generate_request_from_proto,
    generation_result_to_proto,
    matched_stop_to_proto,
    output_from_proto,
    placement_to_proto,
    prompt_info_to_proto,
    prompt_logprobs_to_proto,
    sampling_from_proto,
    stopping_from_proto,
    summary_to_proto,
    timing_to_proto,
    token_logprobs_to_proto,
    usage_to_proto,
)
from twinstage.rpc.convert_values import seconds_from_proto, seconds_to_proto

__all__ = [
    "Speller",
    "chat_prompt_from_proto",
    "chat_request_from_proto",
    "chat_result_to_proto",
    "delta_to_proto",
    "embed_request_from_proto",
    "embedding_to_proto",
    "encode_request_from_proto",
    "encode_stream_request_from_proto",
    "finished_to_proto",
    "generate_request_from_proto",
    "generation_result_to_proto",
    "matched_stop_to_proto",
    "model_to_proto",
    "output_from_proto",
    "placement_to_proto",
    "prompt_info_to_proto",
    "prompt_logprobs_to_proto",
    "sampling_from_proto",
    "seconds_from_proto",
    "seconds_to_proto",
    "stopping_from_proto",
    "summary_to_proto",
    "timing_to_proto",
    "token_logprobs_to_proto",
    "usage_to_proto",
    "worker_to_proto",
]
