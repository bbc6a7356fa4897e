"""The tokenizer of one model: text to token ids and back. Immutable, so any thread may use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby

from tokenizers import Tokenizer

from twinstage.errors import ModelError
from twinstage.text.bundle import TokenizerBundle

_LONGEST_TOKEN_FLOOR = 64  # characters
_TEXTS_TOGETHER, _CHARACTERS_TOGETHER = 64, 2**18  # an encoding takes many times the memory of its text


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE spells each byte as a character: by itself where that is printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _bytes_of_characters()


class TextTokenizer:
    """Encodes and decodes with the bundle's tokenizer; truncation and padding from its file are switched off."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        try:
            self._tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        except Exception as error:  # tokenizers raises plain Exception for a malformed document
            raise ModelError(f"the bundle's tokenizer cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, added ones included, by their spelling."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    @cached_property
    def longest_token_characters(self) -> int:
        """Characters of the longest spelling in the vocabulary: no text of n tokens has more than n times as many.

        Text that the tokenizer drops or takes for unknown is the exception, so the figure has a generous floor.
        """
        return max(_LONGEST_TOKEN_FLOOR, *map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out when asked to skip special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def special_ids_of(self, spellings: frozenset[str]) -> frozenset[int]:
        """The special tokens among these spellings."""
        found = (self._tokenizer.token_to_id(spelling) for spelling in spellings)
        return self.special_token_ids & frozenset(token_id for token_id in found if token_id is not None)

    @cached_property
    def added_token_ids(self) -> frozenset[int]:
        """Ids of tokens that are found in a text before it is split: their spelling is always that one token."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def has_byte_fallback(self) -> bool:
        """Whether tokens spelled <0x00> to <0xFF> are joined as bytes, a whole run at a time."""
        decoder = self._tokenizer.decoder
        return decoder is not None and b'"ByteFallback"' in decoder.__getstate__()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Split text into token ids, by default with the special tokens that the model expects around an input."""
        # Without offsets, which nobody wants here, it takes a fifth less time.
        (encoding,) = self._tokenizer.encode_batch_fast([self._prepared(text)], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_many(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """What `encode` gives for each text, computed on all cores, some texts at a time."""
        for some in _some_at_a_time(texts):
            yield from (encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(map(self._prepared, some))))

    @property
    def num_special_tokens(self) -> int:
        """How many special tokens are put around a single text."""
        return int(self._tokenizer.num_special_tokens_to_add(is_pair=False))

    @lru_cache(maxsize=64)  # noqa: B019 - a tokenizer lives as long as its model
    def prompt_tokens(self, prompt: str) -> int:
        """How many tokens at the beginning of an input are of `prompt`, by sentence-transformers' rule.

        They are counted in the prompt alone, without a special token at its end.
        """
        token_ids = self.encode(prompt) if prompt else []
        return len(token_ids) - bool(token_ids and token_ids[-1] in self.special_token_ids)

    def encode_truncated(self, text: str, *, max_tokens: int, keep_last: bool) -> list[int]:
        """Split text into at most `max_tokens` ids, special tokens included.

        `keep_last` cuts the beginning of the text, otherwise its end is cut. Special tokens are never cut, so a limit
        below their number gives them alone.
        """
        encoding = self._tokenizer.encode(self._prepared(text), add_special_tokens=False)
        room = max(0, max_tokens - self.num_special_tokens)
        encoding.truncate(room, direction="left" if keep_last else "right")
        return self._tokenizer.post_process(encoding, None, add_special_tokens=True).ids

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """Put two texts into one input as the tokenizer's own pair template says: token ids, and their types.

        With `max_tokens` the longer text loses tokens at its end, then both in turn, until all fit, special tokens
        included (Transformers calls this "longest_first"). Special tokens are never cut.
        """
        texts = [self._prepared(text) for text in (first, second)]
        whole = self._tokenizer.encode(texts[0], texts[1])
        if max_tokens is None or len(whole.ids) <= max_tokens:
            return whole.ids, whole.type_ids
        pair = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        room = max(0, max_tokens - self._tokenizer.num_special_tokens_to_add(is_pair=True))
        kept = _longest_first(len(pair[0]), len(pair[1]), room)
        for encoding, length in zip(pair, kept, strict=True):
            encoding.truncate(length)
        cut = self._tokenizer.post_process(pair[0], pair[1], add_special_tokens=True)
        # Not every post-processor sets the types, so they come from the whole input; its special tokens are all kept.
        types: list[int] = []
        for text, run in groupby(zip(whole.sequence_ids, whole.type_ids, strict=True), key=lambda token: token[0]):
            of_run = [token_type for _, token_type in run]
            types += of_run if text is None else of_run[: kept[text]]
        return cut.ids, types

    def shortened(self, text: str, *, max_tokens: int) -> str:
        """The beginning of a text, without the characters of the tokens that follow the first `max_tokens`."""
        offsets = self._tokenizer.encode(self._prepared(text), add_special_tokens=False).offsets
        if len(offsets) <= max_tokens:
            return text
        return text[: offsets[max_tokens - 1][1]] if max_tokens > 0 else ""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Join token ids into text. Ids that are not in the vocabulary give no text."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_piece(self, token_id: int) -> str:
        """The token as the vocabulary spells it ("Ġworld"); empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """The token's text inside a sentence (" world"); bytes that are no character by themselves show as U+FFFD."""
        alone = self.decode([token_id], skip_special_tokens=False)
        # Some decoders strip the space of the first token, so read the text off the second of two.
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(alone) :] if twice.startswith(alone) and len(twice) > len(alone) else alone

    @lru_cache(maxsize=32768)  # noqa: B019 - as above; each takes a few microseconds, and a row of them is asked for
    def spell(self, token_id: int) -> tuple[str, bytes]:
        """The token's text, and its bytes: of a part of a character, only they tell which part."""
        return self.token_text(token_id), self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes for which the token stands, in a text in UTF-8."""
        piece = self.token_piece(token_id)
        if self.is_fallback_byte(token_id):
            return bytes.fromhex(piece[3:5])
        if self._is_byte_level and token_id not in self.added_token_ids and set(piece) <= _BYTES.keys():
            return bytes(map(_BYTES.__getitem__, piece))
        return self.token_text(token_id).encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._tokenizer.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def is_textless(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether `decode` drops this id before it joins the others."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return True
        return self._tokenizer.id_to_token(token_id) is None

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether this token is one byte of a run that is decoded as a whole."""
        if not self.has_byte_fallback:
            return False
        piece = self.token_piece(token_id)
        return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")

    def _prepared(self, text: str) -> str:
        return text.lower() if self.bundle.lower_case else text


def _some_at_a_time(texts: Sequence[str]) -> Iterator[list[str]]:
    some: list[str] = []
    size = 0
    for text in texts:
        if some and (len(some) == _TEXTS_TOGETHER or size + len(text) > _CHARACTERS_TOGETHER):
            yield some
            some, size = [], 0
        some.append(text)
        size += len(text)
    if some:
        yield some


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many of `first` and `second` tokens are kept when both together have room for `room`."""
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)  # of two that are cut alike, the longer one keeps the odd token
    kept = shorter, room - shorter
    return kept if first <= second else (kept[1], kept[0])
