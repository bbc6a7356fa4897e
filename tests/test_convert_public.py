"""What clients send arrives as it was written, and what the router says leaves complete."""

from __future__ import annotations

import math
import struct

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from twinstage.errors import InvalidRequest
from twinstage.rpc import convert_public as convert
from twinstage.rpc.convert_chat import fill_conversation, message_from_proto
from twinstage.rpc.convert_values import float_as_written
from twinstage.text.answers.parts import AnswerDelta
from twinstage.types import (
    BatchPrompt,
    ChatMessage,
    ChatPrompt,
    EmbeddingFormat,
    Finish,
    FinishReason,
    ModelDescription,
    Placement,
    ProducedToken,
    RawGenerationRequest,
    RawOutput,
    RawRepetition,
    RawSampling,
    RawStopping,
    Role,
    Task,
    TextPrompt,
    Timing,
    TokenAlternative,
    TokenLogprobs,
    TokenPrompt,
    Tool,
    ToolCall,
    ToolChoice,
    ToolChoiceMode,
    Truncation,
    Usage,
    WorkerDescription,
    WorkerId,
    WorkerLoad,
)
from twinstage.types.constraints import RawStructuredOutput
from twinstage.v1 import admin_pb2, common_pb2, embedding_pb2, generation_pb2, model_pb2, tokenizer_pb2

FULL_REQUEST = """{
  "prompt": "Hi", "model": "m", "requestId": "r-1", "priority": -3, "cacheSalt": "tenant",
  "sampling": {"n": 2, "temperature": 0.7, "topP": 0.9, "topK": 40, "minP": 0.05, "repetitionPenalty": 1.1,
               "presencePenalty": -0.5, "frequencyPenalty": 0.3, "seed": "18446744073709551615",
               "logitBias": {"7": -1.5}},
  "stopping": {"maxTokens": 9, "minTokens": 1, "stop": ["a", "b"], "stopTokenIds": [4], "includeStopStrInOutput": true,
               "ignoreEos": true, "timeLimit": "1.500s", "repetitionDetection": {"minCount": 3}},
  "output": {"logprobs": 3, "promptLogprobs": 0, "returnTokenIds": true, "skipSpecialTokens": false},
  "structuredOutput": {"regex": "a"}
}"""


def test_every_field_of_a_generate_request() -> None:
    request = json_format.Parse(FULL_REQUEST, generation_pb2.GenerateRequest())
    assert convert.generate_request_from_proto(request) == RawGenerationRequest(
        prompt=TextPrompt(text="Hi"),
        model="m",
        request_id="r-1",
        sampling=RawSampling(
            n=2,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.3,
            seed=2**64 - 1,
            logit_bias={7: -1.5},
        ),
        stopping=RawStopping(
            max_tokens=9,
            min_tokens=1,
            stop=("a", "b"),
            stop_token_ids=(4,),
            include_stop_str_in_output=True,
            ignore_eos=True,
            time_limit_s=1.5,
            repetition=RawRepetition(min_count=3),
        ),
        output=RawOutput(logprobs=3, prompt_logprobs=0, return_token_ids=True, skip_special_tokens=False),
        structured_output=RawStructuredOutput.regex("a"),
        priority=-3,
        cache_salt="tenant",
    )


def test_a_bare_request_leaves_everything_open() -> None:
    request = json_format.Parse('{"prompt": "Hello"}', generation_pb2.GenerateRequest())
    assert convert.generate_request_from_proto(request) == RawGenerationRequest(prompt=TextPrompt(text="Hello"))
    assert convert.generate_request_from_proto(generation_pb2.GenerateRequest()).prompt is None


def test_zero_is_not_the_same_as_left_out() -> None:
    request = generation_pb2.GenerateRequest(
        sampling=common_pb2.SamplingOptions(temperature=0, seed=0, n=0),
        stopping=common_pb2.StoppingOptions(max_tokens=0),
    )
    raw = convert.generate_request_from_proto(request)
    assert (raw.sampling.temperature, raw.sampling.seed, raw.sampling.n, raw.sampling.top_p) == (0.0, 0, 0, None)
    assert (raw.stopping.max_tokens, raw.stopping.min_tokens) == (0, None)


def test_not_a_number_reaches_admission() -> None:
    request = generation_pb2.GenerateRequest(
        sampling=common_pb2.SamplingOptions(temperature=math.nan, top_p=math.inf, min_p=-math.inf)
    )
    sampling = convert.generate_request_from_proto(request).sampling
    assert sampling.temperature is not None
    assert math.isnan(sampling.temperature)
    assert (sampling.top_p, sampling.min_p) == (math.inf, -math.inf)


def test_token_ids_and_batches() -> None:
    ids = generation_pb2.GenerateRequest(prompt_token_ids=common_pb2.TokenIds(ids=[1, 2]))
    assert convert.generate_request_from_proto(ids).prompt == TokenPrompt(token_ids=(1, 2))
    batch = json_format.Parse(
        '{"batch": {"prompts": [{"prompt": "a"}, {"promptTokenIds": {"ids": [3]}}, {}]}}',
        generation_pb2.GenerateRequest(),
    )
    assert convert.generate_request_from_proto(batch).prompt == BatchPrompt(
        prompts=(TextPrompt(text="a"), TokenPrompt(token_ids=(3,)), TextPrompt(text=""))
    )


@pytest.mark.parametrize("message_class", [generation_pb2.ChatRequest, tokenizer_pb2.RenderChatRequest])
def test_a_conversation(message_class: type[generation_pb2.ChatRequest | tokenizer_pb2.RenderChatRequest]) -> None:
    request = json_format.Parse(
        """{"messages": [{"role": "user", "content": "Hi", "name": "Ann"}, {"role": "assistant"}],
            "chatTemplate": "t", "addGenerationPrompt": false, "continueFinalMessage": true,
            "chatTemplateKwargs": {"count": 3, "share": 0.5, "on": true, "none": null,
                                   "deep": {"list": [1, "x", [2]]}}}""",
        message_class(),
    )
    assert convert.chat_prompt_from_proto(request) == ChatPrompt(
        messages=(ChatMessage(role="user", content="Hi", name="Ann"), ChatMessage(role="assistant", content="")),
        chat_template="t",
        chat_template_kwargs={
            "count": 3,
            "share": 0.5,
            "on": True,
            "none": None,
            "deep": {"list": [1, "x", [2]]},
        },
        add_generation_prompt=False,
        continue_final_message=True,
    )
    kwargs = convert.chat_prompt_from_proto(request).chat_template_kwargs
    assert isinstance(kwargs["count"], int)  # a template prints 3, not 3.0


@pytest.mark.parametrize(
    "choice",
    [
        None,
        ToolChoice(),
        ToolChoice(mode=ToolChoiceMode.NONE),
        ToolChoice(mode=ToolChoiceMode.REQUIRED),
        ToolChoice(mode=ToolChoiceMode.NAMED, function="f"),
    ],
)
def test_a_conversation_with_tools_there_and_back(choice: ToolChoice | None) -> None:
    call = ToolCall(id="1", name="f", arguments='{"a": 1}')
    prompt = ChatPrompt(
        messages=(
            ChatMessage(role="assistant", content="", tool_calls=(call,), reasoning="Hm"),
            ChatMessage(role="tool", content="2", tool_call_id="1"),
        ),
        tools=(Tool(name="f", description="d", parameters="{}"),),
        tool_choice=choice,
        parallel_tool_calls=False,
        reasoning_effort="low",
    )
    request = generation_pb2.ChatRequest()
    fill_conversation(request, prompt)
    assert convert.chat_prompt_from_proto(request) == prompt


def test_a_choice_that_this_version_does_not_know() -> None:
    request = generation_pb2.ChatRequest(tool_choice=generation_pb2.ToolChoice(mode=99))  # type: ignore[arg-type]
    choice = convert.chat_prompt_from_proto(request).tool_choice
    assert choice == ToolChoice(mode=ToolChoiceMode.UNKNOWN)


def test_a_chat_request_carries_all_options() -> None:
    message = json_format.Parse(FULL_REQUEST.replace('"prompt": "Hi", ', ""), generation_pb2.ChatRequest())
    generate = json_format.Parse(FULL_REQUEST, generation_pb2.GenerateRequest())
    chat, plain = convert.chat_request_from_proto(message), convert.generate_request_from_proto(generate)
    assert chat.prompt == ChatPrompt(messages=())
    for name in (
        "model",
        "request_id",
        "sampling",
        "stopping",
        "output",
        "structured_output",
        "priority",
        "cache_salt",
    ):
        assert getattr(chat, name) == getattr(plain, name)


@given(st.floats(width=32))
def test_floats_are_read_as_written(value: float) -> None:
    read = float_as_written(value)
    assert struct.pack("<f", read) == struct.pack("<f", value) or (math.isnan(read) and math.isnan(value))


@pytest.mark.parametrize("written", [0.7, 0.1, 1e-5, 0.95, 1.3, 100.0, 3.4e38, 0.0, -2.0, 1e-45])
def test_short_decimals_survive(written: float) -> None:
    (widened,) = struct.unpack("<f", struct.pack("<f", written))
    read = float_as_written(widened)
    assert read == written or written == 1e-45  # a denormal has no six digits
    assert struct.pack("<f", read) == struct.pack("<f", written)


TOKENS = (
    ProducedToken(
        token_id=5,
        logprobs=TokenLogprobs(logprob=-0.5, rank=2, top=(TokenAlternative(6, -0.25), TokenAlternative(5, -0.5))),
    ),
)


def spell(token_id: int) -> tuple[str, bytes]:
    return f"<{token_id}>", bytes([token_id])


def test_a_delta_with_everything_and_one_with_text_alone() -> None:
    delta = convert.delta_to_proto(AnswerDelta(content="ab"), TOKENS, index=1, return_token_ids=True, spell=spell)
    assert json_format.MessageToDict(delta) == {
        "index": 1,
        "text": "ab",
        "tokenIds": [5],
        "logprobs": [
            {
                "tokenId": 5,
                "text": "<5>",
                "tokenBytes": "BQ==",
                "logprob": -0.5,
                "rank": 2,
                "top": [
                    {"tokenId": 6, "text": "<6>", "tokenBytes": "Bg==", "logprob": -0.25},
                    {"tokenId": 5, "text": "<5>", "tokenBytes": "BQ==", "logprob": -0.5},
                ],
            }
        ],
    }
    plain = convert.delta_to_proto(
        AnswerDelta(content="ab"), (ProducedToken(token_id=5),), index=0, return_token_ids=False, spell=spell
    )
    assert plain == generation_pb2.Delta(text="ab")


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_its_enumeration(reason: FinishReason) -> None:
    finished = convert.finished_to_proto(Finish(reason=reason), index=3)
    assert common_pb2.FinishReason.Name(finished.finish_reason) == f"FINISH_REASON_{reason.name}"
    assert finished.index == 3
    assert not finished.HasField("matched_stop")


def test_the_stop_that_was_matched() -> None:
    text = Finish(reason=FinishReason.STOP, matched_text="END")
    token = Finish(reason=FinishReason.STOP, matched_token_id=0)
    assert convert.matched_stop_to_proto(text) == common_pb2.MatchedStop(text="END")
    matched = convert.matched_stop_to_proto(token)
    assert matched is not None
    assert matched.WhichOneof("match") == "token_id"  # though the id is 0


def test_unary_results_equal_streamed_parts() -> None:
    finish = Finish(reason=FinishReason.STOP, matched_token_id=2)
    result = convert.generation_result_to_proto(
        "ab", TOKENS, index=1, finish=finish, return_token_ids=True, spell=spell
    )
    delta = convert.delta_to_proto(AnswerDelta(content="ab"), TOKENS, index=1, return_token_ids=True, spell=spell)
    ended = convert.finished_to_proto(finish, index=1)
    assert (result.text, list(result.token_ids), result.logprobs) == (delta.text, list(delta.token_ids), delta.logprobs)
    assert (result.finish_reason, result.matched_stop) == (ended.finish_reason, ended.matched_stop)
    message = ChatMessage(role="assistant", content="ab", reasoning="hm", tool_calls=(ToolCall(id="1", name="f"),))
    answer = convert.chat_result_to_proto(message, TOKENS, index=1, finish=finish, return_token_ids=True, spell=spell)
    assert message_from_proto(answer.message) == message
    assert (answer.logprobs, answer.finish_reason) == (result.logprobs, result.finish_reason)


def test_a_summary_keeps_every_number() -> None:
    summary = convert.summary_to_proto(
        usage=Usage(prompt_tokens=1, completion_tokens=2, cached_prompt_tokens=3),
        timing=Timing(
            queue_s=0.1,
            tokenize_s=0.2,
            prefill_s=0.3,
            kv_transfer_s=0.4,
            time_to_first_token_s=0.5,
            decode_s=0.6,
            total_s=2.000000001,
        ),
        placement=Placement(
            prefill_worker="p",
            decode_worker="d",
            transport="shm",
            kv_bytes=4,
            decode_computed_prompt_tokens=5,
            retries=6,
        ),
    )
    assert json_format.MessageToDict(summary) == {
        "usage": {"promptTokens": 1, "completionTokens": 2, "cachedPromptTokens": 3},
        "timing": {
            "queue": "0.100s",
            "tokenize": "0.200s",
            "prefill": "0.300s",
            "kvTransfer": "0.400s",
            "timeToFirstToken": "0.500s",
            "decode": "0.600s",
            "total": "2.000000001s",
        },
        "placement": {
            "prefillWorker": "p",
            "decodeWorker": "d",
            "transport": "shm",
            "kvBytes": "4",
            "decodeComputedPromptTokens": 5,
            "retries": 6,
        },
    }


@given(st.floats(min_value=0, max_value=1e6))
def test_seconds_survive_to_the_nanosecond(seconds: float) -> None:
    assert convert.seconds_from_proto(convert.seconds_to_proto(seconds)) == pytest.approx(seconds, abs=1e-9)


def test_encode_requests_in_all_forms() -> None:
    request = json_format.Parse(
        """{"inputs": [{"text": "a"}, {"tokenIds": {"ids": [1]}}, {}], "model": "m", "requestId": "r", "dimensions": 8,
            "normalize": false, "format": "EMBEDDING_FORMAT_PACKED_FLOAT16", "task": "POOLING_TASK_EMBED",
            "truncation": {"tokens": 4, "side": "TRUNCATION_SIDE_RIGHT"}}""",
        embedding_pb2.EncodeRequest(),
    )
    raw = convert.encode_request_from_proto(request)
    assert raw.inputs == (TextPrompt(text="a"), TokenPrompt(token_ids=(1,)), None)
    assert raw.truncation == Truncation(tokens=4, keep_last=False)
    assert (raw.normalize, raw.dimensions, raw.format) == (False, 8, EmbeddingFormat.PACKED_FLOAT16)
    assert (raw.model, raw.request_id, raw.inputs_field) == ("m", "r", "inputs")


def test_bare_embed_and_stream_requests() -> None:
    raw = convert.embed_request_from_proto(embedding_pb2.EmbedRequest(texts=["a", "b"]))
    assert raw.inputs == (TextPrompt(text="a"), TextPrompt(text="b"))
    assert (raw.inputs_field, raw.truncation, raw.normalize) == ("texts", Truncation(), True)
    assert (raw.dimensions, raw.format) == (None, EmbeddingFormat.FLOAT)
    request = json_format.Parse(
        '{"input": {"text": "a"}, "truncation": {"modelLimit": {}}}', embedding_pb2.EncodeStreamRequest()
    )
    streamed = convert.encode_stream_request_from_proto(request)
    assert streamed.inputs == (TextPrompt(text="a"),)
    assert (streamed.inputs_field, streamed.truncation) == ("input", Truncation(to_model_limit=True))


def test_unknown_enumerations_are_refused_together() -> None:
    request = embedding_pb2.EncodeRequest(inputs=[embedding_pb2.EncodeInput(text="a")])
    request.format = 99  # type: ignore[assignment]
    request.task = 98  # type: ignore[assignment]
    request.truncation.side = 97  # type: ignore[assignment]
    with pytest.raises(InvalidRequest) as caught:
        convert.encode_request_from_proto(request)
    assert [violation.field for violation in caught.value.violations] == ["format", "truncation.side", "task"]


VECTOR = struct.pack("<3f", 0.5, -1.25, 3.0)


def test_vectors_in_every_format() -> None:
    plain = convert.embedding_to_proto(VECTOR, index=2, prompt_tokens=7, format=EmbeddingFormat.FLOAT)
    assert (list(plain.values), plain.packed) == ([0.5, -1.25, 3.0], b"")
    assert (plain.index, plain.prompt_tokens, plain.dimensions) == (2, 7, 3)
    packed = convert.embedding_to_proto(VECTOR, index=0, prompt_tokens=1, format=EmbeddingFormat.PACKED_FLOAT32)
    assert (packed.packed, len(packed.values)) == (VECTOR, 0)
    half = convert.embedding_to_proto(VECTOR, index=0, prompt_tokens=1, format=EmbeddingFormat.PACKED_FLOAT16)
    assert half.packed == struct.pack("<3e", 0.5, -1.25, 3.0)
    with pytest.raises(InvalidRequest, match="format"):
        convert.embedding_to_proto(
            struct.pack("<f", 1e6), index=0, prompt_tokens=1, format=EmbeddingFormat.PACKED_FLOAT16
        )


MODEL = ModelDescription(
    name="m",
    fingerprint="f",
    task=Task.GENERATE,
    max_model_len=8,
    vocab_size=9,
    eos_token_ids=(1,),
    tokenizer_fingerprint="t",
)


def test_models_and_workers() -> None:
    model = convert.model_to_proto(MODEL, prefill_workers=1, decode_workers=2, ready=True, deterministic=True)
    assert model == model_pb2.Model(
        name="m",
        task=model_pb2.MODEL_TASK_GENERATE,
        max_model_len=8,
        vocab_size=9,
        fingerprint="f",
        prefill_workers=1,
        decode_workers=2,
        ready=True,
        deterministic=True,
    )
    description = WorkerDescription(
        worker_id=WorkerId("w"),
        epoch=1,
        role=Role.DECODE,
        protocol_version=1,
        model=MODEL,
        kv_layout_fingerprint="l",
        total_kv_blocks=10,
        kv_block_size=16,
        kv_block_bytes=64,
        max_num_sequences=4,
        transports=("shm", "tcp"),
    )
    load = WorkerLoad(free_kv_blocks=3, running=1, waiting=2, finished=5, kv_bytes_received=640)
    worker = convert.worker_to_proto(description, load, address="h:1", state="ready")
    assert worker == admin_pb2.Worker(
        id="w",
        address="h:1",
        role=admin_pb2.WORKER_ROLE_DECODE,
        state=admin_pb2.WORKER_STATE_READY,
        model="m",
        total_kv_blocks=10,
        free_kv_blocks=3,
        running=1,
        waiting=2,
        finished=5,
        kv_bytes_received=640,
        transports=["shm", "tcp"],
    )
    unknown = convert.worker_to_proto(None, None, address="h:2", state="refused", detail="another layout")
    assert unknown == admin_pb2.Worker(address="h:2", state=admin_pb2.WORKER_STATE_REFUSED, detail="another layout")
