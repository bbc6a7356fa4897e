"""`twinstage embed`, `classify`, `score` and `rerank`: from their flags to what they do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinstage.cli.access_flags import AccessFlags
from twinstage.cli.ask_flags import DEFAULT_ADDRESS, Address, AsJson, ModelName, Timeout
from twinstage.cli.flags import takes_flag_groups
from twinstage.errors import ConfigError

if TYPE_CHECKING:
    from twinstage.types import Truncation

InputFile = Annotated[
    Path | None,
    typer.Option("--input", help='File of texts: a line each, or .jsonl of strings or {"text": ...}.'),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="File for the numbers, with --input: .jsonl or .npy. A run that was killed goes on when it is started "
        "again.",
    ),
]
Query = Annotated[str, typer.Argument(metavar="QUERY", help="What to look for.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFlags:
    """What calls to embed and to score share."""

    address: Address = DEFAULT_ADDRESS
    model: ModelName = ""
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Cut the end of what is too long; else it is an error."),
    ] = False
    timeout: Timeout = None
    as_json: AsJson = False

    def truncation(self) -> Truncation | None:
        from twinstage.types import Truncation

        return Truncation(to_model_limit=True, keep_last=False) if self.truncate else None


@takes_flag_groups
def embed(
    *,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts to embed.")] = None,
    input: InputFile = None,
    output: OutputFile = None,
    normalize: Annotated[bool, typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1.")] = True,
    dimensions: Annotated[
        int | None, typer.Option("--dimensions", min=1, help="Keep only the first numbers of each vector (Matryoshka).")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option("--prompt-name", help="Which of the model's prompts goes before each text.")
    ] = None,
    flags: PoolingFlags,
    access: AccessFlags,
) -> None:
    """Embed each TEXT and print the beginning of each vector, --json all of it; or embed a file into a file."""
    from twinstage.cli import ask, batch

    options: dict[str, Any] = {
        "model": flags.model,
        "normalize": normalize,
        "dimensions": dimensions,
        "truncation": flags.truncation(),
        "prompt_name": prompt_name,
    }
    client = access.client(flags.address)
    if _wants_files(texts, input, output, argument="TEXT"):
        assert input is not None
        assert output is not None
        batch.embed(client, input, output, **options)
    else:
        ask.embed(client, texts or (), timeout_s=flags.timeout, as_json=flags.as_json, **options)


@takes_flag_groups
def classify(
    *,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts to classify.")] = None,
    input: InputFile = None,
    output: OutputFile = None,
    flags: PoolingFlags,
    access: AccessFlags,
) -> None:
    """Print how likely each of the model's labels is for each TEXT; or classify the texts of a file into a file."""
    from twinstage.cli import ask, batch

    client = access.client(flags.address)
    options: dict[str, Any] = {"model": flags.model, "truncation": flags.truncation()}
    if _wants_files(texts, input, output, argument="TEXT"):
        assert input is not None
        assert output is not None
        batch.classify(client, input, output, **options)
    else:
        ask.classify(client, texts or (), timeout_s=flags.timeout, as_json=flags.as_json, **options)


@takes_flag_groups
def score(
    *,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to compare with.")] = "",
    documents: Annotated[list[str] | None, typer.Argument(metavar="DOCUMENT", help="Documents to score.")] = None,
    input: Annotated[
        Path | None, typer.Option("--input", help='File of pairs, .jsonl of {"query": ..., "document": ...}.')
    ] = None,
    output: OutputFile = None,
    flags: PoolingFlags,
    access: AccessFlags,
) -> None:
    """Print how well each DOCUMENT answers QUERY; or score the pairs of a file into a file."""
    from twinstage.cli import ask, batch

    client = access.client(flags.address)
    given = [query, *(documents or ())] if query else []
    if _wants_files(given, input, output, argument="QUERY and DOCUMENT"):
        assert input is not None
        assert output is not None
        batch.score(client, input, output, model=flags.model, truncation=flags.truncation())
        return
    ask.score(
        client,
        query,
        documents or (),
        model=flags.model,
        truncation=flags.truncation(),
        timeout_s=flags.timeout,
        as_json=flags.as_json,
    )


@takes_flag_groups
def rerank(
    *,
    query: Query,
    documents: Annotated[list[str] | None, typer.Argument(metavar="DOCUMENT", help="Documents to sort.")] = None,
    input: Annotated[
        Path | None,
        typer.Option("--input", help='File of documents: a line each, or .jsonl of strings or {"text": ...}.'),
    ] = None,
    top_n: Annotated[int | None, typer.Option("--top-n", min=1, help="Print only so many.")] = None,
    flags: PoolingFlags,
    access: AccessFlags,
) -> None:
    """Print the documents that answer QUERY best, as a table; --json prints indices and scores."""
    from twinstage.cli import ask, batch

    if (input is None) == (not documents):
        raise ConfigError("give either DOCUMENT or --input")
    ask.rerank(
        access.client(flags.address),
        query,
        batch.read_documents(input) if input is not None else documents or (),
        top_n=top_n,
        model=flags.model,
        truncation=flags.truncation(),
        timeout_s=flags.timeout,
        as_json=flags.as_json,
    )


def _wants_files(given: list[str] | None, input: Path | None, output: Path | None, *, argument: str) -> bool:
    """Raises ConfigError when it is neither texts nor files, or both."""
    if bool(given) == (input is not None):
        raise ConfigError(f"give either {argument} or --input")
    if (input is None) != (output is None):
        raise ConfigError("--input and --output go together")
    return input is not None
