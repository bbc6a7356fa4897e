"""Incremental text equals whole-sequence text, whatever the tokenizer and however the tokens arrive."""

from __future__ import annotations

import time
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from twinstage.text.bundle import TokenizerBundle
from twinstage.text.detokenize import IncrementalDetokenizer
from twinstage.text.stream import TextStream
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import Finish, FinishReason, ProducedToken, RequestId, TextOptions, TokenChunk

CORPUS = [
    "The capital of France is Paris. It isn't small, is it?",
    "Größe, naïve, façade; 日本語のテキスト, 한국어, русский, 😀🎉👩‍👩‍👧",
    "def main():\n    print('hello  world')\n\n",
    "Stop here. STOP there. ### End ###",
] * 3
SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True), AddedToken("<tool>", special=False)]


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """The shape of Llama 2's and Gemma's tokenizers."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehlorstuwTES.#\n",
        "\ufffd",
    ]
    merges = [("▁", "a"), ("l", "o"), ("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *SPECIAL])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


BUILDERS = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "word_piece": _word_piece,
    "metaspace": _metaspace,
}


@lru_cache
def tokenizer_of(kind: str) -> TextTokenizer:
    return TextTokenizer(TokenizerBundle(tokenizer_json=BUILDERS[kind]().to_str()))


def incremental(tokenizer: TextTokenizer, token_ids: list[int], *, skip_special_tokens: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.flush()


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_decode_as_a_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    assert incremental(tokenizer, token_ids, skip_special_tokens=skip) == tokenizer.decode(token_ids, skip)


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_any_text_decodes_as_a_whole(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(text)
    assert incremental(tokenizer, token_ids, skip_special_tokens=True) == tokenizer.decode(token_ids)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_runs_of_bytes_decode_as_a_whole(data: st.DataObject) -> None:
    """Single bytes in any order: unfinished, broken and overlong characters."""
    tokenizer = tokenizer_of("byte_level")
    byte_ids = [tokenizer.encode(text)[0] for text in ("a", " ")] + _byte_ids(tokenizer)
    token_ids = data.draw(st.lists(st.sampled_from(byte_ids), max_size=40))
    assert incremental(tokenizer, token_ids, skip_special_tokens=True) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_the_bytes_of_tokens_are_the_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = "The cat, it is" if kind == "metaspace" else "the 日本 é😀\ufffd\u0120 loud"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.spell(token_id)[1] for token_id in token_ids).decode().removeprefix(" ") == text
    assert tokenizer.spell(tokenizer.vocabulary["</s>"]) == ("</s>", b"</s>")
    assert tokenizer.spell(tokenizer.vocab_size) == ("", b"")


def _byte_ids(tokenizer: TextTokenizer) -> list[int]:
    """Ids of tokens that are one byte each, of those bytes that make or break characters."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    singles = [index for index in range(tokenizer.vocab_size) if tokenizer.token_piece(index) in alphabet]
    return [index for index in singles if tokenizer.decode([index]) == "\ufffd"]


def test_half_a_character_is_held_back() -> None:
    tokenizer = tokenizer_of("byte_level")
    token_ids = tokenizer.encode("x𝄞y")  # not in the corpus, so one token a byte
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert pieces == ["x", "", "", "", "𝄞", "y"]
    assert detokenizer.flush() == ""


def test_unfinished_character_comes_out_at_the_end() -> None:
    tokenizer = tokenizer_of("byte_level")
    token_ids = tokenizer.encode("x𝄞")[:-1]
    assert incremental(tokenizer, token_ids, skip_special_tokens=True) == "x\ufffd"


def test_cost_does_not_grow_with_broken_bytes() -> None:
    """A client can force any token with a logit bias; 20,000 broken bytes must not cost quadratic time."""
    tokenizer = tokenizer_of("byte_level")
    broken = _byte_ids(tokenizer)[-1]
    started_s = time.monotonic()
    text = incremental(tokenizer, [broken] * 20_000, skip_special_tokens=True)
    assert text == "\ufffd" * 20_000
    assert time.monotonic() - started_s < 10


def chunks_of(token_ids: list[int], sizes: list[int], finish: Finish) -> list[TokenChunk]:
    """Cut token ids into chunks; `sizes` are used in turn."""
    chunks, start, turn = [], 0, 0
    while start < len(token_ids):
        size = sizes[turn % len(sizes)]
        part = token_ids[start : start + size]
        start, turn = start + size, turn + 1
        tokens = tuple(ProducedToken(token_id=token_id) for token_id in part)
        end = finish if start >= len(token_ids) else None
        chunks.append(TokenChunk(request_id=RequestId("r"), tokens=tokens, finish=end))
    return chunks


LENGTH = Finish(reason=FinishReason.LENGTH)


def run(
    token_ids: list[int],
    *,
    sizes: list[int],
    options: TextOptions,
    min_tokens: int = 0,
    kind: str = "byte_level",
    finish: Finish = LENGTH,
) -> tuple[str, list[int], Finish]:
    stream = TextStream(tokenizer_of(kind), options, min_tokens)
    deltas = [stream.push(chunk) for chunk in chunks_of(token_ids, sizes, finish)]
    finishes = [delta.finish for delta in deltas if delta.finish is not None]
    assert len(finishes) == 1
    assert stream.is_finished
    tokens = [token.token_id for delta in deltas for token in delta.tokens]
    assert stream.num_tokens == len(tokens)
    return "".join(delta.text for delta in deltas), tokens, finishes[0]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="ab. #😀é", min_size=1, max_size=40),
    stop=st.lists(st.text(alphabet="ab. #😀é", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_any_split_gives_the_text_of_one_chunk_and_of_a_plain_search(
    text: str, stop: list[str], sizes: list[int], include: bool, min_tokens: int
) -> None:
    token_ids = tokenizer_of("byte_level").encode(text)
    options = TextOptions(stop=tuple(stop), include_stop_str_in_output=include)
    split = run(token_ids, sizes=sizes, options=options, min_tokens=min_tokens)
    whole = run(token_ids, sizes=[len(token_ids)], options=options, min_tokens=min_tokens)
    assert split == whole
    assert split == _expected(token_ids, options, min_tokens)


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), include=st.booleans(), skip=st.booleans(), min_tokens=st.integers(0, 4))
def test_any_split_of_any_ids_gives_the_same(
    kind: str, data: st.DataObject, include: bool, skip: bool, min_tokens: int
) -> None:
    """Ids that no text gives as well: broken characters, special tokens; stop strings out of the very text."""
    tokenizer = tokenizer_of(kind)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    text = tokenizer.decode(token_ids, skip)
    places = st.integers(0, max(0, len(text) - 1))
    stop = [
        text[at : at + length] for at, length in data.draw(st.lists(st.tuples(places, st.integers(1, 4)), max_size=3))
    ]
    options = TextOptions(stop=tuple(filter(None, stop)), include_stop_str_in_output=include, skip_special_tokens=skip)
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    whole = run(token_ids, sizes=[len(token_ids)], options=options, min_tokens=min_tokens, kind=kind)
    assert run(token_ids, sizes=sizes, options=options, min_tokens=min_tokens, kind=kind) == whole


def _expected(token_ids: list[int], options: TextOptions, min_tokens: int) -> tuple[str, list[int], Finish]:
    """The same result by plain search in the text of each prefix, without any streaming."""
    tokenizer = tokenizer_of("byte_level")

    def complete_text(count: int) -> str:
        text = tokenizer.decode(token_ids[:count])
        return text if count == len(token_ids) else text.removesuffix("\ufffd")

    gate = len(complete_text(min(min_tokens, len(token_ids))))
    for count in range(min_tokens + 1, len(token_ids) + 1):
        text = complete_text(count)
        ends = [(text.find(s, gate) + len(s), text.find(s, gate), s) for s in options.stop if s in text[gate:]]
        if ends:
            end, start, matched = min(ends)
            cut = end if options.include_stop_str_in_output else start
            return text[:cut], token_ids[:count], Finish(reason=FinishReason.STOP, matched_text=matched)
    return tokenizer.decode(token_ids), token_ids, LENGTH


def test_stop_string_across_token_borders() -> None:
    tokenizer = tokenizer_of("byte_level")
    token_ids = tokenizer.encode("one ### two")
    options = TextOptions(stop=("e ###",))
    text, _, finish = run(token_ids, sizes=[1], options=options)
    assert (text, finish.matched_text, finish.reason) == ("on", "e ###", FinishReason.STOP)


def test_text_that_may_begin_a_stop_string_waits() -> None:
    stream = TextStream(tokenizer_of("byte_level"), TextOptions(stop=("aab",)))
    texts = []
    for character in "xaac":
        (token_id,) = tokenizer_of("byte_level").encode(character)
        chunk = TokenChunk(request_id=RequestId("r"), tokens=(ProducedToken(token_id=token_id),))
        texts.append(stream.push(chunk).text)
    assert texts == ["x", "", "", "aac"]


def test_stop_strings_are_not_matched_before_min_tokens() -> None:
    tokenizer = tokenizer_of("byte_level")
    token_ids = [tokenizer.encode(character)[0] for character in "a.b.c.d"]
    text, tokens, _ = run(token_ids, sizes=[2], options=TextOptions(stop=(".",)), min_tokens=4)
    assert text == "a.b.c"
    assert len(tokens) == 6


def test_stop_token_is_left_out_of_the_text_but_counted() -> None:
    tokenizer = tokenizer_of("byte_level")
    token_ids = [tokenizer.encode(character)[0] for character in "ab."]
    finish = Finish(reason=FinishReason.STOP, matched_token_id=token_ids[-1])
    assert run(token_ids, sizes=[2], options=TextOptions(), finish=finish) == ("ab", token_ids, finish)
    kept = TextOptions(include_stop_str_in_output=True)
    assert run(token_ids, sizes=[2], options=kept, finish=finish) == ("ab.", token_ids, finish)


def test_special_tokens_are_shown_when_asked_for() -> None:
    tokenizer = tokenizer_of("byte_level")
    token_ids = [*tokenizer.encode("a"), tokenizer.encode("</s>")[0], *tokenizer.encode("b")]
    assert run(token_ids, sizes=[1], options=TextOptions())[0] == "ab"
    assert run(token_ids, sizes=[1], options=TextOptions(skip_special_tokens=False))[0] == "a</s>b"


def test_closing_returns_what_was_held_back_once() -> None:
    tokenizer = tokenizer_of("byte_level")
    stream = TextStream(tokenizer, TextOptions(stop=("ab",)))
    (token_id,) = tokenizer.encode("a")
    stream.push(TokenChunk(request_id=RequestId("r"), tokens=(ProducedToken(token_id=token_id),)))
    limit = Finish(reason=FinishReason.TIME_LIMIT)
    delta = stream.close(limit)
    assert (delta.text, delta.finish) == ("a", limit)
    assert stream.close(limit).finish is None
    late = TokenChunk(request_id=RequestId("r"), tokens=(ProducedToken(token_id=token_id),))
    assert stream.push(late).text == ""
