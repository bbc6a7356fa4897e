"""Files of texts in, files of numbers out; an output that was not finished is gone on with.

    texts.txt      a text a line
    texts.jsonl    a JSON document a line: a string, or an object with the wanted fields
    vectors.jsonl  {"index": 0, "embedding": [...]} or {"index": 0, "score": 0.5}, or "error" instead
    vectors.npy    float32 [texts, dimensions] or [texts]; a text that failed is a row of NaN

While it is written, an output is OUTPUT.part, and OUTPUT.run says what it is made of. Rows are in the order of the
input, so their number is where a run that was killed goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from twinstage.errors import ConfigError

_FORMATS = (".jsonl", ".npy")
_PIECE_BYTES = 1024 * 1024


class Records:
    """The records of an input file: of each, the wanted fields."""

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        """Raises ConfigError for a file that cannot be read, or is of a kind that cannot hold the fields."""
        self.path = path
        self._fields = tuple(fields)
        self._is_json = path.suffix in {".jsonl", ".ndjson"}
        if not self._is_json and len(fields) > 1:
            raise ConfigError(f"--input {path}: a record has {' and '.join(fields)}, so write a .jsonl file")
        digest, lines, last = hashlib.sha256(), 0, b"\n"
        try:
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
                    lines += piece.count(b"\n")
                    last = piece[-1:]
        except OSError as error:
            raise ConfigError(f"--input {path} cannot be read: {error.strerror}") from error
        self.digest = digest.hexdigest()
        self._num_lines = lines + (last != b"\n")

    def __len__(self) -> int:
        return self._num_lines

    def read(self, *, start: int = 0) -> Iterator[tuple[str, ...]]:
        """The wanted fields from record `start` on. Raises ConfigError that names the line."""
        with self.path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(islice(file, start, None), start + 1):
                yield self._record(line.rstrip("\r\n"), number)

    def _record(self, line: str, number: int) -> tuple[str, ...]:
        if not self._is_json:
            return (line,)
        try:
            document = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{self.path}, line {number}: no JSON document: {error}") from error
        if isinstance(document, str) and len(self._fields) == 1:
            return (document,)
        values = [document.get(field) for field in self._fields] if isinstance(document, dict) else []
        texts = tuple(value for value in values if isinstance(value, str))
        if len(texts) != len(self._fields):
            raise ConfigError(f"{self.path}, line {number}: needs text as {' and '.join(self._fields)}")
        return texts


class Output:
    """Rows of numbers on their way into a file. The file is there once all are."""

    def __init__(self, path: Path, *, value_name: str, made_of: Mapping[str, Any]) -> None:
        """`made_of` says what decides the rows: only an output of the same is gone on with. Raises ConfigError."""
        if path.suffix not in _FORMATS:
            raise ConfigError(f"--output {path}: the name has to end with {' or '.join(_FORMATS)}")
        self._path = path
        self._part, self._run = path.with_name(path.name + ".part"), path.with_name(path.name + ".run")
        self._value_name = value_name
        self._made_of = {**made_of, "value": value_name}
        self._is_npy = path.suffix == ".npy"
        self._width = 0  # numbers of a row, once known
        self.num_rows = 0
        self._resume()
        self._file = self._part.open("ab", buffering=0)  # a row that was written is there, whatever comes

    def _resume(self) -> None:
        if not self._run.exists():
            self._part.unlink(missing_ok=True)
            self._write_run()
            return
        known = json.loads(self._run.read_text(encoding="utf-8"))
        self._width = known.pop("width")
        if known != self._made_of:
            raise ConfigError(
                f"{self._part} is of a run on other input or with other options: remove {self._run}, or run that again"
            )
        self.num_rows, size = self._whole_rows()
        if self._part.exists():
            os.truncate(self._part, size)  # the last row may have been cut off

    def _whole_rows(self) -> tuple[int, int]:
        """How many rows are complete, and the bytes that they take."""
        if not self._part.exists():
            return 0, 0
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
        self._run.write_text(json.dumps({**self._made_of, "width": self._width}), encoding="utf-8")

    def write(self, values: Sequence[float] | None, *, error: str = "") -> None:
        """The next row; None when it could not be computed."""
        if self._is_npy:
            self._write_binary(values)
        else:
            result = {"error": error} if values is None else {self._value_name: self._plain(values)}
            document = {"index": self.num_rows, **result}
            self._file.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
        self.num_rows += 1

    def _plain(self, values: Sequence[float]) -> float | list[float]:
        return values[0] if self._value_name == "score" else list(values)

    def _write_binary(self, values: Sequence[float] | None) -> None:
        import numpy as np

        if values is not None and not self._width:
            self._width = len(values)
            self._write_run()
            for _ in range(self.num_rows):  # those that failed before
                self._file.write(np.full(self._width, math.nan, "<f4").tobytes())
        if values is None and not self._width:
            return
        row = np.full(self._width, math.nan) if values is None else np.asarray(values)
        self._file.write(row.astype("<f4").tobytes())

    def finish(self) -> None:
        """All rows are there: put the file in its place."""
        self._file.close()
        if self._is_npy:
            self._add_header()
        os.replace(self._part, self._path)
        self._run.unlink()

    def _add_header(self) -> None:
        import numpy as np

        shape = (self.num_rows,) if self._value_name == "score" else (self.num_rows, self._width)
        whole = self._part.with_suffix(".whole")
        with whole.open("wb") as file, self._part.open("rb") as rows:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            while piece := rows.read(_PIECE_BYTES):
                file.write(piece)
        os.replace(whole, self._part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
