"""What a precision costs: next-token distributions on real text, against stock Transformers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.agreement import Agreement, checksum, sample_text, windows_of
from bench.engines.client import EngineFailed, EngineProcess
from bench.peers import PeerMissing
from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from twinstage.models.choose import AUTO, STOCK, WEIGHTS
from twinstage.models.resolve import resolve_model

_WINDOW = 256  # tokens; each begins without context
_WINDOWS, _QUICK_WINDOWS = 12, 2
_AT_ONCE = 2  # windows whose logits are on disk at once, 100 MB each for a vocabulary of 49,152 and float32
_DIVERGENCE, _AGREEMENT = Target.at_most(0.006), Target.at_least(96.0)


def measure(context: Context) -> RowResult:
    from tokenizers import Tokenizer

    text = sample_text()
    tokenizer = Tokenizer.from_file(str(resolve_model("demo").directory / "tokenizer.json"))
    count = _QUICK_WINDOWS if context.quick else _WINDOWS
    windows = windows_of(tokenizer.encode(text, add_special_tokens=False).ids, count=count, length=_WINDOW)
    notes = [
        f"{count * _WINDOW} tokens in windows of {_WINDOW}; text of Python's language reference, {checksum(text)}."
    ]
    reference = context.engine("transformers")
    engines = _engines(context, notes)
    found = {engine.name: Agreement() for engine in engines}
    for start in range(0, count, _AT_ONCE):
        some = windows[start : start + _AT_ONCE]
        expected = _logits(reference, some, context.directory / "reference.npy")
        for engine in engines:
            found[engine.name].add(expected, _logits(engine, some, context.directory / "engine.npy"))
        context.progress(f"{start + len(some)} of {count} windows compared")
    versions = {name: version for engine in (reference, *engines) for name, version in engine.versions.items()}
    return RowResult(
        measurements=[entry for name, one in found.items() for entry in _measurements(name, one)],
        comparisons=[entry for name, one in found.items() for entry in _comparisons(name, one)],
        notes=notes,
        versions=versions,
    )


def _engines(context: Context, notes: list[str]) -> list[EngineProcess]:
    """Ours in every precision that this machine can compute, and llama.cpp."""
    engines = []
    for weights in WEIGHTS:
        if weights not in (STOCK, AUTO):
            try:
                engines.append(_own(context, weights=weights))
            except EngineFailed as error:
                notes.append(f"Without {weights}: {error}")
    if context.peers is not None:
        try:
            engines.append(context.engine("llama"))
        except (EngineFailed, PeerMissing) as error:
            notes.append(f"Without llama.cpp: {error}")
    return engines


def _own(context: Context, **options: str) -> EngineProcess:
    values = {name: f"{name}={value}" for name, value in options.items()}
    return context.engine("twinstage_logits", model="demo", threads=str(context.engines.threads), **values)


def _logits(engine: EngineProcess, windows: list[list[int]], path: Path) -> np.ndarray:
    """`[tokens of all windows, vocabulary]`."""
    engine.call("logits", windows=windows, path=str(path), timeout_s=300.0)
    logits: np.ndarray = np.load(path)
    path.unlink()
    return logits.reshape(-1, logits.shape[-1])


def _measurements(name: str, agreement: Agreement) -> list[Measurement]:
    return [
        Measurement(case="text", engine=name, quantity="next-token KL", unit="nats", values=[agreement.divergence]),
        Measurement(case="text", engine=name, quantity="top-1", unit="%", values=[agreement.top_agreement_percent]),
    ]


def _comparisons(name: str, agreement: Agreement) -> list[Comparison]:
    """Others are there to be compared with: they have no target."""
    ours = name.startswith("Twinstage")
    return [
        Comparison(
            case="text",
            what=f"next-token KL of {name} from fp32",
            values=[agreement.divergence],
            unit="nats",
            target=_DIVERGENCE if ours else None,
        ),
        Comparison(
            case="text",
            what=f"top-1 agreement of {name} with fp32",
            values=[agreement.top_agreement_percent],
            unit="%",
            target=_AGREEMENT if ours else None,
        ),
    ]


ROW = Row(
    name="quality", title="Quality of the precisions", measure=measure, limit_s=600, quick=False, peers=("llama",)
)
