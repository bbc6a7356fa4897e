"""Tiny random models of every architecture against sentence-transformers, from texts to vectors and scores."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tiny_models import CHAT_TEMPLATE, VOCABULARY_SIZE, make_tiny_model, write_tiny_tokenizer
from twinstage.errors import ConfigError, ModelError, TaskNotSupported
from twinstage.models.pooling.load import load_pooling
from twinstage.models.resolve import resolve_model
from twinstage.text.bundle import read_bundle
from twinstage.text.score_template import tokenize_pair, with_score_template
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import PoolingInput, PoolingTask, Task

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.xdist_group("sentence_transformers")

TOLERANCE = 1e-5
TEXTS = [
    "The baker knows everybody in the village.",
    "A dog",
    "Numbers such as 10 and 1000 are written with digits, letters with letters, and dogs sleep in the warm sun.",
    "x",
]
PAIRS = [("Who knows everybody?", TEXTS[0]), ("Who sleeps?", TEXTS[2]), ("dog", TEXTS[1])]
SIZES = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 128}
CONFIGS: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(**SIZES, **LAYERS),
    "roberta": lambda: transformers.RobertaConfig(**SIZES, **LAYERS, pad_token_id=2, type_vocab_size=1),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**SIZES, **LAYERS, pad_token_id=2, type_vocab_size=1),
    "mpnet": lambda: transformers.MPNetConfig(**SIZES, **LAYERS, pad_token_id=2),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY_SIZE, dim=32, hidden_dim=48, n_heads=4, n_layers=2, max_position_embeddings=128
    ),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SIZES, **LAYERS, pad_token_id=2, global_attn_every_n_layers=2, local_attention=8
    ),
    "nomic": lambda: transformers.NomicBertConfig(**SIZES, **LAYERS),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **LAYERS, num_key_value_heads=2, head_dim=8, pad_token_id=2),
}


def _write(directory: Path, config: Any, auto_class: Any, **changes: Any) -> Path:
    torch.manual_seed(7)
    model = auto_class.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(0.05 * torch.randn_like(parameter))  # weights of which every one matters
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    tokenizer_config = json.loads((directory / "tokenizer_config.json").read_text()) | changes
    tokenizer_config.pop("chat_template") if "chat_template" not in changes else None
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


def _embedder(directory: Path, name: str, *, pooling: Any = None, steps: tuple[Any, ...] = (), **settings: Any) -> Path:
    """A folder as sentence-transformers 6 writes it, around a model written by Transformers."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    plain = _write(directory / "plain", CONFIGS[name](), transformers.AutoModel)
    modules = [Transformer(str(plain)), Pooling(32, **(pooling or {"pooling_mode": "mean"})), *steps]
    sentence_transformers.SentenceTransformer(modules=modules, device="cpu", **settings).save(str(directory / "model"))
    return directory / "model"


def _encode(folder: Path, texts: list[str], **options: Any) -> list[Any]:
    tokenizer = TextTokenizer(read_bundle(folder))
    inputs = [PoolingInput(token_ids=tokenizer.encode(text)) for text in texts]
    return load_pooling(resolve_model(str(folder))).encode(inputs, **options)


def _stock(folder: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_architecture(name: str, tmp_path: Path) -> None:
    folder = _embedder(tmp_path, name, pooling={"pooling_mode": "lasttoken" if name == "qwen3" else "mean"})
    expected = _stock(folder).encode(TEXTS)
    assert np.abs(expected[0] - expected[2]).max() > 0.01
    np.testing.assert_allclose(_encode(folder, TEXTS, normalize=False), expected, atol=TOLERANCE)


def test_packed_models_in_bfloat16_are_close_and_others_refuse_it(tmp_path: Path) -> None:
    folder = _embedder(tmp_path, "xlm-roberta")
    tokenizer = TextTokenizer(read_bundle(folder))
    inputs = [PoolingInput(token_ids=tokenizer.encode(text)) for text in TEXTS]
    vectors = np.array(load_pooling(resolve_model(str(folder)), dtype="bfloat16").encode(inputs))
    expected = _stock(folder).encode(TEXTS, normalize_embeddings=True)
    assert (vectors * expected).sum(axis=1).min() > 0.999
    assert np.abs(vectors - expected).max() > TOLERANCE  # it is another precision
    folder = _embedder(tmp_path / "other", "mpnet")
    with pytest.raises(ConfigError, match="float32 only"):
        load_pooling(resolve_model(str(folder)), dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.0.output.dense.bias"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="no finite numbers"):
        load_pooling(resolve_model(str(folder)))


def test_every_way_of_pooling_and_every_module_after_it(tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling

    modes = ("max", "cls", "weightedmean", "lasttoken", "mean_sqrt_len_tokens", "mean")
    assert set(modes) == set(Pooling.POOLING_MODES)
    residual = Dense(len(modes) * 32, 24, activation_function=torch.nn.ReLU(), use_residual=True)
    steps = (residual, LayerNorm(24), Dense(24, 16, bias=False), Normalize())
    folder = _embedder(tmp_path, "bert", pooling={"pooling_mode": modes}, steps=steps)
    np.testing.assert_allclose(_encode(folder, TEXTS, normalize=False), _stock(folder).encode(TEXTS), atol=TOLERANCE)
    facts = load_pooling(resolve_model(str(folder))).facts
    assert (facts.dimensions, facts.token_dimensions) == (16, 32)


def test_flags_of_the_older_format_are_joined_in_the_same_order(tmp_path: Path) -> None:
    folder = _embedder(tmp_path, "bert")
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    np.testing.assert_allclose(_encode(folder, TEXTS, normalize=False), _stock(folder).encode(TEXTS), atol=TOLERANCE)


def test_prompts_and_what_of_them_is_pooled(tmp_path: Path) -> None:
    pooling = {"pooling_mode": ("mean", "weightedmean", "cls"), "include_prompt": False}
    prompts = {"query": "The village: ", "document": ""}
    settings = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "euclidean"}
    folder = _embedder(tmp_path, "bert", pooling=pooling, **settings)
    bundle = read_bundle(folder)
    assert bundle.similarity == "euclidean"
    assert (bundle.prompts, bundle.default_prompt_name, bundle.pools_prompt) == (prompts, "query", False)
    tokenizer = TextTokenizer(bundle)
    prompt_tokens = tokenizer.prompt_tokens(prompts["query"])
    inputs = [
        PoolingInput(token_ids=tokenizer.encode(prompts["query"] + text), prompt_tokens=prompt_tokens) for text in TEXTS
    ]
    expected = _stock(folder).encode(TEXTS)
    vectors = load_pooling(resolve_model(str(folder))).encode(inputs, normalize=False)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    np.testing.assert_allclose(
        _encode(folder, TEXTS, normalize=False), _stock(folder).encode(TEXTS, prompt_name="document"), atol=TOLERANCE
    )


def test_a_folder_that_keeps_its_parts_in_folders(tmp_path: Path) -> None:
    """As sentence-transformers wrote it before version 3, with names of one's own."""
    pooling = {"pooling_mode": "cls", "include_prompt": False}
    folder = _embedder(tmp_path, "bert", pooling=pooling, prompts={"query": "The village: "})
    expected = _stock(folder).encode(TEXTS)
    fingerprint = resolve_model(str(folder)).fingerprint
    inner = folder / "0_Transformer"
    inner.mkdir()
    for path in [*folder.glob("token*"), *folder.glob("model*"), folder / "config.json"]:
        path.rename(inner / path.name)
    (inner / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 77}))
    (folder / "1_Pooling").rename(folder / "pool")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"], modules[1]["path"] = "0_Transformer", "pool"
    (folder / "modules.json").write_text(json.dumps(modules))
    resolved = resolve_model(str(folder))
    assert (resolved.task, resolved.fingerprint) == (Task.EMBED, fingerprint)
    bundle = read_bundle(folder)
    assert (bundle.max_input_tokens, bundle.pools_prompt, bundle.prompts["query"]) == (77, False, "The village: ")
    assert load_pooling(resolved).facts.max_model_len == 77
    np.testing.assert_allclose(_encode(folder, TEXTS, normalize=False), expected, atol=TOLERANCE)
    (folder / "pool" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    changed = resolve_model(str(folder))
    assert (changed.fingerprint != fingerprint, read_bundle(folder).pools_prompt) == (True, True)


def test_a_vector_per_token(tmp_path: Path) -> None:
    folder = _embedder(tmp_path, "bert")
    expected = _stock(folder).encode(TEXTS, output_value="token_embeddings")
    for scales in (False, True):
        results = _encode(folder, TEXTS, task=PoolingTask.TOKEN_EMBED, normalize=scales)
        for result, states in zip(results, expected, strict=True):
            wanted = torch.nn.functional.normalize(states, dim=1) if scales else states
            np.testing.assert_allclose(result, wanted.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_probabilities_of_a_classifier(problem: str, tmp_path: Path) -> None:
    config = CONFIGS["bert"]()
    config.id2label, config.problem_type = {0: "bad", 1: "fair", 2: "good"}, problem
    folder = _write(tmp_path / "model", config, transformers.AutoModelForSequenceClassification)
    model = load_pooling(resolve_model(str(folder), task=Task.CLASSIFY))
    assert model.facts.labels == ("bad", "fair", "good")
    tokenizer = TextTokenizer(read_bundle(folder))
    inputs = [PoolingInput(token_ids=tokenizer.encode(text)) for text in TEXTS]
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for entry, result in zip(inputs, model.encode(inputs), strict=True):
        with torch.no_grad():
            logits = stock(torch.tensor([entry.token_ids])).logits[0]
        expected = logits.softmax(0) if problem.startswith("single") else logits.sigmoid()
        np.testing.assert_allclose(result, expected.numpy(), atol=TOLERANCE)
    with pytest.raises(TaskNotSupported, match="not embed"):
        model.encode(inputs, task=PoolingTask.EMBED)
    with pytest.raises(ModelError, match="several labels"):
        load_pooling(resolve_model(str(folder), task=Task.SCORE))


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "qwen3"])
@pytest.mark.parametrize("saved", [False, True])
def test_scores_equal_those_of_cross_encoder(name: str, saved: bool, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    config.num_labels = 1
    types = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if name == "bert" else {}
    folder = _write(tmp_path / "model", config, transformers.AutoModelForSequenceClassification, **types)
    stock = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    if saved:
        stock.activation_fn = torch.nn.Identity()
        stock.save(str(tmp_path / "saved"))
        folder = tmp_path / "saved"
    resolved = resolve_model(str(folder))
    assert resolved.task is Task.SCORE
    np.testing.assert_allclose(_scores(folder, resolved), stock.predict(PAIRS), atol=TOLERANCE)


def test_scores_of_a_pooled_vector(tmp_path: Path) -> None:
    from sentence_transformers.cross_encoder.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

    types = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    plain = _write(tmp_path / "plain", CONFIGS["bert"](), transformers.AutoModel, **types)
    steps = (
        Dense(32, 24, activation_function=torch.nn.GELU()),
        LayerNorm(24),
        Dense(24, 1, activation_function=torch.nn.Identity(), module_output_name="scores"),
    )
    stock = sentence_transformers.CrossEncoder(
        modules=[Transformer(str(plain)), Pooling(32, pooling_mode="mean"), *steps], device="cpu"
    )
    stock.save(str(tmp_path / "model"))
    resolved = resolve_model(str(tmp_path / "model"))
    assert resolved.task is Task.SCORE
    np.testing.assert_allclose(_scores(tmp_path / "model", resolved), stock.predict(PAIRS), atol=TOLERANCE)


def _llama_with_room_for_words() -> Any:
    return transformers.LlamaConfig(
        **(SIZES | {"vocab_size": VOCABULARY_SIZE + 8}), **(LAYERS | {"max_position_embeddings": 512})
    )


def test_scores_of_a_reranker_that_says_yes_or_no(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "llama", _llama_with_room_for_words())
    tokenizer_json = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer_json.add_tokens(["yes", "no"])
    tokenizer_json.save(str(folder / "tokenizer.json"))
    yes, no = (tokenizer_json.token_to_id(word) for word in ("yes", "no"))
    resolved = resolve_model(str(folder), task=Task.SCORE)
    scores = _scores(folder, resolved)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    bundle = read_bundle(folder)
    tokenizer = TextTokenizer(replace(bundle, score_template=with_score_template(bundle, None)))
    for pair, score in zip(PAIRS, scores, strict=True):
        with torch.no_grad():
            logits = stock(torch.tensor([tokenize_pair(tokenizer, *pair)[0]])).logits[0, -1]
        assert score == pytest.approx(float(torch.stack([logits[no], logits[yes]]).softmax(0)[1]), abs=TOLERANCE)
    assert bundle.chat_template == CHAT_TEMPLATE


def _scores(folder: Path, resolved: Any) -> list[float]:
    bundle = read_bundle(folder)
    if resolved.directory.name == "llama":
        bundle = replace(bundle, score_template=with_score_template(bundle, None))
    tokenizer = TextTokenizer(bundle)
    inputs = []
    for query, document in PAIRS:
        token_ids, token_types = tokenize_pair(tokenizer, query, document)
        inputs.append(PoolingInput(token_ids=token_ids, token_type_ids=token_types))
    return [float(score) for (score,) in load_pooling(resolved).encode(inputs)]


@pytest.mark.real_model
def test_a_thousand_sentences_of_minilm() -> None:
    resolved = resolve_model("demo-embedding")
    sentences = _sentences_of_this_project()[:1000]
    assert len(sentences) == 1000
    vectors = np.array(_encode(resolved.directory, sentences))
    np.testing.assert_allclose(vectors, _stock(resolved.directory).encode(sentences), atol=TOLERANCE)


def _sentences_of_this_project() -> list[str]:
    """What the documentation strings of the package say, sentence by sentence."""
    package = Path(__file__).resolve().parent.parent / "twinstage"
    nodes = [
        node
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    texts = [" ".join((ast.get_docstring(node) or "").split()) for node in nodes]
    found = [sentence for text in texts for sentence in re.split(r"(?<=[.:;]) ", text)]
    return list(dict.fromkeys(sentence for sentence in found if 5 <= len(sentence.split()) <= 60))
