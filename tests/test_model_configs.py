"""Models that Transformers does not know, or refuses, and tokenizers that are not the model's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tiny_models import MAX_MODEL_LEN, VOCABULARY_SIZE, write_tiny_tokenizer
from twinstage.errors import ConfigError, ModelError
from twinstage.hosting.found_model import find_model
from twinstage.hosting.settings import WorkerSettings
from twinstage.models.config_files import effective_max_model_len, read_json_object
from twinstage.models.describe import describe_model
from twinstage.models.load import load_model
from twinstage.models.resolve import resolve_model
from twinstage.settings import read_settings


@pytest.fixture
def directory(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model whose configuration may be changed."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_of_an_unknown_model_type_the_raw_fields_are_read_and_loading_names_it(directory: Path) -> None:
    """What the router tells of a model needs no configuration class; only its modules do."""
    change_config(directory, model_type="from_the_future", architectures=["FromTheFutureForCausalLM"])
    resolved = resolve_model(str(directory))
    limit = effective_max_model_len(read_json_object(directory / "config.json"))
    description = describe_model(resolved, max_model_len=limit, eos_token_ids=(2,), tokenizer_fingerprint="t")
    assert (description.max_model_len, description.vocab_size) == (MAX_MODEL_LEN, VOCABULARY_SIZE)
    with pytest.raises(ModelError, match="from_the_future"):
        load_model(resolved)


def test_the_error_of_a_known_configuration_stays_as_it_is(directory: Path) -> None:
    change_config(directory, hidden_act="no_such_activation")
    with pytest.raises(ModelError, match="no_such_activation"):
        load_model(resolve_model(str(directory)))


def _found(model: Path, *flags: str) -> Any:
    return find_model(read_settings(WorkerSettings, ["--model", str(model), *flags]))


def test_a_tokenizer_of_its_own(directory: Path, tmp_path: Path) -> None:
    own = _found(directory).bundle
    other = tmp_path / "tokenizer"
    other.mkdir()
    write_tiny_tokenizer(other)
    (other / "chat_template.jinja").write_text("other template")
    (directory / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": 2}')
    bundle = _found(directory, "--tokenizer", str(other)).bundle
    assert bundle.chat_template == "other template" != own.chat_template
    assert bundle.tokenizer_json == own.tokenizer_json
    assert bundle.generation_defaults == {"temperature": 0.25}, "sampling defaults stay the model's"
    change_config(directory, vocab_size=100)
    with pytest.raises(ModelError, match=f"has {VOCABULARY_SIZE} tokens, and the model 100"):
        _found(directory, "--tokenizer", str(other))
    with pytest.raises(ModelError, match=r"missing has no tokenizer\.json"):
        _found(directory, "--tokenizer", str(tmp_path / "missing"))


def test_slow_tokenizers_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer-mode: .*save_pretrained"):
        read_settings(WorkerSettings, ["--tokenizer-mode", "slow"])
    assert read_settings(WorkerSettings, ["--tokenizer-mode", "auto"]).tokenizer_mode == "auto"
