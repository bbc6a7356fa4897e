"""Token ids to text, one at a time: joining what is returned gives the tokenizer's decode of the whole sequence.

A token may hold part of a character, and how a decoder renders a token can depend on the tokens before it. So the
last few tokens are kept as a window that is decoded again with each new one, and only text that later tokens cannot
change is let out.
"""

from __future__ import annotations

from twinstage.text.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Decodes one sequence. A token costs the decoding of a few tokens, whatever the sequence's length.

    Held back are the bytes of an unfinished UTF-8 character, and whole runs of byte-fallback tokens, because such a
    run is decoded as a whole: one wrong byte changes the rendering of all of it.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> None:
        """Special tokens of the ids `kept` are not skipped."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept = kept
        self._window: list[int] = []  # tokens of which the last may still be incomplete
        self._window_text = ""  # their decoding, when the last token was not part of a byte run
        self._num_released = 0  # characters of the window's decoding that were let out
        self._num_settled = 0  # tokens of the window before the last release: context for the next one
        self._in_byte_run = False

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain."""
        skips = self._skip_special_tokens and token_id not in self._kept
        if self._tokenizer.is_textless(token_id, skip_special_tokens=skips):
            return ""
        self._window.append(token_id)
        self._in_byte_run = self._tokenizer.is_fallback_byte(token_id)
        if self._in_byte_run:
            return ""
        previous_text, self._window_text = self._window_text, self._decode(self._window)
        if self._window_text.endswith(_REPLACEMENT):
            released = self._release(len(self._window_text) - 1)
            self._restart_after_broken_bytes(previous_text)
            return released
        released = self._release(len(self._window_text))
        if released:
            self._slide()
        return released

    def flush(self) -> str:
        """Return what was held back: the sequence has ended."""
        self._window_text = self._decode(self._window)
        return self._release(len(self._window_text))

    def _release(self, end: int) -> str:
        """Let out the window's text up to character `end`."""
        text = self._window_text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return text

    def _slide(self) -> None:
        """Forget the tokens before the previous release; those since then are the context of the next token."""
        del self._window[: self._num_settled]
        self._num_settled = len(self._window)
        self._window_text = self._decode(self._window)
        self._num_released = len(self._window_text)

    def _restart_after_broken_bytes(self, previous_text: str) -> None:
        """Start the window at the last token when the bytes before it turned out to be broken.

        When the token's own decoding is exactly what it added, it completed nothing of what came before. This keeps
        the window short in a long run of bytes that form no characters.
        """
        alone = self._decode(self._window[-1:])
        if len(self._window) == 1 or not alone or self._window_text != previous_text + alone:
            return
        self._window = self._window[-1:]
        self._window_text = alone
        self._num_released = len(alone) - 1
        self._num_settled = 0

    def _decode(self, token_ids: list[int]) -> str:
        # The window holds no token to skip, only perhaps one to keep.
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens and not self._kept)
