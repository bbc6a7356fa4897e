"""Whether two tokenizers map tokens to ids identically, as models must whose token ids are compared."""

from __future__ import annotations

from twinstage.errors import ConfigError
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.tokenizer import TextTokenizer


def check_same_tokens(target: TokenizerBundle, draft: TokenizerBundle, *, names: tuple[str, str]) -> None:
    """Raise ConfigError that names the first token with different ids, both ids and both sizes.

    `names` are those of the two models. First is the token of the lowest id.
    """
    if target.tokenizer_json == draft.tokenizer_json:
        return
    ours, theirs = TextTokenizer(target).vocabulary, TextTokenizer(draft).vocabulary
    different = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if not different:
        return
    first = min(different, key=lambda token: (_lowest(ours.get(token), theirs.get(token)), token))
    raise ConfigError(
        f"the draft model {names[1]} does not map tokens to ids as {names[0]} does: {first!r} is "
        f"{_told(ours.get(first))} in {names[0]} and {_told(theirs.get(first))} in {names[1]}; "
        f"their vocabularies have {len(ours)} and {len(theirs)} tokens"
    )


def _lowest(*token_ids: int | None) -> int:
    return min(token_id for token_id in token_ids if token_id is not None)


def _told(token_id: int | None) -> str:
    return "no token" if token_id is None else f"id {token_id}"
