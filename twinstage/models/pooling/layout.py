"""What a pooling model's files ask for, read without torch: the modules of sentence-transformers, the activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstage.errors import ModelError
from twinstage.models.config_files import read_modules, read_optional_json_object

# In the order in which sentence-transformers joins them when its older format names several by flags.
_LEGACY_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = tuple(_LEGACY_FLAGS.values())
_AFTER_POOLING = frozenset({"Dense", "Normalize", "LayerNorm", "Dropout"})
_VECTOR = "sentence_embedding"  # what Pooling makes, by the name that modules use for it
_SETTINGS_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFiles:
    """One module of modules.json: its class, without the package, and where its files lie."""

    kind: str
    directory: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How an embedder makes a vector of hidden states: the modes of pooling, joined, and what follows them."""

    pooling_modes: tuple[str, ...]
    after_pooling: tuple[ModuleFiles, ...]

    @property
    def normalizes(self) -> bool:
        """Whether the last step scales vectors to length 1 anyway."""
        return bool(self.after_pooling) and self.after_pooling[-1].kind == "Normalize"


def read_pipeline(directory: Path) -> Pipeline:
    """Read an embedder's modules.json. Raises ModelError for what is not Transformer, Pooling and known modules."""
    modules = _read_modules(directory)
    if not _is_pooling(modules):
        served = f"Transformer, Pooling, then any of {', '.join(sorted(_AFTER_POOLING))}"
        kinds = ", ".join(module.kind for module in modules)
        raise ModelError(f"{directory} is made of {kinds}; what can be served is {served}")
    return _pipeline(modules, result=_VECTOR)


def read_score_pipeline(directory: Path) -> Pipeline | None:
    """The same of a scorer that makes its score of a vector; None of another one. Raises ModelError."""
    modules = _read_modules(directory)
    return _pipeline(modules, result="scores") if _is_pooling(modules) else None


def _is_pooling(modules: Sequence[ModuleFiles]) -> bool:
    kinds = [module.kind for module in modules]
    return kinds[:2] == ["Transformer", "Pooling"] and _AFTER_POOLING.issuperset(kinds[2:])


def _pipeline(modules: Sequence[ModuleFiles], *, result: str) -> Pipeline:
    """Each module works on what the one before it made, and the last one makes the `result`."""
    made = _VECTOR
    for module in modules[2:]:
        wanted = module.settings.get("module_input_name") or _VECTOR
        if wanted != made:
            raise ModelError(f"{module.directory} works on {wanted}, where the module before it makes {made}")
        made = module.settings.get("module_output_name") or wanted
    if made != result:
        raise ModelError(f"{modules[-1].directory} makes {made}, and {result} is wanted")
    return Pipeline(pooling_modes=_pooling_modes(modules[1]), after_pooling=tuple(modules[2:]))


def yes_no_ids(directory: Path) -> tuple[int, int | None] | None:
    """The tokens that a generative reranker's modules.json names for yes and no; None when it names none.

    Raises ModelError for a CrossEncoder of other modules than one Transformer, and maybe LogitScore.
    """
    modules = _read_modules(directory)
    kinds = [module.kind for module in modules]
    if kinds not in ([], ["Transformer"], ["Transformer", "LogitScore"]):
        served = "Transformer, that and LogitScore, or that and Pooling and Dense"
        raise ModelError(f"{directory} is made of {', '.join(kinds)}; scorers are {served}")
    if len(modules) < 2:
        return None
    settings = modules[1].settings
    if not isinstance(settings.get("true_token_id"), int):
        raise ModelError(f"{modules[1].directory} names no true_token_id")
    return int(settings["true_token_id"]), settings.get("false_token_id")


def score_activation(directory: Path, config: Mapping[str, Any]) -> str:
    """Dotted name of what is applied to a scorer's logit, where CrossEncoder looks for it; a sigmoid by default."""
    nested = config.get("sentence_transformers")
    names = (
        read_optional_json_object(directory / _SETTINGS_FILE).get("activation_fn"),
        nested.get("activation_fn") if isinstance(nested, dict) else None,
        config.get("sbert_ce_default_activation_function"),
    )
    return next((name for name in names if isinstance(name, str) and name.startswith("torch.")), "torch.nn.Sigmoid")


def _read_modules(directory: Path) -> list[ModuleFiles]:
    return [
        ModuleFiles(kind=kind, directory=path, settings=_settings(path) if kind != "Transformer" else {})
        for kind, path in read_modules(directory)
    ]


def _settings(path: Path) -> dict[str, Any]:
    return read_optional_json_object(path / "config.json")


def _pooling_modes(module: ModuleFiles) -> tuple[str, ...]:
    """The ways of pooling that are asked for; sentence-transformers' default is mean."""
    mode = module.settings.get("pooling_mode")
    if mode is None:
        mode = [name for flag, name in _LEGACY_FLAGS.items() if module.settings.get(flag)] or "mean"
    modes = (mode,) if isinstance(mode, str) else tuple(map(str, mode))
    unknown = [name for name in modes if name not in POOLING_MODES]
    if unknown or not modes:
        raise ModelError(f"{module.directory} asks for {' and '.join(unknown) or 'no'} pooling, which is not known")
    return modes
