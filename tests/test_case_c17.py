"""C17: what ends, or may not end, a generation just at the hand-over; what ends with the first token moves nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from case_parts import CasePair
from twinstage.engine.llm import LLM, GenerationLimits
from twinstage.types import SamplingParameters
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("cases")

EOS = 2
FAVOURED = {EOS: 50.0}


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple(3 + (7 * index + 29 * number) % 300 for index in range(20))


def generate(pair: CasePair, prompt: Sequence[int], *, favoured: bool = False, **stopping: object) -> tuple:  # type: ignore[type-arg]
    """Token ids, text, finish reason, and the bytes of KV that moved."""
    request = generation_pb2.GenerateRequest(
        model=pair.transport,
        prompt_token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingOptions(temperature=0.0, logit_bias=FAVOURED if favoured else {}),
        stopping=common_pb2.StoppingOptions(**{"max_tokens": 8, **stopping}),  # type: ignore[arg-type]
        output=common_pb2.OutputOptions(return_token_ids=True),
    )
    with pair.cluster.channel() as channel:
        response = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=20)
    (result,) = response.results
    reason = common_pb2.FinishReason.Name(result.finish_reason).removeprefix("FINISH_REASON_")
    return tuple(result.token_ids), result.text, reason, response.placement.kv_bytes


def expected(
    reference: LLM, prompt: Sequence[int], *, favoured: bool = False, **limits: object
) -> tuple[tuple[int, ...], str]:
    sampling = SamplingParameters(temperature=0.0, logit_bias=FAVOURED if favoured else {})
    (result,) = reference.generate([tuple(prompt)], sampling, limits=GenerationLimits(**{"max_tokens": 8, **limits}))  # type: ignore[arg-type]
    return result.token_ids, result.finish.reason.name


def received(pair: CasePair) -> int:
    pair.cluster.wait_idle()
    return pair.cluster.worker(pair.decode.name).kv_bytes_received


def test_the_end_of_sequence_as_first_token_moves_nothing(case_pair: CasePair, quick_reference: LLM) -> None:
    before = received(case_pair)
    token_ids, text, reason, kv_bytes = generate(case_pair, prompt_of(1), favoured=True)
    assert (token_ids, reason) == expected(quick_reference, prompt_of(1), favoured=True) == ((EOS,), "STOP")
    assert (text, kv_bytes) == ("", 0)
    assert received(case_pair) == before


def test_one_token_moves_nothing(case_pair: CasePair, quick_reference: LLM) -> None:
    before = received(case_pair)
    token_ids, _, reason, kv_bytes = generate(case_pair, prompt_of(2), max_tokens=1, ignore_eos=True)
    limits = {"max_tokens": 1, "ignore_eos": True}
    assert (token_ids, reason) == expected(quick_reference, prompt_of(2), **limits)
    assert (reason, kv_bytes) == ("LENGTH", 0)
    assert received(case_pair) == before


def test_a_stop_string_over_the_first_two_tokens(case_pair: CasePair, quick_reference: LLM) -> None:
    for number in range(200):
        (first, second, *_), _ = expected(quick_reference, prompt_of(number), ignore_eos=True)
        texts = [quick_reference.tokenizer.decode([token_id]) for token_id in (first, second)]
        if all(text.isascii() and len(text) > 1 for text in texts):
            break
    else:
        raise AssertionError("no prompt begins with two tokens of plain text")
    stop = texts[0][-1] + texts[1][0]
    token_ids, text, reason, _ = generate(case_pair, prompt_of(number), ignore_eos=True, stop=[stop])
    assert reason == "STOP"
    assert token_ids[:2] == (first, second)
    assert text == (texts[0] + texts[1]).partition(stop)[0]


def test_an_end_of_sequence_that_is_ignored(case_pair: CasePair, quick_reference: LLM) -> None:
    answer = generate(case_pair, prompt_of(3), favoured=True, ignore_eos=True)
    wanted = expected(quick_reference, prompt_of(3), favoured=True, ignore_eos=True)
    assert (answer[0], answer[2]) == wanted == ((EOS,) * 8, "LENGTH")


def test_an_end_of_sequence_that_comes_too_early_is_suppressed(case_pair: CasePair, quick_reference: LLM) -> None:
    answer = generate(case_pair, prompt_of(4), favoured=True, min_tokens=5)
    wanted = expected(quick_reference, prompt_of(4), favoured=True, min_tokens=5)
    assert (answer[0], answer[2]) == wanted
    assert wanted[1] == "STOP"
    assert EOS not in wanted[0][:4]
    assert len(wanted[0]) >= 5
