"""`twinstage embed`, `classify` and `score` on files: with progress, and a run that was killed goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from twinstage.cli.batch_files import Output, Records, check_output
from twinstage.cli.output import console_for_errors
from twinstage.client import TwinstageClient
from twinstage.errors import ConfigError, InternalError, InvalidRequest, PoisonedRequest, TwinstageError
from twinstage.types import PoolingTask, Task, Truncation

PAIRS_PER_CALL = 64
BYTES_PER_CALL = 1024 * 1024
MOST_DOCUMENTS = 2048  # of a call, as docs/limits.md has it


def embed(
    client: TwinstageClient,
    input_path: Path,
    output_path: Path,
    *,
    model: str,
    normalize: bool,
    dimensions: int | None,
    truncation: Truncation | None,
    prompt_name: str | None,
) -> None:
    """Embed all texts of a file. Raises InternalError at the end when some failed."""
    options = {"normalize": normalize, "dimensions": dimensions, "truncation": truncation, "prompt_name": prompt_name}
    _encode(client, input_path, output_path, PoolingTask.EMBED, "embedding", {"model": model, **options})


def classify(
    client: TwinstageClient, input_path: Path, output_path: Path, *, model: str, truncation: Truncation | None
) -> None:
    """The probabilities of all labels, for all texts of a file. Raises as `embed`."""
    options = {"model": model, "truncation": truncation}
    _encode(client, input_path, output_path, PoolingTask.CLASSIFY, "probabilities", options)


def _encode(
    client: TwinstageClient,
    input_path: Path,
    output_path: Path,
    task: PoolingTask,
    value_name: str,
    options: dict[str, Any],
) -> None:
    """All texts of a file into rows of numbers.

    What is not the fault of a text ends the run at once, so that it can be gone on with.
    """
    records = _records(input_path, output_path, ["text"])
    with client:
        served = _served(client, options["model"])
        made_of = {"input": records.digest, **options, "truncation": repr(options["truncation"]), "served": served}
        with Output(output_path, value_name=value_name, made_of=made_of) as output:
            texts = (text for (text,) in records.read(start=output.num_rows))
            failed: list[str] = []
            with _progress(records, output) as advance:
                for result in client.encode_stream(texts, task=task, **options):
                    if result.error is not None:
                        if not _blames(result.error, "input"):
                            raise result.error
                        failed.append(f"line {output.num_rows + 1}: {result.error}")
                    output.write(result.rows[0] if result.error is None else None, error=str(result.error or ""))
                    advance(1)
            _end(records, output, failed)


def score(
    client: TwinstageClient, input_path: Path, output_path: Path, *, model: str, truncation: Truncation | None
) -> None:
    """Score all pairs of a file. Raises InternalError at the end when some failed; other failures as for `embed`."""
    records = _records(input_path, output_path, ["query", "document"])
    with client:
        served = _served(client, model)
        made_of = {"input": records.digest, "model": model, "truncation": repr(truncation), "served": served}
        with Output(output_path, value_name="score", made_of=made_of) as output:
            failed: list[str] = []
            with _progress(records, output) as advance:
                for some in _calls(records.read(start=output.num_rows)):
                    for value in _scores(client, some, model=model, truncation=truncation):
                        is_error = isinstance(value, TwinstageError)
                        if is_error:
                            failed.append(f"line {output.num_rows + 1}: {value}")
                        output.write(None if is_error else [value], error=str(value) if is_error else "")
                    advance(len(some))
            _end(records, output, failed)


def _served(client: TwinstageClient, model: str) -> dict[str, str]:
    """What decides the numbers: the fingerprints of the models that pool, or of the one that is named."""
    found = client.models()
    meant = (entry for entry in found if (entry.name == model if model else entry.task is not Task.GENERATE))
    return {entry.name: entry.fingerprint for entry in meant}


def _calls(pairs: Iterator[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """The pairs of each call, of a size that the router takes; one that is larger goes alone."""
    call: list[tuple[str, ...]] = []
    size = 0
    for pair in pairs:
        pair_bytes = sum(len(text.encode()) for text in pair)
        if call and (len(call) == PAIRS_PER_CALL or size + pair_bytes > BYTES_PER_CALL):
            yield call
            call, size = [], 0
        call.append(pair)
        size += pair_bytes
    if call:
        yield call


def _scores(
    client: TwinstageClient, pairs: Sequence[tuple[str, ...]], *, model: str, truncation: Truncation | None
) -> Sequence[Any]:
    """Of each pair its score, or the error that is its own fault. Raises all other errors."""
    queries, documents = zip(*pairs, strict=True)
    try:
        return client.score(queries, documents, model=model, truncation=truncation).scores
    except (InvalidRequest, PoisonedRequest) as error:
        if not _blames(error, "queries", "documents"):
            raise
        if len(pairs) == 1:
            return [error]
    half = len(pairs) // 2  # which of them it is: an error names no more than the first few
    return [
        score
        for part in (pairs[:half], pairs[half:])
        for score in _scores(client, part, model=model, truncation=truncation)
    ]


def _blames(error: TwinstageError, *fields: str) -> bool:
    """Whether it is a text that is wrong, so that another attempt, or another text, would change nothing."""
    if isinstance(error, InvalidRequest):
        return all(str(violation).startswith(fields) for violation in error.violations)
    return isinstance(error, PoisonedRequest)


def _records(input_path: Path, output_path: Path, fields: Sequence[str]) -> Records:
    """Raises ConfigError."""
    check_output(output_path)
    if output_path.exists() and input_path.exists() and output_path.samefile(input_path):
        raise ConfigError(f"--output {output_path} would be written over --input")
    return Records(input_path, fields)


def read_documents(path: Path) -> Sequence[str]:
    """The documents of a file to sort. Raises ConfigError."""
    records = Records(path, ["text"])
    if len(records) > MOST_DOCUMENTS:
        raise ConfigError(f"--input {path}: {len(records)} documents, and a call takes {MOST_DOCUMENTS} at most")
    return [text for (text,) in records.read()]


def _end(records: Records, output: Output, failed: list[str]) -> None:
    if output.num_rows != len(records):
        raise InternalError(f"{output.num_rows} results for {len(records)} records; run it again")
    output.finish()
    if failed:
        raise InternalError(f"{len(failed)} of {len(records)} lines failed, the first in {failed[0]}")


@contextmanager
def _progress(records: Records, output: Output) -> Iterator[Callable[[float], None]]:
    console = console_for_errors()
    if output.num_rows:
        console.print(f"{output.num_rows} of {len(records)} are there already", style="dim")
    columns = (TextColumn(records.path.name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(records), completed=output.num_rows)
        yield lambda count: progress.advance(task, count)
