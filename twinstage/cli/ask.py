"""The commands that call a router: generate, chat, embed, classify, score, rerank, workers, drain, models and so on."""

from __future__ import annotations

import json
from collections.abc import Sequence

from twinstage.cli.chat_display import AnswerDisplay
from twinstage.cli.json_output import print_json, show_json
from twinstage.cli.output import (
    console_for_errors,
    console_for_tables,
    models_table,
    placement_line,
    ranking_table,
    state_of,
    timing_line,
    usage_line,
    workers_table,
)
from twinstage.client import ChatMessage, Embeddings, GenerationStream, Options, Summary, Tool, TwinstageClient
from twinstage.client.results import WorkerInfo
from twinstage.types import Finish, PoolingTask, Truncation

_SHOWN_NUMBERS = 4


def generate(client: TwinstageClient, prompt: str, *, options: Options, as_json: bool) -> None:
    """Continue a prompt."""
    with client, client.generate_stream(prompt, options) as stream:
        _print_stream(stream, as_json=as_json)


def chat(
    client: TwinstageClient, prompt: str, *, options: Options, system: str, tools: Sequence[Tool], as_json: bool
) -> None:
    """Answer one message of the user."""
    messages = [ChatMessage(role="system", content=system)] if system else []
    messages.append(ChatMessage(role="user", content=prompt))
    with client, client.chat_stream(messages, options, tools=tools) as stream:
        if as_json:
            show_json(stream)
            return
        display, finish = AnswerDisplay(), None
        for delta in stream:
            display.delta(delta)
            finish = delta.finish or finish
        display.end(stream.message())
    if stream.summary is not None:
        _print_totals(stream.summary, finish=finish.reason.value if finish is not None else "")


def embed(
    client: TwinstageClient,
    texts: Sequence[str],
    *,
    model: str,
    normalize: bool,
    dimensions: int | None,
    truncation: Truncation | None,
    prompt_name: str | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Embed texts: one line each, or one JSON document with all numbers."""
    with client:
        embeddings = client.embed(
            texts,
            model=model,
            normalize=normalize,
            dimensions=dimensions,
            truncation=truncation,
            prompt_name=prompt_name,
            timeout_s=timeout_s,
        )
    if as_json:
        print_json(embeddings)
        return
    _print_vectors(texts, embeddings)


def classify(
    client: TwinstageClient,
    texts: Sequence[str],
    *,
    model: str,
    truncation: Truncation | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """The probabilities of a model's labels: one line per text, the likeliest first, or one JSON document."""
    with client:
        found = client.encode(texts, task=PoolingTask.CLASSIFY, model=model, truncation=truncation, timeout_s=timeout_s)
        labels = {served.name: served.labels for served in client.models()}.get(found.model, ())
    rows = [dict(zip(labels, result.rows[0], strict=False)) for result in found.results]
    if as_json:
        print(json.dumps({"model": found.model, "probabilities": rows}, ensure_ascii=False))
        return
    for text, row in zip(texts, rows, strict=True):
        ranked = sorted(row.items(), key=lambda entry: -entry[1])
        shown = ", ".join(f"{label} {probability:.4f}" for label, probability in ranked)
        print(f"{shown}  {json.dumps(text, ensure_ascii=False)}")
    _print_totals(found.summary, finish="")


def score(
    client: TwinstageClient,
    query: str,
    documents: Sequence[str],
    *,
    model: str,
    truncation: Truncation | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Score documents: one line each, in order."""
    with client:
        found = client.score(query, documents, model=model, truncation=truncation, timeout_s=timeout_s)
    if as_json:
        print_json(found)
        return
    for value, document in zip(found.scores, documents, strict=True):
        print(f"{value:9.6f}  {json.dumps(document, ensure_ascii=False)}")
    _print_totals(found.summary, finish="")


def rerank(
    client: TwinstageClient,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None,
    model: str,
    truncation: Truncation | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Sort documents: a table, the best first."""
    with client:
        ranking = client.rerank(query, documents, top_n=top_n, model=model, truncation=truncation, timeout_s=timeout_s)
    if as_json:
        print_json(ranking)
        return
    console_for_tables().print(ranking_table(ranking, documents))
    _print_totals(ranking.summary, finish="")


def workers(client: TwinstageClient, *, as_json: bool) -> None:
    """List the workers."""
    with client:
        found = client.workers()
    if as_json:
        print_json(found)
    else:
        console_for_tables().print(workers_table(found))


def drain(client: TwinstageClient, worker_id: str, *, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Drain a worker, and say how it is."""
    with client:
        _print_worker(client.drain_worker(worker_id, wait=wait, timeout_s=timeout_s), as_json=as_json)


def undrain(client: TwinstageClient, worker_id: str, *, as_json: bool) -> None:
    """End the draining of a worker, and say how it is."""
    with client:
        _print_worker(client.undrain_worker(worker_id), as_json=as_json)


def _print_worker(worker: WorkerInfo, *, as_json: bool) -> None:
    if as_json:
        print_json(worker)
    else:
        print(f"{worker.worker_id}  {state_of(worker)}")


def reset_prefix_cache(client: TwinstageClient, *, model: str, worker_id: str, as_json: bool) -> None:
    """Empty prefix caches, and say which."""
    with client:
        told = client.reset_prefix_cache(model=model, worker_id=worker_id)
    if as_json:
        print_json(told)
    else:
        for reset in told:
            print(f"{reset.worker_id}  {reset.dropped_blocks} blocks dropped")


def models(client: TwinstageClient, *, as_json: bool) -> None:
    """List the models."""
    with client:
        found = client.models()
    if as_json:
        print_json(found)
    else:
        console_for_tables().print(models_table(found))


def _print_stream(stream: GenerationStream, *, as_json: bool) -> None:
    if as_json:
        show_json(stream)
        return
    texts: list[str] = []
    finish: Finish | None = None
    for delta in stream:
        texts.append(delta.text)
        finish = delta.finish or finish
        print(delta.text, end="", flush=True)
    if texts and not "".join(texts).endswith("\n"):
        print()
    if stream.summary is not None:
        _print_totals(stream.summary, finish=finish.reason.value if finish is not None else "")


def _print_totals(summary: Summary, *, finish: str) -> None:
    console = console_for_errors()
    for line in (usage_line(summary, finish=finish), timing_line(summary.timing), placement_line(summary)):
        console.print(line, style="dim", soft_wrap=True, markup=False)


def _print_vectors(texts: Sequence[str], embeddings: Embeddings) -> None:
    for text, vector in zip(texts, embeddings.vectors, strict=True):
        numbers = ", ".join(f"{number:.6f}" for number in vector[:_SHOWN_NUMBERS])
        more = ", ..." if len(vector) > _SHOWN_NUMBERS else ""
        print(f"{len(vector)} dimensions  [{numbers}{more}]  {json.dumps(text, ensure_ascii=False)}")
    _print_totals(embeddings.summary, finish="")
