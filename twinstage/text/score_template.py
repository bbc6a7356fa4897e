"""Puts a pair of texts into one prompt, for rerankers that generate: they say yes or no to it.

A template is a Jinja program that receives exactly `query` and `document`. It runs in the sandbox of `chat_template`.
"""

from __future__ import annotations

import json
import re

from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.chat_template import Rendering, run
from twinstage.text.tokenizer import TextTokenizer

_NAMES = re.compile(r"""(?<=['"])\w+(?=['"])""")

# The form in which Qwen3-Reranker was trained, by its model card.
YES_NO_TEMPLATE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {{ query }}\n"
    "<Document>: {{ document }}<|im_end|>\n"
    "<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)


def with_score_template(bundle: TokenizerBundle, file_template: str | None) -> str:
    """The template of a generative reranker: that of its own file, else what its chat template says, else Qwen3's.

    A chat template counts when it names the roles "query" and "document", as those of sentence-transformers'
    CrossEncoder do: Qwen3's own, for one, speaks of a last_query_index and knows neither.
    """
    if file_template is not None:
        return file_template
    chat_template = bundle.chat_template or ""
    if not {"query", "document"} <= set(_NAMES.findall(chat_template)):
        return YES_NO_TEMPLATE
    tokens = "".join(f"{{% set {name} = {json.dumps(text)} %}}" for name, text in bundle.special_tokens.items())
    messages = "[{'role': 'query', 'content': query}, {'role': 'document', 'content': document}]"
    return f"{tokens}{{% set messages = {messages} %}}{chat_template}"


def prepare_pair(
    bundle: TokenizerBundle, query: str, document: str, *, template: str | None = None, field: str = "template"
) -> Rendering:
    """What `chat_template.run`, or a template process, renders. `template` wins over the bundle's own.

    Raises InvalidRequest that blames `field` when there is neither.
    """
    chosen = template or bundle.score_template
    if chosen is None:
        raise InvalidRequest([FieldViolation(field, "the model reads pairs as they are and takes no template")])
    variables = {"query": query, "document": document}
    return Rendering(template=chosen, variables=variables, blamed_field=field, continues=False)


def tokenize_pair(
    tokenizer: TextTokenizer, query: str, document: str, *, max_tokens: int | None = None
) -> tuple[list[int], list[int]]:
    """Token ids and token types of a pair, in the form that the model of this bundle expects.

    With a `score_template` in the bundle the rendered text is tokenized as it is, without further special tokens. To
    have `max_tokens` the end of the document is cut, and never what the template puts after it, which asks the
    question. Without one the pair is put together by the tokenizer. Where template and query, or special tokens, are
    too long by themselves, more tokens than `max_tokens` come back. Raises InvalidRequest when the template fails.
    """
    if tokenizer.bundle.score_template is None:
        return tokenizer.encode_pair(query, document, max_tokens=max_tokens)
    token_ids = _rendered(tokenizer, query, document)
    while max_tokens is not None and len(token_ids) > max_tokens and document:
        length = len(tokenizer.encode(document, add_special_tokens=False))
        # Nearly always once: tokens at the borders of the document may be others in the prompt.
        shorter = tokenizer.shortened(document, max_tokens=length - (len(token_ids) - max_tokens))
        document = min(shorter, document[:-1], key=len)  # a character of several tokens is cut as a whole
        token_ids = _rendered(tokenizer, query, document)
    return token_ids, []


def _rendered(tokenizer: TextTokenizer, query: str, document: str) -> list[int]:
    return tokenizer.encode(run(prepare_pair(tokenizer.bundle, query, document)), add_special_tokens=False)
