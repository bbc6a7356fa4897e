"""From logits to tokens.

The order, each step on the result of the one before: logit bias, penalties, suppression of stop tokens before
`min_tokens`, the tokens that the grammar of the output allows; then greedy choice, or temperature, top-k, top-p, min-p
and a draw. Ties always go to the lower token id.

The random number of a token is a pure function of (seed, choice index, position), so any worker draws the same token
at the same place. Each row is worked on alone and in one thread: a row does not depend on its neighbours.

A whole row is touched as rarely as possible, since a row has tens of thousands of entries and a step has a row for
each sequence: a greedy choice reads it once, top-k and min-p look only at the tokens that can be kept, and a draw from
all tokens adds up pieces of the row before it looks into one. Rows stay in the float32 in which they come; what is
added up over many tokens is added in float64.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from twinstage.engine.sequence import Sequence
from twinstage.errors import ComputeFailed, InvalidRequest, Unavailable
from twinstage.grammar.matcher import SequenceMatcher, refused
from twinstage.types import ProducedToken, SamplingParameters, TokenAlternative, TokenLogprobs

Logits = NDArray[np.float32]  # [rows, vocab]
Row = NDArray[np.float32]  # [vocab]
Weights = NDArray[np.float64]  # [count], of some tokens
Ids = NDArray[np.int64]  # [count], token ids
Sampled = ProducedToken | Unavailable | InvalidRequest  # the latter two say why there is no token

_RANDOM_KEY = struct.Struct("<QIQ")  # seed, choice index, position
_UINT64_MASK = (1 << 64) - 1
_FIRST_NUCLEUS_TRY = 256  # most likely tokens to sort first; nearly always they hold the whole nucleus
_NUM_BANDS = 1024  # of weights that are alike, where they do not: 32 to each power of two, the rest in the last
_BITS_BELOW_BAND = 23 - 5  # of a float32's mantissa
_BITS_OF_ONE = np.int32(np.float32(1.0).view(np.int32))
_LEAST = float(np.finfo(np.float32).min)
_PIECE = 256  # tokens that a draw from a whole row adds up before it looks at single ones
_DENSE = 8  # of so many tokens, a grammar that allows one is worth a pass over the whole row
_GROUPS_PER_WANTED = 4  # groups of tokens, for each wanted one, whose greatest values bound the wanted ones from below


class Sampler:
    """Draws the next token of each sequence. Keeps no state between calls but scratch memory; for one thread."""

    def __init__(self) -> None:
        self._scratch: Row = np.empty(0, dtype=np.float32)

    def sample(self, logits: Logits, sequences: list[Sequence]) -> list[Sampled]:
        """The token after the last one of each sequence, from its row of `logits` (`[len(sequences), vocab]`).

        In the place of a token there is ComputeFailed where the logits are not numbers, InvalidRequest where the
        grammar of the output allows none, and Unavailable where the process that matches it ended. The logits are left
        alone.
        """
        if logits.shape[1] != len(self._scratch):
            self._scratch = np.empty(logits.shape[1], dtype=np.float32)
        return [self._sample_row(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]

    def _sample_row(self, raw: Row, sequence: Sequence) -> Sampled:
        best_id = int(raw.argmax())
        if not math.isfinite(raw[best_id]):  # NaN counts as the maximum
            return ComputeFailed("the model's logits for this request are not numbers")
        values, allowed = _adjust(raw, sequence), None
        if sequence.matcher is not None:
            try:
                values, allowed = _constrained(values, sequence.matcher, sequence.spec.stop_token_ids)
            except (InvalidRequest, Unavailable) as error:
                return error
        if values is not raw:
            best_id = int(values.argmax())
            if not math.isfinite(values[best_id]):
                return _nothing_left(sequence)
        sampling = sequence.spec.sampling
        if sampling.is_greedy:
            token_id = best_id
        else:
            uniform = random_uniform(sampling, position=len(sequence.output_token_ids))
            token_id = self._draw_from(values, float(values[best_id]), sampling, uniform)
        if allowed is not None:
            token_id = int(allowed[token_id])
        count = sequence.spec.logprobs
        return ProducedToken(
            token_id=token_id, logprobs=None if count is None else token_logprobs(raw, token_id, count=count)
        )

    def _draw_from(self, values: Row, peak: float, sampling: SamplingParameters, uniform: float) -> int:
        """Filter and draw. Weights are relative to the most likely token, whose value is `peak`."""
        kept = _best_ids(values, sampling.top_k) if 0 < sampling.top_k < len(values) else None
        if kept is not None and sampling.top_p < 1.0:
            weights = _weights_of(values[kept], peak, sampling.temperature)
            kept = kept[: _nucleus_size(np.cumsum(weights), sampling.top_p * float(weights.sum()))]
        elif kept is None and sampling.top_p < 1.0:
            row = self._weights(values, peak, sampling.temperature)
            wanted = sampling.top_p * float(row.sum())
            kept = _small_nucleus(values, row, wanted)
            if kept is None:
                _drop_unlikely(row, wanted)
                row[row < sampling.min_p] = 0.0
                return _draw(row, uniform)
        elif kept is None and sampling.min_p > 0.0:
            kept = _likely_ids(values, peak, sampling)
        if kept is None:
            return _draw(self._weights(values, peak, sampling.temperature), uniform)
        kept = np.sort(kept)
        weights = _weights_of(values[kept], peak, sampling.temperature)
        weights[weights < sampling.min_p] = 0.0
        return int(kept[_draw(weights, uniform)])

    def _weights(self, values: Row, peak: float, temperature: float) -> Row:
        """The weight of every token, in the scratch memory."""
        scratch = self._scratch[: len(values)]
        np.subtract(values, np.float32(peak), out=scratch)
        np.divide(scratch, np.float32(temperature), out=scratch)
        return np.exp(scratch, out=scratch)


def _constrained(values: Row, matcher: SequenceMatcher, end_ids: frozenset[int]) -> tuple[Row, Ids | None]:
    """The values of the tokens that a grammar allows, and their ids.

    Where it allows many: the values of all tokens, those of the others -inf. Raises InvalidRequest where it allows
    none.
    """
    mask = matcher.allowed(end_ids, vocab_size=len(values))
    if _DENSE * np.count_nonzero(mask) > len(mask):
        return np.where(mask, values, np.float32(-np.inf)), None
    allowed = np.flatnonzero(mask)
    return values[allowed], allowed  # what follows chooses among these, and knows no others


def _nothing_left(sequence: Sequence) -> ComputeFailed | InvalidRequest:
    if sequence.matcher is not None:
        return refused("allows only tokens that stopping.min_tokens forbids: those of stopping.stop_token_ids")
    return ComputeFailed("no token is left to choose from")


def random_uniform(sampling: SamplingParameters, *, position: int) -> float:
    """The random number in [0, 1) for the output token at `position`, with 53 random bits."""
    key = _RANDOM_KEY.pack(sampling.seed & _UINT64_MASK, sampling.choice_index, position)
    return float(xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def _adjust(raw: Row, sequence: Sequence) -> Row:
    """Bias, penalties and suppressed stop tokens applied, to a copy; `raw` itself where there are none.

    What is changed is computed in float64 and rounded once.
    """
    changed = _changed_ids(sequence, vocab_size=len(raw))
    if not len(changed):
        return raw
    spec, sampling = sequence.spec, sequence.spec.sampling
    values = raw[changed].astype(np.float64)
    for token_id, bias in sampling.logit_bias.items():
        if token_id < len(raw):
            values[np.searchsorted(changed, token_id)] += bias
    if sampling.repetition_penalty != 1.0:
        seen = np.searchsorted(changed, np.unique(np.asarray(sequence.token_ids)))
        penalty = sampling.repetition_penalty
        values[seen] = np.where(values[seen] > 0, values[seen] / penalty, values[seen] * penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and sequence.output_token_ids:
        produced, counts = np.unique(np.asarray(sequence.output_token_ids), return_counts=True)
        places = np.searchsorted(changed, produced)
        values[places] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if _suppresses_stops(sequence):
        stops = [token_id for token_id in spec.stop_token_ids if token_id < len(raw)]
        values[np.searchsorted(changed, stops)] = -np.inf
    # A penalty near 0 takes values out of float32's range; what is forbidden stays so.
    adjusted = raw.copy()
    adjusted[changed] = np.where(np.isneginf(values), values, np.clip(values, _LEAST, -_LEAST))
    return adjusted


def _changed_ids(sequence: Sequence, *, vocab_size: int) -> Ids:
    """The tokens, ascending, whose logits the sequence's parameters change."""
    spec, sampling = sequence.spec, sequence.spec.sampling
    ids: list[int] = [*sampling.logit_bias]
    if sampling.repetition_penalty != 1.0:
        ids += sequence.token_ids
    elif sampling.presence_penalty or sampling.frequency_penalty:
        ids += sequence.output_token_ids
    if _suppresses_stops(sequence):
        ids += spec.stop_token_ids
    if not ids:
        return np.empty(0, dtype=np.int64)
    unique: Ids = np.unique(np.asarray(ids, dtype=np.int64))
    return unique[: np.searchsorted(unique, vocab_size)]


def _suppresses_stops(sequence: Sequence) -> bool:
    return len(sequence.output_token_ids) < sequence.spec.min_tokens and bool(sequence.spec.stop_token_ids)


def _weights_of(values: Row, peak: float, temperature: float) -> Weights:
    """The weights of some tokens; the most likely one of the row has weight 1."""
    weights: Weights = np.exp((values.astype(np.float64) - peak) / temperature)
    return weights


def _likely_ids(values: Row, peak: float, sampling: SamplingParameters) -> Ids:
    """Ids of all tokens that `min_p` keeps, ascending, and a few more: what rounding could take away."""
    floor = peak + sampling.temperature * (math.log(sampling.min_p) - 1e-3) - 1e-3
    return np.flatnonzero(values >= np.float32(max(floor, _LEAST)))


def _best_ids(values: Row, count: int) -> Ids:
    """Ids of the `count` greatest values, greatest first, equal ones by id."""
    count = min(count, len(values))
    possible = np.flatnonzero(values >= _bound(values, count))
    candidates = values[possible]
    threshold = np.partition(candidates, len(candidates) - count)[len(candidates) - count]
    above = np.flatnonzero(candidates > threshold)
    level = np.flatnonzero(candidates == threshold)[: count - len(above)]
    best: Ids = possible[np.concatenate([above[np.argsort(-candidates[above], kind="stable")], level])]
    return best


def _bound(values: Row, count: int) -> np.float32:
    """A value that at least `count` of `values` reach, and usually not many more: far cheaper than the exact one.

    It is the `count`-th of the greatest values of groups, each of which stands for itself.
    """
    group = len(values) // (_GROUPS_PER_WANTED * count)
    if group < 2:
        return np.float32(-np.inf)
    num_groups = len(values) // group
    greatest = values[: group * num_groups].reshape(group, num_groups).max(axis=0)
    bound: np.float32 = np.partition(greatest, num_groups - count)[num_groups - count]
    return bound


def _small_nucleus(values: Row, weights: Row, wanted: float) -> Ids | None:
    """The fewest most likely tokens that reach the weight `wanted`, most likely first; None when they are many."""
    best = _best_ids(values, _FIRST_NUCLEUS_TRY)
    cumulative = np.cumsum(weights[best], dtype=np.float64)
    if cumulative[-1] < wanted and len(best) < len(values):
        return None
    return best[: _nucleus_size(cumulative, wanted)]


def _drop_unlikely(weights: Row, wanted: float) -> None:
    """Set to 0 all weights but the fewest greatest that reach `wanted`, equal ones by id.

    Instead of all tokens, only those of the band of like weights in which the nucleus ends are sorted.
    """
    # The bits of positive floats order as they do: exponent and leading bits of the mantissa make the band.
    bands = np.minimum((_BITS_OF_ONE - weights.view(np.int32)) >> _BITS_BELOW_BAND, _NUM_BANDS - 1)
    reached = np.cumsum(np.bincount(bands, weights=weights, minlength=_NUM_BANDS))
    last = min(int(np.searchsorted(reached, wanted)), _NUM_BANDS - 1)
    level = np.flatnonzero(bands == last)
    level = level[np.argsort(-weights[level], kind="stable")]
    cumulative = np.cumsum(weights[level], dtype=np.float64) + (reached[last - 1] if last else 0.0)
    weights[bands > last] = 0.0
    weights[level[_nucleus_size(cumulative, wanted) :]] = 0.0


def _nucleus_size(cumulative: Weights, wanted: float) -> int:
    return int(np.searchsorted(cumulative, wanted)) + 1


def _draw(weights: Row | Weights, uniform: float) -> int:
    """Inverse of the cumulative distribution, in token-id order: first the piece of the row, then the token in it."""
    pieces = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _PIECE)), dtype=np.float64)
    target = uniform * float(pieces[-1])
    piece = int(np.searchsorted(pieces, target, side="right"))
    if piece == len(pieces):  # uniform * total was rounded up to the total
        return int(np.flatnonzero(weights)[-1])
    start = piece * _PIECE
    inside = np.cumsum(weights[start : start + _PIECE], dtype=np.float64)
    index = int(np.searchsorted(inside, target - (pieces[piece - 1] if piece else 0.0), side="right"))
    if index == len(inside):  # the piece's sum, added up in another order, was a little greater
        index = int(np.flatnonzero(weights[start : start + _PIECE])[-1])
    return start + index


def token_logprobs(raw: Row, token_id: int, *, count: int) -> TokenLogprobs:
    """Log probabilities before all adjustments, of a token and of the `count` most likely ones."""
    shifted = raw.astype(np.float64)
    peak = float(shifted.max())
    shifted -= peak
    log_total = peak + math.log(float(np.exp(shifted, out=shifted).sum()))
    best = _best_ids(raw, count) if count else ()
    return TokenLogprobs(
        logprob=float(raw[token_id]) - log_total,
        rank=1 + int(np.count_nonzero(raw > raw[token_id])),
        top=tuple(TokenAlternative(int(best_id), float(raw[best_id]) - log_total) for best_id in best),
    )
