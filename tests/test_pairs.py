"""Pairs become one input as Transformers makes it, or the prompt of a reranker that generates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from test_text_bundle import word_tokenizer
from twinstage.errors import InvalidRequest
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.score_template import YES_NO_TEMPLATE, prepare_pair, tokenize_pair, with_score_template
from twinstage.text.tokenizer import TextTokenizer

BUNDLE = TokenizerBundle(tokenizer_json=word_tokenizer().to_str())


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 6, 7, 8, 9, None])
@pytest.mark.parametrize(("query", "document"), [(1, 4), (4, 1), (3, 4), (4, 3), (2, 2)])
def test_a_pair_is_put_together_and_cut_as_transformers_does(query: int, document: int, max_tokens: int | None) -> None:
    words = ["hello", "world", "one", "two"]
    texts = " ".join(words[:query]), " ".join(words[:document])
    stock = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer())
    expected = stock(*texts, truncation=max_tokens is not None, max_length=max_tokens, return_token_type_ids=True)
    token_ids, token_types = tokenize_pair(TextTokenizer(BUNDLE), *texts, max_tokens=max_tokens)
    assert (token_ids, token_types) == (expected["input_ids"], expected["token_type_ids"])


def test_a_template_receives_exactly_query_and_document() -> None:
    tokenizer = TextTokenizer(replace(BUNDLE, score_template="{{ document }} {{ query }}{{ messages }}"))
    token_ids, token_types = tokenize_pair(tokenizer, "one", "hello world")
    assert token_ids == TextTokenizer(BUNDLE).encode("hello world one", add_special_tokens=False)
    assert token_types == []
    broken = TextTokenizer(replace(BUNDLE, score_template="{{ query.nothing.here }}"))
    with pytest.raises(InvalidRequest, match="template"):
        tokenize_pair(broken, "one", "two")
    with pytest.raises(InvalidRequest, match="takes no template"):
        prepare_pair(BUNDLE, "one", "two")


def test_which_template_a_reranker_has() -> None:
    assert with_score_template(BUNDLE, "own") == "own"
    assert with_score_template(replace(BUNDLE, chat_template="{{ messages }}"), None) == YES_NO_TEMPLATE
    roles = "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    no_roles = roles + "{% set last_query_index = documents | length %}"
    assert with_score_template(replace(BUNDLE, chat_template=no_roles), None) == YES_NO_TEMPLATE
    chat_template = roles + """{# 'query', "document" #}"""
    bundle = replace(BUNDLE, chat_template=chat_template, special_tokens={"bos_token": '<"b">'})
    template = with_score_template(bundle, None)
    rendering = prepare_pair(bundle, "q", "d", template=template)
    from twinstage.text.chat_template import run

    assert run(rendering) == '<"b">query=q;document=d;'
