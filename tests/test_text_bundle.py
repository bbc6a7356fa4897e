"""Bundles are read as Transformers and sentence-transformers read the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from twinstage.errors import ModelError
from twinstage.text.bundle import TokenizerBundle, read_bundle
from twinstage.text.tokenizer import TextTokenizer

WORDS = ["<unk>", "<s>", "</s>", "<end>", *(f"▁{word}" for word in ["hello", "world", "one", "two", "three", "four"])]


def word_tokenizer() -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<end>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", "</s>"],
        pair=["<s>", "$A", "</s>", "$B:1", "</s>"],
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    return tokenizer


def write(directory: Path, **documents: Any) -> Path:
    word_tokenizer().save(str(directory / "tokenizer.json"))
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document))
    return directory


def test_round_trip_and_fingerprint(tmp_path: Path) -> None:
    bundle = read_bundle(write(tmp_path, generation_config={"temperature": 0.6, "top_k": 20, "do_sample": True}))
    again = TokenizerBundle.from_bytes(bundle.to_bytes())
    assert again == bundle
    assert again.fingerprint == bundle.fingerprint
    assert bundle.generation_defaults == {"temperature": 0.6, "top_k": 20, "do_sample": True}
    other = read_bundle(write(tmp_path, generation_config={"temperature": 0.7}))
    assert other.fingerprint != bundle.fingerprint


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\xff", b'{"tokenizer_json": 1, "unknown": 2, "eos_token_ids": []}']
)
def test_something_else_is_no_bundle(data: bytes) -> None:
    with pytest.raises(ModelError):
        TokenizerBundle.from_bytes(data)


@pytest.mark.parametrize("content", [None, "{", "{}", '{"version": "1.0"}'])
def test_missing_or_broken_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_bundle(tmp_path)


def test_broken_configuration_names_the_file(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_bundle(tmp_path)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ({"generation_config": {"eos_token_id": [3, 2]}, "config": {"eos_token_id": 1}}, (3, 2)),
        ({"config": {"eos_token_id": 3}}, (3,)),
        ({"config": {"text_config": {"eos_token_id": 3}}}, (3,)),
        ({"config": {"eos_token_id": 3}, "tokenizer_config": {"eos_token": {"content": "</s>"}}}, (3, 2)),
        ({"special_tokens_map": {"eos_token": "</s>"}}, (2,)),
        ({"config": {"eos_token_id": None}}, ()),
    ],
)
def test_tokens_that_end_a_sequence(tmp_path: Path, documents: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert read_bundle(write(tmp_path, **documents)).eos_token_ids == expected


def test_chat_template_precedence(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(tmp_path, tokenizer_config={"chat_template": several})
    assert read_bundle(tmp_path).chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert read_bundle(tmp_path).chat_template == "own file"


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False, "bos_token": "<s>"}, {"add_eos_token": True}])
def test_special_tokens_around_an_input_are_those_of_the_tokenizer_file(tmp_path: Path, config: dict[str, Any]) -> None:
    """Flags of older tokenizers in tokenizer_config.json do not count beside a tokenizer.json, as in Transformers."""
    from transformers import PreTrainedTokenizerFast

    directory = write(tmp_path, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **config})
    token_ids = TextTokenizer(read_bundle(directory)).encode("hello world")
    assert token_ids == [1, 4, 5, 2]
    assert token_ids == PreTrainedTokenizerFast.from_pretrained(str(directory)).encode("hello world")


def test_limits_of_embedding_models(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"model_max_length": 512}, config={"max_position_embeddings": 514})
    assert read_bundle(tmp_path).max_input_tokens is None
    (tmp_path / "modules.json").write_text("[]")
    assert read_bundle(tmp_path).max_input_tokens == 512
    write(tmp_path, sentence_bert_config={"max_seq_length": 256, "do_lower_case": True})
    bundle = read_bundle(tmp_path)
    assert bundle.max_input_tokens == 256
    assert TextTokenizer(bundle).encode("HELLO World") == [1, 4, 5, 2]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer(read_bundle(tmp_path)).encode("hello world one two") == [1, 4, 5, 6, 7, 2]


@pytest.mark.parametrize(
    ("limit", "keep_last", "expected"),
    [
        (4, True, [1, 6, 7, 2]),
        (4, False, [1, 4, 5, 2]),
        (5, True, [1, 5, 6, 7, 2]),
        (6, True, [1, 4, 5, 6, 7, 2]),
        (99, False, [1, 4, 5, 6, 7, 2]),
        (2, True, [1, 2]),
        (1, True, [1, 2]),
    ],
)
def test_cutting_keeps_special_tokens(tmp_path: Path, limit: int, keep_last: bool, expected: list[int]) -> None:
    tokenizer = TextTokenizer(read_bundle(write(tmp_path)))
    assert tokenizer.encode_truncated("hello world one two", max_tokens=limit, keep_last=keep_last) == expected


def test_many_texts_give_what_each_gives_by_itself(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(read_bundle(write(tmp_path)))
    texts = [" ".join(["hello", "world", "one", "two", "stranger"][: 1 + n % 5]) for n in range(200)]
    assert list(tokenizer.encode_many(texts)) == [tokenizer.encode(text) for text in texts]
    assert list(tokenizer.encode_many([])) == []


def test_few_long_texts_are_tokenized_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoding takes many times the memory of its text."""
    tokenizer = TextTokenizer(read_bundle(write(tmp_path)))
    sizes: list[int] = []

    class Counting:
        def encode_batch_fast(self, texts: list[str]) -> list[Any]:
            sizes.append(len(texts))
            return inner.encode_batch_fast(texts)

    inner = tokenizer._tokenizer
    monkeypatch.setattr(tokenizer, "_tokenizer", Counting())
    texts = ["hello " * 20_000] * 5 + ["one"] * 70
    assert [len(ids) for ids in tokenizer.encode_many(texts)] == [len(inner.encode(text).ids) for text in texts]
    assert sizes == [2, 2, 64, 7]


def test_text_and_spelling_of_a_token(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(read_bundle(write(tmp_path)))
    assert tokenizer.decode([4, 5]) == "hello world"
    assert tokenizer.token_text(5) == " world"  # though it is "world" when decoded alone
    assert tokenizer.token_piece(5) == "▁world"
    assert tokenizer.token_text(2) == "</s>"
    assert (tokenizer.token_text(99), tokenizer.token_piece(99)) == ("", "")
    assert tokenizer.vocab_size == len(WORDS)
