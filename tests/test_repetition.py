"""Repetition detection: the same as looking at all tokens again each time, and one end among others of a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_workers import make_bundle
from flow_rig import request, running
from twinstage.text.repetition import RepetitionDetector
from twinstage.text.stream import TextDelta, TextStream
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import (
    Finish,
    FinishReason,
    ProducedToken,
    RawRepetition,
    RawStopping,
    RepetitionLimits,
    RequestId,
    TextOptions,
    TokenChunk,
)


def limits(low: int = 1, high: int = 4, count: int = 2) -> RepetitionLimits:
    return RepetitionLimits(min_pattern_size=low, max_pattern_size=high, min_count=count)


def repeats(tokens: list[int], wanted: RepetitionLimits) -> bool:
    """The definition."""
    sizes = range(wanted.min_pattern_size, wanted.max_pattern_size + 1)
    return any(
        len(tokens) >= size * wanted.min_count
        and tokens[-size * wanted.min_count :] == tokens[-size:] * wanted.min_count
        for size in sizes
    )


@given(
    tokens=st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 1), max_size=60),
    low=st.integers(1, 6),
    more=st.integers(0, 6),
    count=st.integers(2, 5),
)
def test_it_is_found_at_each_token_at_which_the_definition_holds(
    tokens: list[int], low: int, more: int, count: int
) -> None:
    wanted = limits(low, low + more, count)
    detector = RepetitionDetector(wanted)
    for end, token_id in enumerate(tokens, start=1):
        assert detector.push(token_id) == repeats(tokens[:end], wanted)


def test_tokens_that_are_far_apart_cost_nothing() -> None:
    detector = RepetitionDetector(limits(1, 16, 4))
    assert not any(detector.push(index % 50) for index in range(10_000))
    assert max(map(len, detector._places.values())) <= 2


# --- in a text ------------------------------------------------------------------------------------


def pushed(stream: TextStream, text: str, finish: Finish | None = None) -> TextDelta:
    token_ids = TextTokenizer(make_bundle()).encode(text)
    tokens = tuple(ProducedToken(token_id=token_id) for token_id in token_ids)
    return stream.push(TokenChunk(request_id=RequestId("r"), tokens=tokens, finish=finish))


def stream(*, stop: tuple[str, ...] = (), min_tokens: int = 0) -> TextStream:
    return TextStream(TextTokenizer(make_bundle()), TextOptions(stop=stop, repetition=limits(2, 3, 3)), min_tokens)


def test_the_text_ends_with_the_repetition_and_later_tokens_are_dropped() -> None:
    text = stream()
    assert pushed(text, "xaba").finish is None
    delta = pushed(text, "babab")
    assert (delta.text, len(delta.tokens)) == ("bab", 3)
    assert delta.finish == Finish(reason=FinishReason.REPETITION)
    assert text.num_tokens == 7
    assert pushed(text, "a") == TextDelta()


def test_text_that_was_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    text = stream(stop=("abc",))
    delta = pushed(text, "ababab")
    assert (delta.text, delta.finish) == ("ababab", Finish(reason=FinishReason.REPETITION))


def test_nothing_ends_before_min_tokens() -> None:
    text = stream(min_tokens=7)
    assert pushed(text, "ababab").finish is None
    assert pushed(text, "a").finish == Finish(reason=FinishReason.REPETITION)


@pytest.mark.parametrize(
    ("stop", "finish", "expected"),
    [
        (("ababab",), None, Finish(reason=FinishReason.STOP, matched_text="ababab")),
        (("ababab",), Finish(reason=FinishReason.LENGTH), Finish(reason=FinishReason.STOP, matched_text="ababab")),
        ((), Finish(reason=FinishReason.LENGTH), Finish(reason=FinishReason.LENGTH)),
        ((), None, Finish(reason=FinishReason.REPETITION)),
    ],
)
def test_of_several_ends_with_one_token_the_one_that_was_asked_for_counts(
    stop: tuple[str, ...], finish: Finish | None, expected: Finish
) -> None:
    text = stream(stop=stop)
    assert pushed(text, "ababa").finish is None
    assert pushed(text, "b", finish).finish == expected


# --- through a router -----------------------------------------------------------------------------


async def test_a_generation_that_repeats_itself_ends_and_frees_its_worker() -> None:
    """The stand-in's tokens are random letters: some letter occurs twice in a row, at a place that a seed decides."""
    stopping = RawStopping(max_tokens=50, repetition=RawRepetition(max_pattern_size=1, min_count=2))
    async with running() as rig:
        whole = (await rig.collect(request(50))).text
        end = next(place for place in range(1, 50) if whole[place] == whole[place - 1]) + 1
        answer = await rig.collect(request(stopping=stopping))
        assert answer.text == whole[:end]
        assert answer.finish.finish == Finish(reason=FinishReason.REPETITION)
        assert answer.summary.usage.completion_tokens == end
        await rig.cluster.assert_idle()
