"""Files of texts in, files of numbers out; an output that was not finished is gone on with.

    texts.txt      a text a line
    texts.jsonl    a JSON document a line: a string, or an object with the wanted fields
    vectors.jsonl  {"index": 0, "embedding": [...]} or {"index": 0, "score": 0.5}, or "error" instead
    vectors.npy    float32 [texts, dimensions] or [texts]; a text that failed is a row of NaN

A line of the input is a row of the output, in the same order: an empty line of a .txt is a text that fails. While it is
written, an output is OUTPUT.part, and OUTPUT.run says what it is made of; the number of whole rows is where a run that
was killed goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from twinstage.errors import ConfigError, InternalError

_FORMATS = (".jsonl", ".npy")
_PIECE_BYTES = 1024 * 1024


class Records:
    """The records of an input file: of each, the wanted fields."""

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        """Looks at every record, so that a wrong one is told before anything is computed of the others.

        Raises ConfigError, with the line, for a file that cannot be read or has no such records.
        """
        self.path = path
        self._fields = tuple(fields)
        self._is_json = path.suffix in {".jsonl", ".ndjson"}
        if not self._is_json and len(fields) > 1:
            raise ConfigError(f"--input {path}: a record has {' and '.join(fields)}, so write a .jsonl file")
        digest, lines = hashlib.sha256(), 0
        try:
            if not path.is_file() and path.exists():  # it is read twice
                raise ConfigError(f"--input {path} is no file; write the texts into one")
            with path.open("rb") as file:
                for lines, line in enumerate(file, 1):
                    digest.update(line)
                    self._record(line, lines)
        except OSError as error:
            raise ConfigError(f"--input {path} cannot be read: {error.strerror}") from error
        self.digest = digest.hexdigest()
        self._num_lines = lines

    def __len__(self) -> int:
        return self._num_lines

    def read(self, *, start: int = 0) -> Iterator[tuple[str, ...]]:
        """The wanted fields from record `start` on."""
        with self.path.open("rb") as file:
            for number, line in enumerate(islice(file, start, None), start + 1):
                yield self._record(line, number)

    def _record(self, line: bytes, number: int) -> tuple[str, ...]:
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            document = json.loads(text) if self._is_json else text
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path}, line {number}: no UTF-8 text: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path}, line {number}: no JSON document: {error}") from error
        values: list[object] = [document] if len(self._fields) == 1 else []
        if isinstance(document, dict):
            values = [document.get(field) for field in self._fields]
        texts = tuple(value for value in values if isinstance(value, str) and _can_be_sent(value))
        if len(texts) != len(self._fields):
            raise ConfigError(f"{self.path}, line {number}: needs text as {' and '.join(self._fields)}")
        return texts


def _can_be_sent(text: str) -> bool:
    """Whether it is Unicode text: JSON may hold halves of surrogate pairs."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def check_output(path: Path) -> None:
    """Raises ConfigError for a path that cannot be written, as far as that shows."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f"--output {path}: the name has to end with {' or '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path} cannot be written: there is no directory {path.parent}")


class Output:
    """Rows of numbers on their way into a file. The file is there once all are."""

    def __init__(self, path: Path, *, value_name: str, made_of: Mapping[str, Any]) -> None:
        """`made_of` says what decides the rows: only an output of the same is gone on with. Raises ConfigError."""
        check_output(path)
        self._path = path
        self._part, self._run = path.with_name(path.name + ".part"), path.with_name(path.name + ".run")
        self._value_name = value_name
        self._made_of = {**made_of, "value": value_name}
        self._is_npy = path.suffix == ".npy"
        self._width = 0  # numbers of a row, once known
        self.num_rows = 0
        try:
            self._file = self._part.open("ab", buffering=0)  # a row that was written is there, whatever comes
        except OSError as error:
            raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Until the file is closed. Raises ConfigError when another run has the lock, or has just finished."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = os.path.samestat(os.fstat(self._file.fileno()), self._part.stat())
        except (BlockingIOError, FileNotFoundError):
            is_mine = False
        if not is_mine:
            raise ConfigError(f"--output {self._path} is being written by another run")

    def _resume(self) -> None:
        known = json.loads(self._run.read_text(encoding="utf-8")) if self._run.exists() else None
        if known is None:
            self._file.truncate(0)
            with self._explained():
                self._write_run()
            return
        self._width = known.pop("width")
        self.num_rows, size = self._whole_rows()
        self._file.truncate(size)  # the last row may have been cut off
        if known != self._made_of:
            if self.num_rows:
                raise ConfigError(
                    f"{self._part} is of a run on other input, with other options or on another model: remove "
                    f"{self._run}, or run that again"
                )
            self._width = 0
            self._write_run()

    def _whole_rows(self) -> tuple[int, int]:
        """How many rows are complete, and the bytes that they take."""
        if self._is_npy:
            row_bytes = 4 * self._width
            rows = self._part.stat().st_size // row_bytes if row_bytes else 0
            return rows, rows * row_bytes
        rows = size = 0
        with self._part.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    rows, size = rows + 1, size + len(line)
        return rows, size

    def _write_run(self) -> None:
        new = self._run.with_name(self._run.name + ".new")
        new.write_text(json.dumps({**self._made_of, "width": self._width}), encoding="utf-8")
        os.replace(new, self._run)  # a run that is killed here leaves the one or the other, each whole

    def write(self, values: Sequence[float] | None, *, error: str = "") -> None:
        """The next row; None when it could not be computed. Raises InternalError when the file takes no more."""
        with self._explained():
            if self._is_npy:
                self._write_binary(values)
            else:
                result = {"error": error} if values is None else {self._value_name: self._plain(values)}
                document = {"index": self.num_rows, **result}
                self._append(json.dumps(document, ensure_ascii=False).encode() + b"\n")
        self.num_rows += 1

    def _append(self, data: bytes) -> None:
        while data:  # a disk that is nearly full takes a part
            data = data[self._file.write(data) :]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = f"the same command goes on after row {self.num_rows}"
            raise InternalError(f"{self._path} cannot be written: {error.strerror}; {advice}") from error

    def _plain(self, values: Sequence[float]) -> float | list[float]:
        return values[0] if self._value_name == "score" else list(values)

    def _write_binary(self, values: Sequence[float] | None) -> None:
        import numpy as np

        if values is not None and not self._width:
            self._width = len(values)
            self._write_run()
            for _ in range(self.num_rows):  # those that failed before
                self._append(np.full(self._width, math.nan, "<f4").tobytes())
        if values is None and not self._width:
            return
        row = np.full(self._width, math.nan) if values is None else np.asarray(values)
        self._append(row.astype("<f4").tobytes())

    def finish(self) -> None:
        """All rows are there: put the file in its place. A run that is killed meanwhile can be gone on with as well."""
        with self._explained():
            if self._is_npy:
                os.replace(self._with_header(), self._path)
                self._part.unlink()
            else:
                os.replace(self._part, self._path)
            self._run.unlink()

    def _with_header(self) -> Path:
        import numpy as np

        shape = (self.num_rows,) if self._value_name == "score" else (self.num_rows, self._width)
        whole = self._path.with_name(self._path.name + ".whole")
        with whole.open("wb") as file, self._part.open("rb") as rows:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            while piece := rows.read(_PIECE_BYTES):
                file.write(piece)
        return whole

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
