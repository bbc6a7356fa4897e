"""What the fused path cannot run, or runs wrongly: refused by name when it was asked for, stock modules otherwise."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from fused_models import FusedOnBlocks, make_fused, tiny_config, tokens
from tiny_models import make_tiny_model
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.errors import InternalError, NotFusible, TransferError
from twinstage.models.adapt import PagedModel
from twinstage.models.choose import load_chosen
from twinstage.models.fused import load, trial, weights
from twinstage.models.fused.load import load_fused
from twinstage.models.fused.memory import Memory
from twinstage.models.resolve import ResolvedModel, default_cache_directory, resolve_model
from twinstage.types import SamplingParameters

pytestmark = pytest.mark.xdist_group("fused")


@pytest.fixture
def resolved(tmp_path: Path) -> ResolvedModel:
    return resolve_model(str(make_tiny_model(tmp_path / "llama", tiny_config("llama"))))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of its own, with the compiled kernels that are there."""
    cache, kernels = tmp_path / "cache", default_cache_directory() / "kernels"
    cache.mkdir()
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(kernels)
    return cache


def _expect_refusal(resolved: ResolvedModel, match: str, *, cache: Path) -> None:
    """Asked for, it is refused; with "auto" it runs as stock modules."""
    with pytest.raises(NotFusible, match=match):
        load_chosen(resolved, weights="fp32", threads=1, cache_directory=cache)
    assert isinstance(load_chosen(resolved, weights="auto", threads=1, cache_directory=cache), PagedModel)


def test_a_model_that_the_spec_misreads_is_refused(
    resolved: ResolvedModel, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_spec = weights.read_spec

    def misread(config: Any) -> Any:
        spec = read_spec(config)
        return replace(spec, inverse_frequencies=spec.inverse_frequencies[::-1])

    monkeypatch.setattr(weights, "read_spec", misread)
    _expect_refusal(resolved, "gives other logits on the fused path", cache=cache)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "stock modules, which are slower" in line]
    assert len(warnings) == 1
    assert "gives other logits" in warnings[0]

    # The verdict is kept, so a prepared start does not try again.
    def no_trial(*_arguments: Any, **_options: Any) -> NoReturn:
        raise AssertionError("the verdict is known")

    monkeypatch.setattr(load, "try_model", no_trial)
    _expect_refusal(resolved, "gives other logits on the fused path", cache=cache)


def test_a_model_that_is_read_rightly_passes_and_is_tried_once(
    resolved: ResolvedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: list[str] = []

    def tried(*arguments: Any, **options: Any) -> Memory:
        memory = trial.try_model(*arguments, **options)
        verdicts.append(trial.read_verdict(memory))
        return memory

    monkeypatch.setattr(load, "try_model", tried)
    for _ in range(2):
        load_fused(resolved, precision="fp32", threads=1, cache_directory=cache).close()
    assert verdicts == [""]


def test_a_comparison_that_did_not_take_place_is_made_up_for_by_the_next_start(
    resolved: ResolvedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short_of_memory(*_arguments: Any) -> NoReturn:
        raise MemoryError("it needs 9.0 GB, 1.0 GB are free")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(trial, "_check_memory", short_of_memory)
        load_fused(resolved, precision="fp32", threads=1, cache_directory=cache).close()
    warnings = [entry for entry in logs if entry["event"] == "the model was not compared with the stock one"]
    assert [entry["error"] for entry in warnings] == ["it needs 9.0 GB, 1.0 GB are free"]

    monkeypatch.setattr(trial, "tolerance", lambda _model: -1.0)
    with pytest.raises(NotFusible, match="gives other logits"):
        load_fused(resolved, precision="fp32", threads=1, cache_directory=cache)


def test_a_failure_of_the_compiler_is_a_refusal(
    resolved: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> NoReturn:
        raise RuntimeError("LLVM ERROR: out of registers")

    monkeypatch.setattr(load, "_compile", fail)
    _expect_refusal(resolved, "kernels cannot be compiled.*RuntimeError: LLVM ERROR", cache=tmp_path / "empty")


def test_a_machine_without_llvm_runs_stock_modules(
    resolved: ResolvedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    _expect_refusal(resolved, "lacks llvmlite", cache=cache)


def test_an_error_of_any_kind_while_packing_is_a_refusal(
    resolved: ResolvedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> NoReturn:
        raise KeyError("rope_theta")

    monkeypatch.setattr(load, "pack_model", fail)
    _expect_refusal(resolved, "weights of llama cannot be packed: KeyError: 'rope_theta'", cache=cache)


def test_a_closed_model_is_an_error_and_has_no_threads(tmp_path: Path) -> None:
    model = make_fused(tmp_path / "llama", tiny_config("llama"), threads=3)
    on_blocks = FusedOnBlocks(model)
    on_blocks.logits(tokens(9))
    model.close()
    model.close()
    with pytest.raises(InternalError, match="the model is closed"):
        on_blocks.logits(tokens(9))


def test_closed_kv_memory_is_an_error(tmp_path: Path) -> None:
    model = make_fused(tmp_path / "llama", tiny_config("llama"))
    on_blocks = FusedOnBlocks(model)
    on_blocks.logits(tokens(9))
    on_blocks.close()
    with pytest.raises(TransferError, match="the KV memory is closed"):
        on_blocks.logits(tokens(9))


@pytest.mark.parametrize("kind", ["stock", "fp32"])
def test_a_closed_llm_is_an_error(resolved: ResolvedModel, kind: str) -> None:
    options = LlmOptions(weights=kind, threads=2, kv_cache_bytes=8 << 20)
    llm = LLM(str(resolved.directory), options)
    assert len(llm.generate([[1, 2]], SamplingParameters(temperature=0.0), max_tokens=1)[0].tokens) == 1
    llm.close()
    llm.close()
    with pytest.raises(InternalError, match="closed"):
        llm.generate([[1, 2]], SamplingParameters(temperature=0.0), max_tokens=1)
