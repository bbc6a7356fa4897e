"""The measure of a precision's quality."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.agreement import Agreement, checksum, sample_text, windows_of
from bench.rows import quality

REFERENCE = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))


def test_divergence_and_agreement_of_known_distributions() -> None:
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32)) + np.float32(5)  # logits may be shifted
    agreement = Agreement()
    agreement.add(REFERENCE[:1], other[:1])
    agreement.add(REFERENCE[1:], other[1:])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert agreement.divergence == pytest.approx(expected / 2, abs=1e-6)
    assert agreement.top_agreement_percent == 50
    with pytest.raises(ValueError, match=r"\(1, 3\)"):
        agreement.add(REFERENCE, other[:1])


def test_the_text_is_real_and_long_enough() -> None:
    text = sample_text()
    assert len(text) > 12_000
    assert "name is bound" in " ".join(text.split())
    assert len(checksum(text)) == 12
    assert checksum(text) != checksum(text + " ")


def test_windows() -> None:
    assert windows_of([1, 2, 3, 4, 5], count=2, length=2) == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="has 5 tokens, 6 are needed"):
        windows_of([1, 2, 3, 4, 5], count=3, length=2)


class _Engine:
    def __init__(self, name: str, shift: float) -> None:
        self.name = name
        self.versions = {name: "1"}
        self._shift = shift

    def call(self, command: str, *, windows: list[list[int]], path: str, timeout_s: float) -> dict[str, Any]:
        assert command == "logits"
        logits = np.zeros((len(windows), len(windows[0]), 4), np.float32)
        logits[..., 1] = 1 - self._shift
        logits[..., 2] = self._shift * 3
        np.save(path, logits)
        return {}


class _Context:
    """Stands in for the processes of a row."""

    quick = True
    peers = object()

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines = type("Engines", (), {"threads": 1})()
        self.started: list[str] = []

    def progress(self, _text: str) -> None:
        pass

    def engine(self, name: str, **options: str) -> _Engine:
        self.started.append(options.get("weights", name))
        if name != "twinstage_logits":
            return _Engine(name, 0.5 if name == "llama" else 0.0)
        return _Engine("Twinstage " + options["weights"], 0.01 if "fp32" in options["weights"] else 1.0)


@pytest.mark.real_model
def test_the_row_holds_every_precision_of_ours_against_the_targets(tmp_path: Path) -> None:
    context = _Context(tmp_path)
    result = quality.measure(context)  # type: ignore[arg-type]
    assert context.started[0] == "transformers"
    assert {"weights=fp32", "weights=int8", "llama"} <= set(context.started)
    met = {comparison.what: comparison.is_met for comparison in result.comparisons}
    assert met["next-token KL of Twinstage weights=fp32 from fp32"] is True
    assert met["top-1 agreement of Twinstage weights=fp32 with fp32"] is True
    assert met["next-token KL of Twinstage weights=int8 from fp32"] is False
    assert met["top-1 agreement of Twinstage weights=int8 with fp32"] is False
    assert met["next-token KL of llama from fp32"] is None
    assert not list(tmp_path.iterdir())  # 100 MB a window are not left behind
