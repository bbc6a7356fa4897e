"""From settings and a model's files to what a worker computes with, and to what it says of itself.

Everything here runs once, at the start, and reports what takes time to the log.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twinstage.engine.core import EngineCore
from twinstage.engine.open_speculation import OpenSpeculation, Target, open_speculation
from twinstage.engine.output import EngineConfig
from twinstage.engine.runner import ChosenRunner, choose_runner
from twinstage.engine.speculation import SpeculationOptions
from twinstage.errors import ConfigError, TaskNotSupported
from twinstage.grammar.compiled import CompiledGrammars
from twinstage.grammar.matcher import SequenceMatcher
from twinstage.hosting.found_model import FoundModel, report_progress
from twinstage.hosting.settings import WorkerSettings
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.layout import KvLayout
from twinstage.kv.memory import BlockMemory
from twinstage.kv.prefix_index import PrefixHasher
from twinstage.models.choose import load_chosen
from twinstage.models.describe import describe_model
from twinstage.telemetry.log import get_logger
from twinstage.types import Role, SequenceSpec, WorkerDescription

if TYPE_CHECKING:
    from twinstage.models.adapt import PagedModel
    from twinstage.models.fused.model import FusedModel
    from twinstage.models.pooling.model import PoolingModel

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What a generative worker computes with; `close` when the engine's thread and all channels have ended."""

    core: EngineCore
    pool: BlockPool
    layout: KvLayout
    memory: BlockMemory
    hasher: PrefixHasher | None = None  # names blocks for the prefix cache; None: there is none
    grammars: CompiledGrammars | None = None  # of structured output; None: there is no tokenizer
    end_model: Callable[[], None] = lambda: None  # ends the threads of the model
    end_speculation: Callable[[], None] = lambda: None  # and what guesses ahead for it

    def close(self) -> int:
        """Check the pool's books and give the memory back; returns the number of leaked blocks.

        Raises IntegrityError when the books of the pool do not balance.
        """
        self.pool.check_integrity()
        if self.hasher is not None:
            lookups = self.pool.prefix_lookups
            logger.info(
                "prefix cache",
                looked_up_blocks=lookups.wanted,
                found_blocks=lookups.found,
                cached_blocks=self.pool.num_cached,
            )
        leaked = self.pool.num_blocks - self.pool.num_free
        if leaked:
            logger.error("kv blocks leaked", owners=self.pool.owners())
        self.end_model()
        self.end_speculation()
        if self.grammars is not None:
            self.grammars.close()
        self.memory.close()
        return leaked

    async def matcher_for(self, spec: SequenceSpec) -> SequenceMatcher | None:
        """The matcher of a sequence's constraint, which has taken its resumed tokens; None without a constraint.

        Raises InvalidRequest, and Overloaded when it takes too long.
        """
        if spec.constraint is None:
            return None
        if self.grammars is None:
            raise TaskNotSupported("this worker has no tokenizer, which structured output needs")
        return await self.grammars.start(spec.constraint, spec.resumed_token_ids)


def build_engine(
    settings: WorkerSettings,
    found: FoundModel,
    *,
    role: Role,
    protocol_version: int,
    speculation: SpeculationOptions | None = None,
) -> tuple[EngineParts, WorkerDescription]:
    """Load a generative model and build its engine. Raises ConfigError or ModelError."""
    model = _load_generator(settings, found)
    layout = model.kv_layout(settings.block_size)
    memory = BlockMemory.create(num_blocks=_num_blocks(settings, layout), block_bytes=layout.block_bytes)
    chosen = choose_runner(
        model, layout, memory, deterministic=settings.deterministic, chunk_size=settings.max_tokens_per_step
    )
    if chosen.numerics:
        logger.info("deterministic", numerics=chosen.numerics)
    config = _engine_config(
        settings,
        chosen,
        role=role,
        max_model_len=_servable_length(model.max_model_len, layout, memory.num_blocks),
    )
    guesses = None
    if speculation is not None:
        guesses = open_speculation(speculation, _target(settings, found, model, config))
    parts = _assemble(settings, found, chosen, config, layout=layout, memory=memory, guesses=guesses)
    description = _describe(
        settings,
        found,
        role=role,
        protocol_version=protocol_version,
        max_model_len=config.max_model_len,
        layout=layout,
        num_blocks=memory.num_blocks,
        numerics=chosen.numerics,
    )
    return replace(parts, end_model=model.close), description


def _load_generator(settings: WorkerSettings, found: FoundModel) -> PagedModel | FusedModel:
    if settings.dtype != "float32":
        raise ConfigError(f"--dtype {settings.dtype} is for embedding models; {found.resolved.name} generates")
    return load_chosen(
        found.resolved,
        weights=settings.weights,
        cache_directory=settings.cache_directory,
        max_model_len=settings.max_model_len,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        threads=settings.compute_threads,
        progress=report_progress,
    )


def _engine_config(settings: WorkerSettings, chosen: ChosenRunner, *, role: Role, max_model_len: int) -> EngineConfig:
    return EngineConfig(
        max_num_sequences=settings.max_num_sequences,
        max_tokens_per_step=settings.max_tokens_per_step,
        max_model_len=max_model_len,
        block_size=settings.block_size,
        hold_after_first_token=role is Role.PREFILL,
        fixed_passes=chosen.fixed_passes,
    )


def _assemble(
    settings: WorkerSettings,
    found: FoundModel,
    chosen: ChosenRunner,
    config: EngineConfig,
    *,
    layout: KvLayout,
    memory: BlockMemory,
    guesses: OpenSpeculation | None,
) -> EngineParts:
    """An engine over `memory`, with its pool and its prefix cache. Ending the model is left to the caller."""
    pool = BlockPool(memory.num_blocks)
    hasher = PrefixHasher(layout.fingerprint, block_size=layout.block_size) if settings.prefix_cache else None
    speculation = guesses.speculation if guesses is not None else None
    parts = EngineParts(
        core=EngineCore(chosen.runner, pool, config, hasher=hasher, speculation=speculation),
        pool=pool,
        layout=layout,
        memory=memory,
        hasher=hasher,
        grammars=CompiledGrammars(found.bundle),
    )
    return parts if guesses is None else replace(parts, end_speculation=guesses.close)


def _target(
    settings: WorkerSettings, found: FoundModel, model: PagedModel | FusedModel, config: EngineConfig
) -> Target:
    """What guesses are made for."""
    return Target(
        name=found.resolved.name,
        bundle=found.bundle,
        vocab_size=model.vocab_size,
        weight_bytes=model.weight_bytes,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        fixed_passes=config.fixed_passes,
        threads=settings.compute_threads,
        cache_directory=settings.cache_directory,
        progress=report_progress,
    )


def build_encoder(
    settings: WorkerSettings, found: FoundModel, *, protocol_version: int
) -> tuple[PoolingModel, WorkerDescription]:
    """Load a pooling model, which needs no KV memory. Raises ConfigError or ModelError."""
    from twinstage.models.pooling.load import load_pooling

    encoder = load_pooling(
        found.resolved,
        threads=settings.compute_threads,
        max_model_len=settings.max_model_len,
        weights=settings.weights,
        dtype=settings.dtype,
        cache_directory=settings.cache_directory,
    )
    description = _describe(
        settings,
        found,
        role=Role.PREFILL,
        protocol_version=protocol_version,
        max_model_len=encoder.facts.max_model_len,
        embedding_dimensions=encoder.facts.dimensions,
        token_dimensions=encoder.facts.token_dimensions,
        labels=encoder.facts.labels,
    )
    return encoder, description


def _num_blocks(settings: WorkerSettings, layout: KvLayout) -> int:
    num_blocks = settings.kv_cache_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"--kv-cache-bytes {settings.kv_cache_bytes} holds no KV block: one has {layout.block_bytes} bytes"
        )
    return int(num_blocks)


def _servable_length(max_model_len: int, layout: KvLayout, num_blocks: int) -> int:
    """The longest sequence in tokens that the pool can hold: one that outgrows it could only fail in mid-stream."""
    pool_tokens = num_blocks * layout.block_size
    if pool_tokens < max_model_len:
        logger.warning(
            "sequences are limited to what the KV pool holds; raise --kv-cache-bytes for longer ones",
            max_model_len=pool_tokens,
            without_this_limit=max_model_len,
        )
    return min(max_model_len, pool_tokens)


def _describe(
    settings: WorkerSettings,
    found: FoundModel,
    *,
    role: Role,
    protocol_version: int,
    max_model_len: int,
    layout: KvLayout | None = None,
    num_blocks: int = 0,
    embedding_dimensions: int = 0,
    token_dimensions: int = 0,
    labels: tuple[str, ...] = (),
    numerics: str = "",
) -> WorkerDescription:
    return WorkerDescription(
        worker_id=settings.identity(role),
        epoch=secrets.randbits(63),
        role=role,
        protocol_version=protocol_version,
        model=describe_model(
            found.resolved,
            max_model_len=max_model_len,
            eos_token_ids=found.bundle.eos_token_ids,
            tokenizer_fingerprint=found.bundle.fingerprint,
            served_model_name=settings.served_model_name,
            embedding_dimensions=embedding_dimensions,
            token_dimensions=token_dimensions,
            labels=labels,
        ),
        kv_layout_fingerprint=layout.fingerprint if layout is not None else "",
        total_kv_blocks=num_blocks,
        kv_block_size=layout.block_size if layout is not None else 0,
        kv_block_bytes=layout.block_bytes if layout is not None else 0,
        max_num_sequences=settings.max_num_sequences,
        transports=settings.announced_transports if layout is not None else (),
        numerics=numerics,
    )
