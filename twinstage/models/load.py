"""Load a generative model for serving. The cheap checks come first, before torch and Transformers are imported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinstage.errors import ConfigError, ModelError
from twinstage.kv.layout import DTYPE_BYTES
from twinstage.models.config_files import effective_max_model_len, read_json_object
from twinstage.models.resolve import ResolvedModel
from twinstage.types import Task

if TYPE_CHECKING:
    from twinstage.models.adapt import PagedModel


def load_model(
    resolved: ResolvedModel,
    *,
    max_model_len: int | None = None,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> PagedModel:
    """Load the weights of `resolved` and make the model run on paged KV.

    `kv_dtype` None is `dtype`. `max_model_len` may only lower the model's limit. `threads` is the number of threads
    that compute, for the whole process; None leaves it as it is. Raises ConfigError for wrong arguments and
    ModelError for a model that cannot be loaded or adapted.
    """
    report = progress or (lambda _message: None)
    if resolved.task is not Task.GENERATE:
        raise ModelError(f"{resolved.name} is for {resolved.task.value} and cannot generate")
    kv_dtype = kv_dtype or dtype
    for name, value in (("dtype", dtype), ("KV dtype", kv_dtype)):
        if value not in DTYPE_BYTES:
            raise ConfigError(f"{name} {value!r} is not one of {', '.join(DTYPE_BYTES)}")
    limit = effective_max_model_len(read_json_object(resolved.directory / "config.json"), max_model_len)
    report("importing torch and Transformers")
    import torch

    from twinstage.models.adapt import adapt_model

    if threads is not None:
        torch.set_num_threads(threads)
    report(f"loading the weights of {resolved.name}")
    model = load_stock_model(resolved.directory, getattr(torch, dtype))
    report(f"trying {resolved.name} on paged KV")
    return adapt_model(model, kv_dtype=kv_dtype, max_model_len=limit, fingerprint=resolved.fingerprint)


def load_stock_model(directory: Path, dtype: Any) -> Any:
    """The model that Transformers makes of `directory`, with weights of a torch dtype. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM
    with quiet_loading(directory):
        model, info = model_class.from_pretrained(
            directory, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    check_loading(info, directory)
    return model.eval()


def check_loading(info: Any, directory: Path) -> None:
    """Raise ModelError when parameters were not in the files (Transformers would make up random ones)."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"the weights in {directory} lack {len(missing)} parameters, among them {missing[0]}")


@contextlib.contextmanager
def quiet_loading(directory: Path) -> Iterator[None]:
    """Load something with Transformers: without its progress bars, and with its errors as ModelError."""
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError, SafetensorError) as error:
        raise ModelError(f"the model in {directory} cannot be loaded: {error}") from error
    finally:
        if was_enabled:
            logging.enable_progress_bar()
