"""Embedding models against stored vectors of sentence-transformers and against plain Transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel, RobertaConfig, RobertaModel

from tiny_models import VOCABULARY_SIZE, make_tiny_llama, write_tiny_tokenizer
from twinstage.errors import ConfigError, InvalidRequest, ModelError
from twinstage.models.pooling.load import load_pooling
from twinstage.models.resolve import resolve_model
from twinstage.text.bundle import read_bundle
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import PoolingInput, Task

REFERENCE = json.loads((Path(__file__).parent / "data" / "minilm_reference.json").read_text(encoding="utf-8"))[
    "sentences"
]
TOLERANCE = 1e-5
MODULES = ("Transformer", "Pooling", "Normalize")


def _write_folder(directory: Path, model: Any, *, kinds: tuple[str, ...] = MODULES, pooling: Any = None) -> Path:
    """Write a sentence-transformers folder in its old format."""
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    modules = []
    for index, kind in enumerate(kinds):
        path = "" if kind == "Transformer" else f"{index}_{kind}"
        (directory / path).mkdir(exist_ok=True)
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": False}))
    return directory


def _tiny_bert(**changes: Any) -> BertModel:
    sizes = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(5)
    return BertModel(BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=64, **changes)).eval()


@pytest.fixture
def bert_folder(tmp_path: Path) -> Path:
    return _write_folder(tmp_path / "bert", _tiny_bert())


def _inputs(*lengths: int) -> list[list[int]]:
    return [[(7 * position + 3 * length) % VOCABULARY_SIZE for position in range(length)] for length in lengths]


def _pooling(inputs: list[list[int]]) -> list[PoolingInput]:
    return [PoolingInput(token_ids=token_ids) for token_ids in inputs]


def _mean_pooled(model: Any, token_ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        vector = model(input_ids=torch.tensor([token_ids])).last_hidden_state[0].mean(0)
    return (vector / vector.norm()).numpy()


def test_vectors_equal_plain_transformers_one_by_one(bert_folder: Path) -> None:
    model = load_pooling(resolve_model(str(bert_folder)))
    inputs = _inputs(3, 40, 1, 17, 17, 39, 2)
    vectors = model.encode(_pooling(inputs))
    assert [vector.shape for vector in vectors] == [(model.facts.dimensions,)] * 7 == [(32,)] * 7
    assert all(vector.dtype == np.float32 for vector in vectors)
    stock = AutoModel.from_pretrained(bert_folder)
    for token_ids, vector in zip(inputs, vectors, strict=True):
        np.testing.assert_allclose(vector, _mean_pooled(stock, token_ids), atol=TOLERANCE)
    assert model.encode([]) == []


def test_many_inputs_take_several_batches(bert_folder: Path) -> None:
    model = load_pooling(resolve_model(str(bert_folder)))
    inputs = _inputs(*(1 + index * 7 % 40 for index in range(300)))
    vectors = model.encode(_pooling(inputs))
    for index in (0, 123, 299):
        np.testing.assert_allclose(vectors[index], model.encode(_pooling([inputs[index]]))[0], atol=TOLERANCE)


def test_normalize_is_the_callers_choice_only_without_a_normalize_module(tmp_path: Path) -> None:
    plain = _write_folder(tmp_path / "plain", _tiny_bert(), kinds=("Transformer", "Pooling"))
    inputs = _inputs(9)
    model = load_pooling(resolve_model(str(plain)))
    raw = model.encode(_pooling(inputs), normalize=False)[0]
    assert abs(np.linalg.norm(raw) - 1) > 0.01
    np.testing.assert_allclose(
        model.encode(_pooling(inputs), normalize=True)[0], raw / np.linalg.norm(raw), atol=TOLERANCE
    )
    folder = _write_folder(tmp_path / "normalizing", _tiny_bert())
    normalized = load_pooling(resolve_model(str(folder))).encode(_pooling(inputs), normalize=False)[0]
    assert np.linalg.norm(normalized) == pytest.approx(1.0, abs=1e-5)


def test_limits(tmp_path: Path, bert_folder: Path) -> None:
    resolved = resolve_model(str(bert_folder))
    assert resolved.task is Task.EMBED
    assert load_pooling(resolved).facts.max_model_len == 40
    assert load_pooling(resolved, max_model_len=12).facts.max_model_len == 12
    with pytest.raises(ConfigError, match="above 40"):
        load_pooling(resolved, max_model_len=41)
    model = load_pooling(resolved)
    for wrong in ([], [1] * 41, [VOCABULARY_SIZE], [-1]):
        with pytest.raises(InvalidRequest, match=r"inputs\[1\]"):
            model.encode(_pooling([[1, 2], wrong]))
    torch.manual_seed(5)
    config = RobertaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=34,
        pad_token_id=1,
    )
    roberta = _write_folder(tmp_path / "roberta", RobertaModel(config))
    model = load_pooling(resolve_model(str(roberta)))
    assert model.facts.max_model_len == 32  # two positions are not for tokens
    assert np.isfinite(model.encode(_pooling([[5] * 32, [6]]))).all()


@pytest.mark.parametrize(
    ("pooling", "kinds", "message"),
    [
        ({"pooling_mode": ["mean", "median"]}, MODULES, "median pooling"),
        (None, ("Transformer", "Pooling", "CNN"), "CNN"),
        (None, ("Transformer", "Pooling", "Dense"), "weights"),
    ],
)
def test_other_pipelines_are_refused(tmp_path: Path, pooling: Any, kinds: tuple[str, ...], message: str) -> None:
    folder = _write_folder(tmp_path / "model", _tiny_bert(), kinds=kinds, pooling=pooling)
    with pytest.raises(ModelError, match=message):
        load_pooling(resolve_model(str(folder)))


def test_the_new_format_of_pooling_is_read(tmp_path: Path) -> None:
    pooling = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}
    folder = _write_folder(tmp_path / "model", _tiny_bert(), pooling=pooling)
    assert load_pooling(resolve_model(str(folder))).facts.dimensions == 32


def test_a_missing_pooler_does_not_matter_but_other_weights_do(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _write_folder(tmp_path / "model", _tiny_bert())
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("pooler.")}
    save_file(tensors, path, metadata={"format": "pt"})
    assert load_pooling(resolve_model(str(folder))).facts.dimensions == 32
    del tensors["encoder.layer.1.output.dense.bias"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"encoder\.layer\.1\.output\.dense\.bias"):
        load_pooling(resolve_model(str(folder)))


def test_a_generative_model_is_no_embedding_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not an embedding model"):
        load_pooling(resolve_model(str(make_tiny_llama(tmp_path / "llama"))))


@pytest.mark.real_model
def test_minilm_equals_sentence_transformers() -> None:
    resolved = resolve_model("demo-embedding")
    tokenizer = TextTokenizer(read_bundle(resolved.directory))
    model = load_pooling(resolved)
    assert (model.facts.dimensions, model.facts.max_model_len) == (384, 256)
    inputs = [tokenizer.encode(entry["text"]) for entry in REFERENCE]
    assert inputs == [entry["token_ids"] for entry in REFERENCE]
    expected = np.array([entry["embedding"] for entry in REFERENCE], dtype=np.float32)
    np.testing.assert_allclose(model.encode(_pooling(inputs)), expected, atol=TOLERANCE)


@pytest.mark.real_model
def test_a_copy_of_the_model_has_the_same_fingerprint(tmp_path: Path) -> None:
    resolved = resolve_model("demo-embedding")
    shutil.copytree(resolved.directory, tmp_path / "copy")
    assert resolve_model(str(tmp_path / "copy")).fingerprint == resolved.fingerprint
