"""From options of speculative decoding to what an engine guesses with, a draft model loaded where one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinstage.engine.draft_model import ModelDrafter
from twinstage.engine.ngram import NgramDrafter
from twinstage.engine.runner import make_runner
from twinstage.engine.speculation import Speculation, SpeculationOptions
from twinstage.errors import ConfigError, ModelError
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.memory import BlockMemory
from twinstage.models.choose import AUTO, load_chosen
from twinstage.models.resolve import ResolvedModel, resolve_model
from twinstage.telemetry.log import get_logger
from twinstage.text.bundle import TokenizerBundle, read_bundle
from twinstage.text.same_tokens import check_same_tokens
from twinstage.types import Task

if TYPE_CHECKING:
    from twinstage.models.adapt import PagedModel
    from twinstage.models.fused.model import FusedModel

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the model that checks is, and how it was loaded; lengths in tokens."""

    name: str
    bundle: TokenizerBundle
    vocab_size: int
    weight_bytes: int
    max_model_len: int
    block_size: int
    fixed_passes: bool
    threads: int | None
    cache_directory: Path | None
    progress: Callable[[str], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSpeculation:
    """The guesses of an engine, and what gives back the memory and threads that they take."""

    speculation: Speculation
    close: Callable[[], None] = lambda: None


def open_speculation(options: SpeculationOptions, target: Target) -> OpenSpeculation:
    """Load what is needed. Raises ConfigError and ModelError."""
    if target.fixed_passes:
        raise ConfigError(
            "speculative decoding does not go with deterministic mode on stock modules, which computes output tokens "
            "one by one: choose weights fp32 or int8, where the model's shape allows them"
        )
    logger.info("guessing tokens ahead", method=options.method, at_most=options.num_tokens)
    if options.method == "ngram":
        drafter = NgramDrafter(longest=options.ngram_max, shortest=options.ngram_min)
        return OpenSpeculation(speculation=_speculation(drafter, options, target))
    return _open_draft_model(options, target)


def _open_draft_model(options: SpeculationOptions, target: Target) -> OpenSpeculation:
    resolved = resolve_model(
        options.draft_model, options.draft_revision, cache_directory=target.cache_directory, progress=target.progress
    )
    if resolved.task is not Task.GENERATE:
        raise ConfigError(f"the draft model {resolved.name} is an embedding model")
    check_same_tokens(target.bundle, read_bundle(resolved.directory), names=(target.name, resolved.name))
    model = _load(options, target, resolved)
    layout = model.kv_layout(target.block_size)
    num_blocks = options.draft_kv_cache_bytes // layout.block_bytes
    if num_blocks < 1:
        model.close()
        raise ConfigError(f"draft_kv_cache_bytes must be at least {layout.block_bytes}, the size of one block")
    memory = BlockMemory.create(num_blocks=num_blocks, block_bytes=layout.block_bytes)
    # A step reads all weights once, and waits for that mostly.
    cost = model.weight_bytes / target.weight_bytes if options.draft_cost is None else options.draft_cost
    drafter = ModelDrafter(
        make_runner(model, layout, memory),
        BlockPool(num_blocks),
        block_size=target.block_size,
        num_tokens=min(model.vocab_size, target.vocab_size),
        max_model_len=model.max_model_len,
        cost=cost,
    )

    def close() -> None:
        model.close()
        memory.close()

    return OpenSpeculation(speculation=_speculation(drafter, options, target), close=close)


def _load(options: SpeculationOptions, target: Target, resolved: ResolvedModel) -> PagedModel | FusedModel:
    """The draft model; by default in 8 bits where its shape allows that, as what it says is checked anyway."""

    def load(weights: str) -> PagedModel | FusedModel:
        return load_chosen(
            resolved,
            weights=weights,
            threads=target.threads,
            cache_directory=target.cache_directory,
            progress=target.progress,
        )

    if options.draft_weights != AUTO:
        return load(options.draft_weights)
    try:
        return load("int8")
    except ModelError as error:
        logger.info("the draft model is not run in 8 bits", reason=str(error))
        return load(AUTO)


def _speculation(drafter: NgramDrafter | ModelDrafter, options: SpeculationOptions, target: Target) -> Speculation:
    return Speculation(drafter, options, block_size=target.block_size, max_model_len=target.max_model_len)
