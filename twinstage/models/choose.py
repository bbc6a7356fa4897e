"""Which of the two ways a generative model runs: stock Transformers modules, or the fused path with its own weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinstage.errors import NotFusible
from twinstage.models.load import load_model
from twinstage.models.resolve import ResolvedModel
from twinstage.telemetry.log import get_logger
from twinstage.types import Task

if TYPE_CHECKING:  # each is imported where it is wanted: either takes time
    from twinstage.models.adapt import PagedModel
    from twinstage.models.fused.model import FusedModel

STOCK, AUTO = "stock", "auto"
WEIGHTS = (STOCK, AUTO, "fp32", "int8")

logger = get_logger(__name__)


def load_chosen(
    resolved: ResolvedModel,
    *,
    weights: str,
    dtype: str = "float32",
    kv_dtype: str = AUTO,
    max_model_len: int | None = None,
    threads: int | None = None,
    cache_directory: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> PagedModel | FusedModel:
    """Load `resolved` with `weights`, one of WEIGHTS; "auto" is fp32 where the fused path has the model's shape.

    `kv_dtype` "auto" is bfloat16 or float16 with weights of 8 bits, whichever this machine multiplies fastest, and else
    the number format of the weights.
    Raises ConfigError, and ModelError that names the reason when "fp32" or "int8" was asked for and cannot be.
    """
    if weights != STOCK and resolved.task is Task.GENERATE:
        from twinstage.models.fused.load import load_fused

        precision = "fp32" if weights == AUTO else weights
        try:
            return load_fused(
                resolved,
                precision=precision,
                kv_dtype=None if kv_dtype == AUTO else kv_dtype,
                threads=threads,
                max_model_len=max_model_len,
                cache_directory=cache_directory,
                progress=progress,
            )
        except NotFusible as error:
            if weights != AUTO:
                raise
            logger.warning("stock modules, which are slower", reason=str(error))
    return load_model(
        resolved,
        max_model_len=max_model_len,
        dtype=dtype,
        kv_dtype=None if kv_dtype == AUTO else kv_dtype,
        threads=threads,
        progress=progress,
    )
