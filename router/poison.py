"""Poisoned requests that were refused, so that one which its client sends again takes no more workers.

A request is the same when its caller, its model and everything in it but its id are. One that was convicted without
being guilty, as when two workers happened to be cut off while they computed for it alone, must not be refused for long:
the first time it is for a short while, and only who is convicted again and again, for longer each time.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from router.worker_entry import ServedModel
from twinstage.errors import PoisonedRequest
from twinstage.telemetry.log import get_logger
from twinstage.types import RawEncodeRequest, RawGenerationRequest, RawScoreRequest

MAX_SENTENCES = 1024
LONGEST_S = 3600.0

logger = get_logger(__name__)

Request = RawGenerationRequest | RawEncodeRequest | RawScoreRequest


@dataclass(frozen=True, slots=True)
class _Sentence:
    until_s: float
    length_s: float  # for as long again, the next one is twice as long


class PoisonBook:
    """What is refused, and until when. Requests cost nothing while nothing is. Belongs to one event loop."""

    def __init__(self, memory_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`memory_s` is how long a request is refused the first time; 0: not at all."""
        self._memory_s = memory_s
        self._clock = clock
        self._sentences: OrderedDict[bytes, _Sentence] = OrderedDict()
        self._empty_from_s = 0.0

    def __len__(self) -> int:
        return len(self._sentences)

    def check(self, request: Request, model: ServedModel, *, caller: str) -> None:
        """Raises PoisonedRequest for one that was convicted a short while ago."""
        if not self._sentences:
            return
        now_s = self._clock()
        if now_s >= self._empty_from_s:
            self._sentences.clear()
            return
        sentence = self._sentences.get(_name(request, model, caller))
        if sentence is None or now_s >= sentence.until_s:
            return
        left_s = sentence.until_s - now_s
        logger.warning("poisoned request refused again", caller=caller, refused_for_s=round(left_s))
        raise PoisonedRequest(
            f"workers were lost while they computed for this very request; it is not tried for another {left_s:.0f} s"
        )

    def convict(self, request: Request, model: ServedModel, *, caller: str) -> None:
        """Workers were lost for this request."""
        if not self._memory_s:
            return
        now_s = self._clock()
        name = _name(request, model, caller)
        before = self._sentences.pop(name, None)
        length_s = self._memory_s
        if before is not None and now_s < before.until_s + before.length_s:
            length_s = max(length_s, min(2 * before.length_s, LONGEST_S))
        self._sentences[name] = _Sentence(now_s + length_s, length_s)
        self._empty_from_s = max(self._empty_from_s, now_s + 2 * length_s)
        if len(self._sentences) > MAX_SENTENCES:
            self._sentences.popitem(last=False)


def _name(request: Request, model: ServedModel, caller: str) -> bytes:
    """A digest of all that makes the request what it is."""
    anonymous = replace(request, request_id="")
    return hashlib.sha256(repr((caller, model.description.fingerprint, anonymous)).encode()).digest()
