"""How many rows one pass may have so that a row is computed to the same bits whatever else is in the pass.

A matrix product of one row, of two and of many take different ways through the BLAS, which add up in different orders.
Which numbers of rows agree is not documented for any BLAS, so it is tried: on the model itself, with the same tokens at
every place of passes of several widths. One row alone always agrees with itself.
"""

from __future__ import annotations

import torch

from twinstage.models.adapt import PagedModel

WIDTHS = (1, 4, 8, 16, 32, 64)
_NUM_TOKENS = 3  # different ones, so that a row has neighbours of its kind and of others


def widths_of_equal_rows(model: PagedModel) -> tuple[int, ...]:
    """The widths, in ascending order, among which a row comes out the same at every place; the widest such set."""
    families: list[tuple[torch.Tensor, list[int]]] = []
    for width in WIDTHS:
        outcome = _outcome(model, width)
        if outcome is None:
            continue
        for known, family in families:
            if torch.equal(known, outcome):
                family.append(width)
                break
        else:
            families.append((outcome, [width]))
    return tuple(max((family for _, family in families), key=max))


def _outcome(model: PagedModel, width: int) -> torch.Tensor | None:
    """The logits `[_NUM_TOKENS, vocab]` of the trial tokens in passes of `width` rows; None when places differ."""
    reference: torch.Tensor | None = None
    for turn in range(_NUM_TOKENS):
        kinds = (torch.arange(width) + turn) % _NUM_TOKENS
        logits = model.forward_alone((kinds * 7919 + 13) % model.vocab_size, position_ids=kinds + 1)
        if reference is None:
            reference = logits.new_full((_NUM_TOKENS, logits.shape[1]), torch.nan)
        for place, kind in enumerate(kinds.tolist()):
            if torch.isnan(reference[kind]).all():
                reference[kind] = logits[place]
            elif not torch.equal(reference[kind], logits[place]):
                return None
    return reference
