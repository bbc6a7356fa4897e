"""Speculative decoding on the decode worker: tokens per second with guesses from the request itself, with a draft model
that mostly agrees, and without any.

The draft model is the demo model in 8 bits, which says the same as in float32 nearly always, in a third of the time.
"""

from __future__ import annotations

import contextlib

from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.serving import greedy, serving
from bench.summary import ratios
from twinstage.client import TwinstageClient
from twinstage.client.results import Summary
from twinstage.errors import InternalError

_PARAGRAPH = (
    "The parcel with number 4711 was sent from Hamburg on Monday, reached Utrecht on Tuesday and was delivered in "
    "Ghent on Wednesday, where Mrs Peeters signed for it. "
)
_PROMPTS = {
    "repetitive text": _PARAGRAPH * 4,
    "ordinary text": "A clockmaker lived in a small town by the sea. One morning",
}
_PLAIN, _NGRAM, _DRAFT = "without", "ngram", "draft model"
_FLAGS: dict[str, tuple[str, ...]] = {
    _PLAIN: (),
    _NGRAM: ("--speculative", "ngram"),
    _DRAFT: ("--speculative", "draft_model", "--draft-model", "demo", "--draft-weights", "int8"),
}
_TARGETS = {
    ("repetitive text", _NGRAM): Target.at_least(1.5),
    ("ordinary text", _NGRAM): Target.at_least(0.9),
    ("ordinary text", _DRAFT): Target.at_least(1.1),
}


def measure(context: Context) -> RowResult:
    max_tokens = 64 if context.quick else 160
    found: dict[tuple[str, str], list[Summary]] = {(case, way): [] for case in _PROMPTS for way in _FLAGS}
    with contextlib.ExitStack() as stack:
        clients: dict[str, TwinstageClient] = {}
        for way, flags in _FLAGS.items():
            cluster = serving(
                context,
                threads=context.engines.threads,
                kv_cache_bytes="256MiB",
                worker_flags=("--weights", "fp32"),
                decode_flags=flags,
            )
            address = stack.enter_context(cluster).address
            clients[way] = stack.enter_context(TwinstageClient(address))
        for case, prompt in _PROMPTS.items():
            texts = {_generate(client, prompt, max_tokens)[0] for client in clients.values()}  # warm
            if len(texts) != 1:
                raise InternalError(f"{case}: the answers differ")
            for round_number in range(context.rounds):
                context.progress(f"speculative decoding, {case}, round {round_number + 1}")
                for way, client in clients.items():
                    found[case, way].append(_generate(client, prompt, max_tokens)[1])
    return _result(found)


def _generate(client: TwinstageClient, prompt: str, max_tokens: int) -> tuple[str, Summary]:
    answer = client.generate(prompt, greedy(max_tokens))
    return answer.text, answer.summary


def _rates(summaries: list[Summary]) -> list[float]:
    """Tokens per second of the decode worker."""
    return [(summary.usage.completion_tokens - 1) / summary.timing.decode_s for summary in summaries]


def _result(found: dict[tuple[str, str], list[Summary]]) -> RowResult:
    measurements, comparisons = [], []
    for (case, way), summaries in found.items():
        values = {("decode", "tokens/s"): _rates(summaries)}
        if way != _PLAIN:
            usages = [summary.usage for summary in summaries]
            values["guesses that were right", "%"] = [
                100 * usage.accepted_draft_tokens / max(1, usage.proposed_draft_tokens) for usage in usages
            ]
            comparisons.append(
                Comparison(
                    case=case,
                    what=f"decode, {way} / without",
                    values=ratios(_rates(summaries), _rates(found[case, _PLAIN])),
                    target=_TARGETS.get((case, way)),
                )
            )
        for (quantity, unit), numbers in values.items():
            measurements.append(Measurement(case=case, engine=way, quantity=quantity, unit=unit, values=numbers))
    return RowResult(measurements=measurements, comparisons=comparisons)


ROW = Row(name="speculative", title="Speculative decoding", measure=measure, limit_s=300)
