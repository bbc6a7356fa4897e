"""The tokenizer bundle: all that the router must know of a model to turn text into token ids and back.

A worker reads it from the model's directory and the router asks for it by fingerprint, so the router needs no model
files. It travels as one JSON document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from twinstage.errors import ModelError
from twinstage.models.config_files import read_modules, transformer_directory

GenerationDefault = float | int | bool

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")  # the last two as negative distances

_GENERATION_KEYS = (
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "min_new_tokens",
)
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Transformers writes a number around 1e30 where a tokenizer has no limit of its own.
_NO_LIMIT = 10**9


@dataclass(frozen=True, kw_only=True)
class TokenizerBundle:
    """Tokenizer, chat template and generation defaults of one model.

    `generation_defaults` holds the fields of generation_config.json that concern sampling, under their own names.
    `max_input_tokens` is the limit of an embedding model's inputs, special tokens included; None for other models.
    `lower_case` asks for lower-casing before tokenizing (sentence-transformers' own setting, outside the tokenizer).
    `score_template` is there for rerankers that generate: `score_template.tokenize_pair` puts a pair into it. For other
    scorers the tokenizer itself makes one input of a pair, which `tokenize_pair` does as well.
    `prompts` are texts that an embedding model wants before its inputs, by name; `default_prompt_name` names the one
    that is put there when a request names none. Without `pools_prompt` the prompt's tokens are left out of the pooling.
    `similarity` is how two vectors of an embedding model are compared: one of SIMILARITIES.
    """

    tokenizer_json: str = field(repr=False)
    chat_template: str | None = field(default=None, repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, GenerationDefault] = field(default_factory=dict)
    max_input_tokens: int | None = None
    lower_case: bool = False
    score_template: str | None = field(default=None, repr=False)
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    pools_prompt: bool = True
    similarity: str = "cosine"

    def to_bytes(self) -> bytes:
        """Serialize; equal bundles give equal bytes."""
        document = {name: dict(value) if isinstance(value, Mapping) else value for name, value in asdict(self).items()}
        return json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> TokenizerBundle:
        """Read what `to_bytes` wrote. Raises ModelError when it is something else."""
        try:
            document = json.loads(data)
            document["eos_token_ids"] = tuple(document["eos_token_ids"])
            return TokenizerBundle(**document)
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(f"this is not a tokenizer bundle: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the bundle's content: 32 hexadecimal digits."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:32]


def read_bundle(directory: Path, *, tokenizer_directory: Path | None = None) -> TokenizerBundle:
    """Read a bundle from the files beside a model; tokenizer and chat template from another directory if it is given.

    Raises ModelError when there is no usable tokenizer.json.
    """
    home = transformer_directory(directory)
    text_directory = tokenizer_directory or home
    tokenizer_path = text_directory / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ModelError(
            f"{text_directory} has no tokenizer.json; convert the tokenizer with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) and put the file there"
        )
    try:
        tokenizer_json = tokenizer_path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # tokenizers raises plain Exception for a malformed file
        raise ModelError(f"{tokenizer_path} cannot be read: {error}; fetch the file again") from error
    tokenizer_config = _read_json(text_directory / "tokenizer_config.json")
    generation_config = _read_json(directory / "generation_config.json")
    model_config = _read_json(home / "config.json")
    special_tokens = _special_tokens(_read_json(text_directory / "special_tokens_map.json"), tokenizer_config)
    pooling_config = _read_json(home / "sentence_bert_config.json")
    return TokenizerBundle(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(text_directory, tokenizer_config),
        special_tokens=special_tokens,
        eos_token_ids=_eos_token_ids(tokenizer, generation_config, model_config, special_tokens),
        generation_defaults=_generation_defaults(generation_config),
        max_input_tokens=_max_input_tokens(directory, pooling_config, tokenizer_config, model_config),
        lower_case=pooling_config.get("do_lower_case") is True,
        **_prompts(directory),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one when the file is absent. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch the file again") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds no JSON object; fetch the file again")
    return document


def _special_tokens(*documents: Mapping[str, Any]) -> dict[str, str]:
    """Names and spellings of the special tokens; later documents win."""
    tokens: dict[str, str] = {}
    for document in documents:
        for name in _SPECIAL_TOKEN_NAMES:
            value = document.get(name)
            spelling = value.get("content") if isinstance(value, dict) else value
            if isinstance(spelling, str):
                tokens[name] = spelling
    return tokens


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The model's chat template: a file of its own wins over the tokenizer's configuration; the default of several."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(directory / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_token_ids(
    tokenizer: Tokenizer,
    generation_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
) -> tuple[int, ...]:
    """All ids that end a sequence: those of the first configuration that names any, and the tokenizer's own."""
    nested = model_config.get("text_config")
    documents = (generation_config, model_config, nested if isinstance(nested, dict) else {})
    configured = next((ids for ids in map(_configured_eos, documents) if ids), ())
    own = tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return tuple(dict.fromkeys([*configured, *([] if own is None else [own])]))


def _configured_eos(document: Mapping[str, Any]) -> tuple[int, ...]:
    value = document.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return tuple(entry for entry in values if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0)


def _generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, GenerationDefault]:
    values = {key: generation_config.get(key) for key in _GENERATION_KEYS}
    return {key: value for key, value in values.items() if isinstance(value, (bool, int, float))}


def _prompts(directory: Path) -> dict[str, Any]:
    """What sentence-transformers puts before an embedding model's inputs; nothing for other models."""
    if not (directory / "modules.json").is_file():
        return {}
    settings = _read_json(directory / "config_sentence_transformers.json")
    prompts, default = settings.get("prompts"), settings.get("default_prompt_name")
    known = {name: text for name, text in prompts.items() if isinstance(text, str)} if isinstance(prompts, dict) else {}
    if default is not None and default not in known:
        raise ModelError(f"{directory} has the prompt {default!r} as its default, and no prompt of that name")
    similarity = settings.get("similarity_fn_name") or SIMILARITIES[0]
    if similarity not in SIMILARITIES:
        raise ModelError(f"{directory} compares vectors by {similarity!r}; served are {', '.join(SIMILARITIES)}")
    places = [place for kind, place in read_modules(directory) if kind == "Pooling"]
    pooling = _read_json(places[0] / "config.json") if places else {}
    return {
        "prompts": known,
        "default_prompt_name": default,
        "similarity": similarity,
        "pools_prompt": pooling.get("include_prompt") is not False,
    }


def _max_input_tokens(
    directory: Path,
    pooling_config: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
) -> int | None:
    """The limit by sentence-transformers' rule: its own setting, else the smaller of tokenizer's and model's limit."""
    if not (directory / "modules.json").is_file():
        return None
    configured = pooling_config.get("max_seq_length")
    if isinstance(configured, int) and configured > 0:
        return configured
    limits = (tokenizer_config.get("model_max_length"), model_config.get("max_position_embeddings"))
    usable = [int(limit) for limit in limits if isinstance(limit, (int, float)) and 0 < limit < _NO_LIMIT]
    return min(usable, default=None)
