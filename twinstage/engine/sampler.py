"""From logits to tokens.

The order, each step on the result of the one before: logit bias, penalties, suppression of stop tokens before
`min_tokens`; then greedy choice, or temperature, top-k, top-p, min-p and a draw. Ties always go to the lower token id.

The random number of a token is a pure function of (seed, choice index, position), so any worker draws the same token
at the same place. Each row is worked on alone, in float64 and in one thread: a row does not depend on its neighbours.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from twinstage.engine.sequence import Sequence
from twinstage.errors import ComputeFailed
from twinstage.types import ProducedToken, SamplingParameters, TokenAlternative, TokenLogprobs

Row = NDArray[np.float64]  # [vocab]
Ids = NDArray[np.int64]  # [count], token ids

_RANDOM_KEY = struct.Struct("<QIQ")  # seed, choice index, position
_UINT64_MASK = (1 << 64) - 1
_FIRST_NUCLEUS_TRY = 256  # most likely tokens to sort first; nearly always they hold the whole nucleus
_NUCLEUS_GROWTH = 8


class Sampler:
    """Draws the next token of each sequence. Stateless."""

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[ProducedToken]:
        """One token per row of `logits` (float32 `[len(sequences), vocab]`)."""
        return [self.sample_one(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]

    def sample_one(self, logits: torch.Tensor, sequence: Sequence) -> ProducedToken:
        """The token after the last one of `sequence`, from its `logits` `[vocab]`.

        Raises ComputeFailed when they are not numbers.
        """
        raw: Row = logits.detach().to(device="cpu", dtype=torch.float64).numpy()
        if not np.isfinite(raw.max()):  # NaN spreads to the maximum
            raise ComputeFailed(f"the model's logits for request {sequence.request_id} are not numbers")
        adjusted = _adjust(raw, sequence)
        sampling = sequence.spec.sampling
        if sampling.is_greedy:
            token_id = int(adjusted.argmax())
        else:
            uniform = random_uniform(sampling, position=len(sequence.output_token_ids))
            token_id = _draw(_probabilities(adjusted, sampling), uniform)
        return ProducedToken(token_id=token_id, logprobs=_logprobs(raw, token_id, count=sequence.spec.logprobs))


def random_uniform(sampling: SamplingParameters, *, position: int) -> float:
    """The random number in [0, 1) for the output token at `position`, with 53 random bits."""
    key = _RANDOM_KEY.pack(sampling.seed & _UINT64_MASK, sampling.choice_index, position)
    return float(xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def _adjust(raw: Row, sequence: Sequence) -> Row:
    """Bias, penalties and suppressed stop tokens applied; `raw` is left alone."""
    spec, sampling = sequence.spec, sequence.spec.sampling
    adjusted = raw.copy()
    for token_id, bias in sampling.logit_bias.items():
        if token_id < len(adjusted):
            adjusted[token_id] += bias
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(sequence.token_ids))
        values = adjusted[seen]
        adjusted[seen] = np.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if (sampling.presence_penalty or sampling.frequency_penalty) and sequence.output_token_ids:
        produced, counts = np.unique(np.asarray(sequence.output_token_ids), return_counts=True)
        adjusted[produced] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if len(sequence.output_token_ids) < spec.min_tokens and spec.stop_token_ids:
        adjusted[[token_id for token_id in spec.stop_token_ids if token_id < len(adjusted)]] = -np.inf
    return adjusted


def _probabilities(adjusted: Row, sampling: SamplingParameters) -> Row:
    """Probability of each token, not normalised; 0 for those that were filtered out."""
    weights: Row = np.exp((adjusted - adjusted.max()) / sampling.temperature)  # the most likely one has weight 1
    if 0 < sampling.top_k < len(weights):
        weights = _keep_only(weights, _best_ids(weights, sampling.top_k))
    if sampling.top_p < 1.0:
        weights = _keep_only(weights, _nucleus(weights, sampling.top_p))
    if sampling.min_p > 0.0:
        weights = np.where(weights >= sampling.min_p, weights, 0.0)
    return weights


def _keep_only(weights: Row, token_ids: Ids) -> Row:
    """The weights of some tokens, those of all others set to 0."""
    kept: Row = np.zeros_like(weights)
    kept[token_ids] = weights[token_ids]
    return kept


def _best_ids(values: Row, count: int) -> Ids:
    """Ids of the `count` greatest values, greatest first, equal ones by id."""
    count = min(count, len(values))
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    level = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.concatenate([above[np.argsort(-values[above], kind="stable")], level])


def _nucleus(weights: Row, top_p: float) -> Ids:
    """The fewest most likely tokens that reach the share `top_p` of the total weight, most likely first."""
    wanted = top_p * float(weights.sum())
    possible = np.flatnonzero(weights)  # few after top-k, and a partition among many zeros is slow
    count = min(_FIRST_NUCLEUS_TRY, len(possible))
    while True:
        best = possible[_best_ids(weights[possible], count)]
        cumulative = np.cumsum(weights[best])
        if cumulative[-1] >= wanted or count == len(possible):
            return best[: int(np.searchsorted(cumulative, wanted)) + 1]
        count = min(_NUCLEUS_GROWTH * count, len(possible))


def _draw(weights: Row, uniform: float) -> int:
    """Inverse of the cumulative distribution, in token-id order."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if index == len(weights):  # uniform * total was rounded up to the total
        index = int(np.flatnonzero(weights)[-1])
    return index


def _logprobs(raw: Row, token_id: int, *, count: int | None) -> TokenLogprobs | None:
    """Log probabilities before all adjustments; None unless asked for."""
    if count is None:
        return None
    peak = raw.max()
    log_total = peak + np.log(np.exp(raw - peak).sum())
    best = _best_ids(raw, count) if count else ()
    return TokenLogprobs(
        logprob=float(raw[token_id] - log_total),
        rank=1 + int(np.count_nonzero(raw > raw[token_id])),
        top=tuple(TokenAlternative(int(best_id), float(raw[best_id] - log_total)) for best_id in best),
    )
