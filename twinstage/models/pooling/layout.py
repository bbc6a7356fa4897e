"""What a pooling model's files ask for, read without torch: the modules of sentence-transformers, the activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstage.errors import ModelError
from twinstage.models.config_files import read_json_list, read_optional_json_object

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
    kinds = [module.kind for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or not _AFTER_POOLING.issuperset(kinds[2:]):
        served = f"Transformer, Pooling, then any of {', '.join(sorted(_AFTER_POOLING))}"
        raise ModelError(f"{directory} is made of {', '.join(kinds)}; what can be served is {served}")
    _check_transformer(modules[0], directory)
    for module in modules[2:]:
        names = {module.settings.get(key) for key in ("module_input_name", "module_output_name")}
        if names - {None, "sentence_embedding"}:
            raise ModelError(f"{module.directory} works on {', '.join(map(str, names))}, not on sentence_embedding")
    return Pipeline(pooling_modes=_pooling_modes(modules[1]), after_pooling=tuple(modules[2:]))


def yes_no_ids(directory: Path) -> tuple[int, int | None] | None:
    """The tokens that a generative reranker's modules.json names for yes and no; None when it names none.

    Raises ModelError for a CrossEncoder of other modules than one Transformer, and maybe LogitScore.
    """
    if not (directory / "modules.json").is_file():
        return None
    modules = _read_modules(directory)
    kinds = [module.kind for module in modules]
    if kinds not in (["Transformer"], ["Transformer", "LogitScore"]):
        raise ModelError(f"{directory} is made of {', '.join(kinds)}; scorers are Transformer, or that and LogitScore")
    _check_transformer(modules[0], directory)
    if len(modules) == 1:
        return None
    settings = modules[1].settings
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
    modules = []
    for entry in read_json_list(directory / "modules.json"):
        kind, path = str(entry.get("type", "")).rpartition(".")[2], directory / str(entry.get("path", ""))
        settings = read_optional_json_object(path / "config.json") if kind != "Transformer" else {}
        modules.append(ModuleFiles(kind=kind, directory=path, settings=settings))
    return modules


def _check_transformer(module: ModuleFiles, directory: Path) -> None:
    if module.directory != directory:
        raise ModelError(f"{directory} keeps its transformer in {module.directory.name}; move its files up by one")


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
