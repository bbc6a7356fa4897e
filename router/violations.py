"""Checks of single fields. Each adds to a list, so that a caller learns all that is wrong at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from router.limits import MAX_REQUEST_ID_LENGTH
from twinstage.errors import FieldViolation, InvalidRequest

MAX_LISTED_PER_FIELD = 8  # of the entries of a repeated field, so that one bad list does not crowd out the rest


class Violations:
    """Collects what is wrong with a request; `raise_any` raises it."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, field: str, description: str) -> None:
        self._found.append(FieldViolation(field, description))

    def extend(self, violations: Iterable[FieldViolation]) -> None:
        self._found += violations

    def raise_any(self) -> None:
        """Raise InvalidRequest with all that was added, or nothing."""
        if self._found:
            raise InvalidRequest(self._found)

    def check_number(
        self,
        field: str,
        value: float | None,
        *,
        low: float | None = None,
        high: float | None = None,
        low_is_open: bool = False,
    ) -> None:
        """A number that may be left out, else is finite and in the range, whose low end may be excluded."""
        if value is None:
            return
        too_low = low is not None and (value <= low if low_is_open else value < low)
        too_high = high is not None and value > high
        if not math.isfinite(value) or too_low or too_high:
            finite = "" if math.isfinite(value) or high is not None else "finite and "
            self.add(field, f"must be {finite}{_range(low, high, low_is_open=low_is_open)}, is {_number(value)}")

    def check_token_ids(self, field: str, token_ids: Sequence[int], vocab_size: int) -> None:
        """Every id is in the vocabulary."""
        if max(token_ids, default=0) < vocab_size:  # as good as always, and a tenth of the time for a long prompt
            return
        unknown = (index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        for index in islice(unknown, MAX_LISTED_PER_FIELD):
            self.add(f"{field}[{index}]", f"must be below the vocabulary's size {vocab_size}, is {token_ids[index]}")

    def check_request_id(self, request_id: str) -> None:
        """At most 128 printable ASCII characters; empty when left out."""
        if len(request_id) > MAX_REQUEST_ID_LENGTH or not request_id.isascii() or not request_id.isprintable():
            self.add("request_id", f"must be at most {MAX_REQUEST_ID_LENGTH} printable ASCII characters")


def _range(low: float | None, high: float | None, *, low_is_open: bool) -> str:
    if low is not None and high is not None:
        return f"in {'(' if low_is_open else '['}{_number(low)}, {_number(high)}]"
    if low is not None:
        return f"{'above' if low_is_open else 'at least'} {_number(low)}"
    return f"at most {_number(high)}" if high is not None else "a finite number"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
