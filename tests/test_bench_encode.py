"""What the rows on embedding make of their values."""

from __future__ import annotations

import pytest

from bench.results import Target
from bench.rows import encode, encode_beside


def test_every_precision_is_compared_with_the_peer_and_with_float32() -> None:
    seconds = {("many", "sentence-transformers"): [4.0, 6.0], ("alone", "sentence-transformers"): [0.02, 0.03]}
    for precision, (many, alone) in {"float32": (2.0, 0.01), "bfloat16": (1.0, 0.02), "int8": (0.5, 0.005)}.items():
        seconds |= {("many", precision): [many, many], ("alone", precision): [alone, alone]}
    result = encode.result_of(seconds, 100, {"bfloat16": 0.9999, "int8": 0.99}, notes=[])
    rates = {entry.engine: list(entry.values) for entry in result.measurements if entry.quantity == "throughput"}
    assert rates["Twinstage int8"] == [200.0, 200.0]
    found = {entry.what: (list(entry.values), entry.target, entry.is_met) for entry in result.comparisons}
    peer = "sentence-transformers"
    assert found[f"throughput, Twinstage float32 / {peer}"] == ([2.0, 3.0], Target.at_least(1.6), True)
    assert found[f"throughput, Twinstage int8 / {peer}"] == ([8.0, 12.0], Target.at_least(2.0), True)
    assert found[f"p50, Twinstage bfloat16 / {peer}"][0] == pytest.approx([1.0, 2 / 3])
    assert found["least cosine, Twinstage int8 to float32"] == ([0.99], Target.at_least(0.999), False)


def test_gaps_beside_encoding_are_compared_round_by_round() -> None:
    rounds = [
        encode_beside.Round(quiet=[0.02] * 99 + [0.04], busy=[0.03] * 100, num_sentences=50, encoding_s=2.0),
        encode_beside.Round(quiet=[0.02] * 100, busy=[0.03] * 100, num_sentences=50, encoding_s=1.0),
    ]
    result = encode_beside.result_of(rounds)
    assert [list(entry.values) for entry in result.measurements][-1] == [25.0, 50.0]
    (comparison,) = result.comparisons
    assert comparison.case.startswith("4 streams, 100 sentences")
    assert comparison.values[1] == pytest.approx(1.5)
    assert not comparison.is_met
