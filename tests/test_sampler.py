"""The sampler against a slow, plain reference; its random numbers; and that rows do not see each other."""

from __future__ import annotations

import math
import struct
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstage.engine.sampler import Sampler, _best_ids, _draw, random_uniform
from twinstage.engine.sequence import Sequence
from twinstage.errors import ComputeFailed
from twinstage.kv.block_pool import BlockPool
from twinstage.types import ProducedToken, RequestId, SamplingParameters, SequenceSpec

POOL = BlockPool(1)


def make_sequence(
    *,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    spec: dict[str, Any] | None = None,
    **sampling: Any,
) -> Sequence:
    return Sequence(
        spec=SequenceSpec(
            request_id=RequestId("r"),
            prompt_token_ids=prompt,
            sampling=SamplingParameters(**sampling),
            max_tokens=100,
            **(spec or {}),
        ),
        table=POOL.allocate(0, owner="r"),
        arrival=0,
        arrived_s=0.0,
        output_token_ids=list(output),
    )


def sample(logits: list[float], sequence: Sequence) -> ProducedToken:
    (token,) = Sampler().sample(np.array([logits], dtype=np.float32), [sequence])
    if isinstance(token, ComputeFailed):
        raise token
    return token


def reference_weights(logits: list[float], sequence: Sequence) -> list[float]:
    """The distribution, one step after the other, as one would write it on paper."""
    spec, sampling = sequence.spec, sequence.spec.sampling
    values = [float(np.float32(value)) for value in logits]
    for token_id, bias in sampling.logit_bias.items():
        values[token_id] += bias
    for token_id in set(sequence.token_ids):
        factor = sampling.repetition_penalty
        values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
    for token_id, count in Counter(sequence.output_token_ids).items():
        values[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * count
    if len(sequence.output_token_ids) < spec.min_tokens:
        for token_id in spec.stop_token_ids:
            values[token_id] = -math.inf
    values = [float(np.float32(value)) for value in values]  # the sampler keeps rows in float32
    peak = max(values)
    weights = [math.exp((value - peak) / sampling.temperature) for value in values]
    best_first = sorted(range(len(values)), key=lambda token_id: (-weights[token_id], token_id))
    if sampling.top_k:
        best_first = best_first[: sampling.top_k]
    total, reached, nucleus = sum(weights[token_id] for token_id in best_first), 0.0, []
    for token_id in best_first:
        nucleus.append(token_id)
        reached += weights[token_id]
        if reached >= sampling.top_p * total - 1e-12:
            break
    kept = nucleus if sampling.top_p < 1 else best_first
    kept = {token_id for token_id in kept if weights[token_id] >= sampling.min_p * weights[best_first[0]]}
    return [weight if token_id in kept else 0.0 for token_id, weight in enumerate(weights)]


def reference_draw(weights: list[float], uniform: float) -> tuple[int, float]:
    """The token, and how far the random number is from the border of its interval."""
    target, reached = uniform * sum(weights), 0.0
    for token_id, weight in enumerate(weights):
        if weight and reached + weight > target:
            return token_id, min(target - reached, reached + weight - target)
        reached += weight
    raise AssertionError("no token")


@given(st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_sampling_equals_the_reference(data: st.DataObject) -> None:
    random = Random(data.draw(st.integers(0, 1 << 32)))
    logits = [round(random.gauss(0, 2), 1) for _ in range(12)]  # rounded: ties happen
    tokens = st.lists(st.integers(0, 11), max_size=8).map(tuple)
    sequence = make_sequence(
        prompt=data.draw(tokens.filter(bool)),
        output=data.draw(tokens),
        spec={"min_tokens": data.draw(st.integers(0, 5)), "stop_token_ids": frozenset(data.draw(tokens))},
        temperature=data.draw(st.sampled_from([0.3, 0.8, 1.0, 1.7])),
        top_k=data.draw(st.sampled_from([0, 1, 3, 11, 12, 50])),
        top_p=data.draw(st.sampled_from([0.05, 0.5, 0.9, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.2, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([0.7, 1.0, 1.3])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.6, -0.6])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.4])),
        seed=data.draw(st.integers(0, (1 << 64) - 1)),
        logit_bias=data.draw(st.dictionaries(st.integers(0, 11), st.sampled_from([-5.0, 2.0]), max_size=2)),
    )
    weights = reference_weights(logits, sequence)
    uniform = random_uniform(sequence.spec.sampling, position=len(sequence.output_token_ids))
    expected, margin = reference_draw(weights, uniform)
    if margin > 1e-5:  # else rounding and the order of additions decide
        assert sample(logits, sequence).token_id == expected


def test_the_random_number_is_the_documented_function() -> None:
    sampling = SamplingParameters(seed=(1 << 64) - 3, choice_index=7)
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QIQ", (1 << 64) - 3, 7, 41))
    assert random_uniform(sampling, position=41) == (digest >> 11) / 2**53
    numbers = {
        random_uniform(SamplingParameters(seed=seed, choice_index=choice), position=position)
        for seed in range(8)
        for choice in range(8)
        for position in range(8)
    }
    assert len(numbers) == 512
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 512 - 0.5) < 0.05


def test_frequencies_follow_the_probabilities() -> None:
    logits = [math.log(share) for share in (0.5, 0.25, 0.15, 0.1)]
    counts = Counter(sample(logits, make_sequence(seed=seed)).token_id for seed in range(4000))
    for token_id, share in enumerate((0.5, 0.25, 0.15, 0.1)):
        assert abs(counts[token_id] / 4000 - share) < 0.03


def test_the_position_counts_resumed_tokens() -> None:
    logits = [0.0] * 50
    fresh = [sample(logits, make_sequence(output=(0,) * length, seed=5)).token_id for length in range(20)]
    assert len(set(fresh)) > 5
    assert fresh == [sample(logits, make_sequence(output=(0,) * length, seed=5)).token_id for length in range(20)]
    other = [
        sample(logits, make_sequence(output=(0,) * length, seed=5, choice_index=1)).token_id for length in range(20)
    ]
    assert fresh != other


def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits = np.random.default_rng(3).normal(scale=3.0, size=(6, 5000)).astype(np.float32)
    sequences = [
        make_sequence(seed=1, temperature=0.0, spec={"logprobs": 3}),
        make_sequence(seed=2, spec={"logprobs": 0}),
        make_sequence(seed=3, top_p=0.7),
        make_sequence(seed=4, top_k=5, output=(3, 3)),
        make_sequence(seed=5, min_p=0.1, repetition_penalty=1.2, output=(9,)),
        make_sequence(seed=6, frequency_penalty=1.0, output=(1, 1, 1)),
    ]
    together = Sampler().sample(logits, sequences)
    before = logits.copy()
    alone = [Sampler().sample(logits[row : row + 1], sequences[row : row + 1])[0] for row in range(6)]
    order = [3, 0, 5, 1, 4, 2]
    shuffled = Sampler().sample(logits[order], [sequences[row] for row in order])
    assert together == alone
    assert shuffled == [together[row] for row in order]
    assert np.array_equal(before, logits)


def test_ties_go_to_the_lower_id() -> None:
    assert sample([1.0, 2.0, 2.0, 2.0], make_sequence(temperature=0.0)).token_id == 1
    drawn = {sample([0.0, 2.0, 2.0, 2.0], make_sequence(seed=seed, top_k=2)).token_id for seed in range(64)}
    assert drawn == {1, 2}


def test_ties_among_many_tokens() -> None:
    logits = [float(token_id % 3 == 1) for token_id in range(300)]
    drawn = {sample(logits, make_sequence(seed=seed, top_k=4)).token_id for seed in range(64)}
    assert drawn == {1, 4, 7, 10}
    logprobs = sample(logits, make_sequence(spec={"logprobs": 5})).logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs.top] == [1, 4, 7, 10, 13]


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 40},
        {"top_p": 0.95},
        {"top_p": 0.999},
        {"top_p": 0.3},
        {"top_p": 0.9, "min_p": 0.01},
        {"top_k": 300, "top_p": 0.9},
        {"min_p": 0.02},
    ],
    ids=str,
)
def test_rows_of_a_large_vocabulary_equal_the_reference(filters: dict[str, Any], temperature: float) -> None:
    """Rows are long enough for every shortcut: groups, pieces, a nucleus beyond the first try; 9001 divides evenly
    by none of their sizes.
    """
    rows = np.random.default_rng(11).normal(scale=2.0, size=(6, 9001)).astype(np.float32)
    sequences = [make_sequence(seed=seed, temperature=temperature, **filters) for seed in range(6)]
    tokens = Sampler().sample(rows, sequences)
    compared = 0
    for row, sequence, token in zip(rows, sequences, tokens, strict=True):
        weights = reference_weights(row.tolist(), sequence)
        uniform = random_uniform(sequence.spec.sampling, position=0)
        expected, margin = reference_draw(weights, uniform)
        if margin > 1e-6 * sum(weights):
            assert not isinstance(token, ComputeFailed)
            assert token.token_id == expected
            compared += 1
    assert compared >= 5


@given(st.integers(0, 1 << 32), st.integers(1, 400), st.sampled_from([1, 3, 40]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_best_ids_are_those_of_a_sort(seed: int, count: int, levels: int) -> None:
    """Few levels make many ties."""
    values = np.random.default_rng(seed).integers(0, levels, size=3001).astype(np.float32)
    expected = sorted(range(3001), key=lambda token_id: (-values[token_id], token_id))[:count]
    assert _best_ids(values, count).tolist() == expected


def test_greedy_rows_read_the_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The common case of a full batch: no copy, no conversion, no filter, whatever the other rows ask for."""
    logits = np.random.default_rng(1).normal(size=(3, 400)).astype(np.float32)
    monkeypatch.setattr(np, "exp", lambda *_, **__: pytest.fail("a greedy row needs no weights"))
    monkeypatch.setattr(np, "partition", lambda *_, **__: pytest.fail("a greedy row sorts nothing"))
    tokens = Sampler().sample(logits, [make_sequence(temperature=0.0) for _ in range(3)])
    assert tokens == [ProducedToken(token_id=int(row.argmax())) for row in logits]
    adjusted = make_sequence(temperature=0.0, repetition_penalty=1.3, output=(int(logits[0].argmax()),))
    assert Sampler().sample(logits[:1], [adjusted]) != tokens[:1]


def test_a_draw_reaches_every_piece_of_a_row_and_its_edges() -> None:
    weights = np.zeros(1000, dtype=np.float32)
    weights[[3, 255, 256, 511, 700, 998]] = 1.0
    drawn = [_draw(weights, uniform) for uniform in np.linspace(0, 1, 6, endpoint=False) + 1e-9]
    assert drawn == [3, 255, 256, 511, 700, 998]
    assert _draw(weights, 1 - 2**-53) == 998
    assert _draw(weights, 1.0) == 998


def test_a_row_of_which_no_token_is_left_fails_alone() -> None:
    everything = {"min_tokens": 1, "stop_token_ids": frozenset(range(4))}
    logits = np.zeros((2, 4), dtype=np.float32)
    failed, token = Sampler().sample(logits, [make_sequence(spec=everything), make_sequence(temperature=0.0)])
    assert isinstance(failed, ComputeFailed)
    assert token == ProducedToken(token_id=0)


@pytest.mark.parametrize(("uniform", "token_id"), [(0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3), (1.0, 3)])
def test_the_edges_of_the_distribution(uniform: float, token_id: int) -> None:
    assert _draw(np.array([0.0, 2.0, 0.0, 2.0, 0.0]), uniform) == token_id


def test_a_nucleus_larger_than_the_first_try() -> None:
    logits = [0.0] * 2000
    drawn = {sample(logits, make_sequence(seed=seed, top_p=0.5)).token_id for seed in range(400)}
    assert max(drawn) < 1000
    assert max(drawn) > 800


def test_ties_at_the_border_of_a_wide_nucleus_go_to_the_lower_ids() -> None:
    """2000 equal tokens weigh as much as one that is as likely as all of them; three quarters take half of them."""
    logits = [0.0] * 2000 + [math.log(2000.0)]
    drawn = {sample(logits, make_sequence(seed=seed, top_p=0.75)).token_id for seed in range(400)}
    assert 2000 in drawn
    assert 900 < max(drawn - {2000}) < 1001


def test_top_p_keeps_at_least_the_best() -> None:
    assert {sample([0.0, 0.1, 0.0], make_sequence(seed=seed, top_p=1e-9)).token_id for seed in range(32)} == {1}


def test_stop_tokens_are_suppressed_until_min_tokens_exist() -> None:
    spec = {"min_tokens": 2, "stop_token_ids": frozenset({0, 999})}
    produced = [
        sample([9.0, 1.0], make_sequence(prompt=(1,), output=(1,) * length, spec=spec, temperature=0.0)).token_id
        for length in range(4)
    ]
    assert produced == [1, 1, 0, 0]


def test_logit_bias_applies_to_greedy_too() -> None:
    assert sample([3.0, 1.0], make_sequence(temperature=0.0, logit_bias={1: 2.5})).token_id == 1


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = [1.0, 4.0, 2.0, 4.0, 3.0]
    sequence = make_sequence(
        temperature=0.0, repetition_penalty=2.0, logit_bias={4: 9.0}, prompt=(1,), spec={"logprobs": 3}
    )
    token = sample(logits, sequence)
    assert token.token_id == 4
    expected = [value - math.log(sum(map(math.exp, logits))) for value in logits]
    assert token.logprobs is not None
    assert token.logprobs.rank == 3
    assert token.logprobs.logprob == pytest.approx(float(expected[4]), abs=1e-12)
    assert [entry.token_id for entry in token.logprobs.top] == [1, 3, 4]
    assert [entry.logprob for entry in token.logprobs.top] == pytest.approx([float(expected[i]) for i in (1, 3, 4)])


def test_logprobs_only_when_asked() -> None:
    assert sample([1.0, 2.0], make_sequence()).logprobs is None
    token = sample([1.0, 2.0], make_sequence(spec={"logprobs": 0}))
    assert token.logprobs is not None
    assert token.logprobs.top == ()
    more = sample([1.0, 2.0], make_sequence(spec={"logprobs": 20})).logprobs
    assert more is not None
    assert len(more.top) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-45, 1e-38])
def test_no_penalty_leaves_the_range_of_a_float(penalty: float, temperature: float) -> None:
    sequence = make_sequence(temperature=temperature, repetition_penalty=penalty, prompt=(0, 2))
    assert sample([1.0, 3.0, 2.0, -math.inf], sequence).token_id in (0, 2)


def test_masked_tokens_are_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert {sample(logits, make_sequence(seed=seed)).token_id for seed in range(64)} == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(ComputeFailed):
        sample([0.0, bad, 1.0], make_sequence(temperature=temperature))
