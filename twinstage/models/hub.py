"""Downloads from the Hugging Face Hub (or from $HF_ENDPOINT): only the files that serving needs. Free of torch."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstage.errors import ModelError

_WANTED = ("*.json", "*.safetensors", "*.jinja")
_REPORT_EVERY_BYTES = 64 * 1024 * 1024
_UNWANTED = ("onnx/*", "openvino/*", "original/*", "consolidated*", "metal/*", "*.onnx.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of a repository at one commit."""

    directory: Path
    commit: str


def download_snapshot(repository: str, revision: str | None, *, progress: Callable[[str], None]) -> Snapshot:
    """Fetch a model repository into the Hub's own cache, or find it there.

    `revision` is used as it is; None means `main`. Raises ModelError that says what to do.
    """
    # huggingface_hub costs 0.3 s to import, which local models need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    progress(f"looking for {repository} on the Hub")
    try:
        directory = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            tqdm_class=_reporting_bar(repository, progress),
        )
    except GatedRepoError as error:
        raise ModelError(f"{repository} needs permission: accept its terms on the Hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repository} has no revision {revision!r}; choose one that exists") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is neither a directory {repository} nor a public Hub repository; set HF_TOKEN if it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repository} is not in the local Hub cache, and the Hub cannot be reached; check the network and "
            f"HF_ENDPOINT, or pass a local directory ({error})"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{repository!r} is not a valid Hub id: {error}") from error
    except OSError as error:  # HTTP errors of the Hub are OSErrors too
        raise ModelError(f"{repository} cannot be downloaded: {error}") from error
    return Snapshot(directory=Path(directory), commit=Path(directory).name)


def _reporting_bar(repository: str, progress: Callable[[str], None]) -> type[Any]:
    """A progress bar class for the Hub's client that draws nothing and reports now and then in words.

    The client makes several bars of it and moves them from several threads.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    bar_class: Any = tqdm

    class ReportingBar(bar_class):  # type: ignore[misc]
        reported_bytes = 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"file": io.StringIO()})

        def display(self, *_arguments: Any, **_options: Any) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self.unit == "B" and self.n >= ReportingBar.reported_bytes + _REPORT_EVERY_BYTES:
                ReportingBar.reported_bytes = self.n
                progress(f"downloading {repository}: {self.n / 1e6:.0f} of {(self.total or self.n) / 1e6:.0f} MB")

    return ReportingBar
