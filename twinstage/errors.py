"""The exceptions of Twinstage.

    TwinstageError
    ├── InvalidRequest             the caller must change the request (carries field violations)
    ├── NotFound                   no such model or request
    ├── AlreadyExists              the request id is in use
    ├── Unauthenticated            no token, or one that nobody here has
    ├── PermissionDenied           the caller may not do this
    ├── TaskNotSupported           the model cannot do this
    ├── Unimplemented              this version cannot do this
    ├── Overloaded                 full; try again later
    │   ├── KvExhausted            no free KV blocks
    │   └── QuotaExceeded          the caller has used up what it may
    ├── Unavailable                nobody can serve this now
    │   ├── NoWorker               no worker for the model is ready
    │   ├── Draining               the worker or the router takes nothing new
    │   ├── WorkerLost             a worker went away
    │   └── ComputeFailed          the model failed while computing this request
    ├── StreamBroken               lost after tokens had been sent
    ├── PoisonedRequest            workers die of this request
    ├── DeadlineExceeded           the time is up
    ├── Cancelled                  the caller went away, or an operator ended the request
    ├── TransferError              the hand-over failed
    │   ├── HandshakeRefused       the two ends do not fit together
    │   ├── StaleHandle            wrong epoch, generation, id or token
    │   └── ChecksumMismatch       the blocks that arrived are not those that were sent
    ├── ModelError                 a model cannot be found, read or adapted (start-up)
    │   └── NotFusible             the fused path cannot run it
    ├── ConfigError                wrong flags, environment or machine (start-up)
    ├── IllegalTransition          a request was moved into a phase that cannot follow (a bug)
    ├── IntegrityError             the block pool's books do not balance (a bug)
    └── InternalError              anything else

Each class has a stable `reason`, which clients see as google.rpc.ErrorInfo.reason, and says whether another attempt
elsewhere can help (`retryable`). `rpc/status.py` has the one table that maps them to gRPC codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class TwinstageError(Exception):
    """Base of all errors. The message says what is wrong and what to do."""

    reason: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field: its full path in the request, and what would be right. The path is empty for the whole."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}" if self.field else self.description


class InvalidRequest(TwinstageError):
    """The request is wrong; `violations` lists everything that is."""

    reason = "INVALID_REQUEST"

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(map(str, violations)))


class NotFound(TwinstageError):
    """No such model or request."""

    reason = "NOT_FOUND"

    def __init__(self, message: str, *, resource_type: str, resource_name: str) -> None:
        self.resource_type = resource_type
        self.resource_name = resource_name
        super().__init__(message)


class AlreadyExists(TwinstageError):
    """The request id is in use."""

    reason = "ALREADY_EXISTS"

    def __init__(self, message: str, *, resource_type: str, resource_name: str) -> None:
        self.resource_type = resource_type
        self.resource_name = resource_name
        super().__init__(message)


class Unauthenticated(TwinstageError):
    """No token, or one that nobody here has."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(TwinstageError):
    """The caller may not do this."""

    reason = "PERMISSION_DENIED"


class TaskNotSupported(TwinstageError):
    """The model cannot do this."""

    reason = "TASK_NOT_SUPPORTED"


class Unimplemented(TwinstageError):
    """This version cannot do this."""

    reason = "UNIMPLEMENTED"


class Overloaded(TwinstageError):
    """Full; the caller may try again after `retry_after_s` seconds."""

    reason = "OVERLOADED"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class KvExhausted(Overloaded):
    """No free KV blocks."""

    reason = "KV_EXHAUSTED"


class QuotaExceeded(Overloaded):
    """The caller has used up what it may."""

    reason = "QUOTA_EXCEEDED"


class Unavailable(TwinstageError):
    """Nobody can serve this now; the caller may try again after `retry_after_s` seconds."""

    reason = "UNAVAILABLE"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class NoWorker(Unavailable):
    """No worker for the model is ready."""

    reason = "NO_WORKER"


class Draining(Unavailable):
    """The worker or the router takes nothing new."""

    reason = "DRAINING"


class WorkerLost(Unavailable):
    """A worker went away."""

    reason = "WORKER_LOST"


class ComputeFailed(Unavailable):
    """The model failed while computing this request; another worker may succeed."""

    reason = "COMPUTE_FAILED"


class StreamBroken(TwinstageError):
    """A worker was lost after `tokens_sent` tokens had been sent, and the request could not be replayed."""

    reason = "STREAM_BROKEN"

    def __init__(self, message: str, *, tokens_sent: int) -> None:
        self.tokens_sent = tokens_sent
        super().__init__(message)


class PoisonedRequest(TwinstageError):
    """Workers died while they computed for this request, and no other one is let have it."""

    reason = "POISONED_REQUEST"


class DeadlineExceeded(TwinstageError):
    """The time is up."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(TwinstageError):
    """The caller went away, or an operator ended the request."""

    reason = "CANCELLED"


class TransferError(TwinstageError):
    """The hand-over failed."""

    reason = "TRANSFER_FAILED"
    retryable = True


class HandshakeRefused(TransferError):
    """The two ends of a KV channel do not fit together."""

    reason = "HANDSHAKE_REFUSED"


class StaleHandle(TransferError):
    """Wrong epoch, generation, transfer id, block or token."""

    reason = "STALE_HANDLE"


class ChecksumMismatch(TransferError):
    """The blocks that arrived are not those that were sent."""

    reason = "CHECKSUM_MISMATCH"


class ModelError(TwinstageError):
    """A model cannot be found, read or adapted."""

    reason = "MODEL_ERROR"


class NotFusible(ModelError):
    """The fused path cannot run a model: its shape, its files or this machine; stock modules may be able to."""

    reason = "MODEL_NOT_FUSIBLE"


class ConfigError(TwinstageError):
    """Wrong flags, environment or machine."""

    reason = "CONFIG_ERROR"


class IllegalTransition(TwinstageError):
    """A request was moved into a phase that cannot follow its present one: a bug."""

    reason = "ILLEGAL_TRANSITION"


class IntegrityError(TwinstageError):
    """The block pool's books do not balance: a bug."""

    reason = "INTEGRITY_ERROR"


class InternalError(TwinstageError):
    """Anything else."""

    reason = "INTERNAL"
