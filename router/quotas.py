"""Quotas of callers: how much one of them may ask for, whatever room there is.

    requests              in progress at once, those that wait included
    requests-per-minute   a bucket that holds a minute's worth and fills steadily; a request takes one
    tokens-per-minute     the same for tokens of prompts and answers, which are taken as they are known: a request is
                          let in while anything is left, and for what it takes too much the next one waits

Fair shares among callers that wait are the gate's business; a quota refuses at once, with the time to come back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from twinstage.errors import QuotaExceeded
from twinstage.rpc.callers import Caller, Quota

MIN_RETRY_AFTER_S = 0.1
BUSY_RETRY_AFTER_S = 1.0  # for who has too many requests in progress: nobody knows when one ends


class Bucket:
    """Holds up to a minute's worth of units, and gets them back steadily. It may owe some."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._looked_s = clock()

    def missing_s(self, wanted: float) -> float:
        """Seconds until `wanted` units are there; 0 when they are."""
        now_s = self._clock()
        self._level = min(self.per_minute, self._level + (now_s - self._looked_s) * self.per_minute / 60)
        self._looked_s = now_s
        return max(0.0, (wanted - self._level) * 60 / self.per_minute)

    def take(self, units: float) -> None:
        self._level -= units


@dataclass(slots=True)
class Account:
    """What one caller uses of its quota."""

    name: str
    quota: Quota
    requests: Bucket | None
    tokens: Bucket | None
    live: int = 0

    def check(self) -> None:
        """Raises QuotaExceeded."""
        quota = self.quota
        if quota.requests is not None and self.live >= quota.requests:
            self._refuse(f"{quota.requests} requests in progress", BUSY_RETRY_AFTER_S)
        if self.requests is not None and (wait_s := self.requests.missing_s(1)) > 0:
            self._refuse(f"{self.requests.per_minute} requests a minute", wait_s)
        # One token is enough to begin with: nobody knows how many it will be.
        if self.tokens is not None and (wait_s := self.tokens.missing_s(1)) > 0:
            self._refuse(f"{self.tokens.per_minute} tokens a minute", wait_s)

    def _refuse(self, limit: str, retry_after_s: float) -> None:
        retry_after_s = max(retry_after_s, MIN_RETRY_AFTER_S)
        raise QuotaExceeded(
            f"{self.name} may have {limit}; try again in {retry_after_s:.1f} s", retry_after_s=retry_after_s
        )

    def use_tokens(self, tokens: int) -> None:
        """Tokens of a prompt or an answer."""
        if self.tokens is not None:
            self.tokens.take(tokens)


class Quotas:
    """The accounts of all callers that have a quota."""

    def __init__(self, quotas: Mapping[str, Quota] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`quotas` by the caller's name; times are readings of `clock`."""
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._set(quotas or {})

    def set_callers(self, callers: Sequence[Caller]) -> None:
        """From now on these quotas count; callers have used of them what they have used."""
        self._set({caller.name: caller.quota for caller in callers})

    def _set(self, quotas: Mapping[str, Quota]) -> None:
        limited = {name: quota for name, quota in quotas.items() if quota.limits}
        self._accounts = {name: self._account(name, quota) for name, quota in limited.items()}

    def _account(self, name: str, quota: Quota) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = Account(name, quota, None, None)
        account.quota = quota
        account.requests = self._bucket(account.requests, quota.requests_per_minute)
        account.tokens = self._bucket(account.tokens, quota.tokens_per_minute)
        return account

    def _bucket(self, old: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        return old if old is not None and old.per_minute == per_minute else Bucket(per_minute, self._clock)

    @contextlib.contextmanager
    def admitted(self, caller: str) -> Iterator[Account | None]:
        """A request of a caller, for as long as the block lasts; None when it has no quota. Raises QuotaExceeded."""
        account = self._accounts.get(caller)
        if account is None:
            yield None
            return
        account.check()
        if account.requests is not None:
            account.requests.take(1)
        account.live += 1
        try:
            yield account
        finally:
            account.live -= 1
