"""What a load run is asked to do. Everything here is frozen and checked before anything is sent."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from pathlib import Path

from twinstage.client.options import Sampling
from twinstage.errors import ConfigError

DEFAULT_TIMEOUT_S = 600.0
_GREEDY = Sampling(temperature=0.0)


class Protocol(enum.Enum):
    """How a server is spoken to."""

    TWINSTAGE = "twinstage"
    OPENAI = "openai"


class Arrivals(enum.Enum):
    """How the time between two arrivals of an open loop is drawn: exponentially, or always the same."""

    POISSON = "poisson"
    CONSTANT = "constant"


class PromptForm(enum.Enum):
    """How prompts are sent: as token ids, or as text that has exactly the wanted number of tokens."""

    IDS = "ids"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A number of tokens, drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"a length must be at least 1 token and a range ascend, not {self}")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    @classmethod
    def parse(cls, text: str, *, flag: str) -> TokenRange:
        """Read "128" or "64:256". Raises ConfigError naming the flag."""
        low, separator, high = text.partition(":")
        if not low.isdecimal() or (separator and not high.isdecimal()):
            raise ConfigError(f"{flag}: expected a number such as 128 or a range such as 64:256, not {text!r}")
        try:
            return cls(int(low), int(high) if separator else int(low))
        except ConfigError as error:
            raise ConfigError(f"{flag}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """A trace to replay: `speed` 2 plays it twice as fast, `scale` 64 divides every length by 64."""

    path: Path
    speed: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a good request keeps: seconds to the first token, mean seconds per later token, seconds in all."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @property
    def is_set(self) -> bool:
        return any(limit is not None for limit in (self.ttft_s, self.itl_s, self.e2e_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """One load run.

    Closed loop: `concurrency` requests are kept in progress. Open loop: requests arrive at `rate_per_s`, or when
    `trace` says so, whether or not earlier ones are answered; `max_in_flight` holds back what comes above it, and the
    wait counts. With neither `requests` nor `duration_s` a number that suits the mode is sent. `warmup_requests` come
    before and are not measured; by default as many as a closed loop keeps in progress, or one.

    `seed` decides arrival times, lengths and sampling, `prompt_seed` what prompts contain: by default it is drawn
    anew, so that a repeated run does not find its prompts in the server's prefix cache. `vocabulary_size` and
    `max_model_len` are asked from the server where they are not given.
    """

    addresses: tuple[str, ...]
    protocol: Protocol = Protocol.TWINSTAGE
    model: str = ""
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: Arrivals = Arrivals.POISSON
    max_in_flight: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup_requests: int | None = None
    prompt_tokens: TokenRange = TokenRange(128, 128)
    output_tokens: TokenRange = TokenRange(128, 128)
    shared_prefix_tokens: int = 0
    prompt_form: PromptForm = PromptForm.IDS
    trace: TraceOptions | None = None
    vocabulary_size: int | None = None
    max_model_len: int | None = None
    sampling: Sampling = _GREEDY
    ignore_eos: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S
    seed: int = 0
    prompt_seed: int | None = None
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ConfigError(problem)

    @property
    def is_closed(self) -> bool:
        """Whether a new request waits for an earlier one to end."""
        return self.concurrency is not None

    @property
    def label(self) -> str:
        """The load in a few words, by which runs of two sweeps are matched."""
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        if self.rate_per_s is not None:
            return f"rate {self.rate_per_s:g}/s"
        assert self.trace is not None
        return f"trace x{self.trace.speed:g}"


def _problems(options: LoadOptions) -> list[str]:
    """What is wrong, each with what to do about it."""
    checks = (
        (not options.addresses, "--address: name at least one server"),
        (
            options.concurrency is not None and options.rate_per_s is not None,
            "--concurrency and --rate exclude each other: the first is a closed loop, the second an open one; "
            "--max-in-flight bounds an open loop",
        ),
        (
            options.concurrency is None and options.rate_per_s is None and options.trace is None,
            "say how to load the server: --concurrency N, --rate R or --trace FILE",
        ),
        (options.concurrency is not None and options.concurrency < 1, "--concurrency: must be at least 1"),
        (options.rate_per_s is not None and not _is_positive(options.rate_per_s), "--rate: must be above 0"),
        (options.is_closed and options.max_in_flight is not None, "--max-in-flight belongs to --rate or --trace"),
        (options.max_in_flight is not None and options.max_in_flight < 1, "--max-in-flight: must be at least 1"),
        (options.requests is not None and options.requests < 1, "--requests: must be at least 1"),
        (options.duration_s is not None and not _is_positive(options.duration_s), "--duration: must be above 0"),
        ((options.warmup_requests or 0) < 0, "--warmup: must not be negative"),
        (options.shared_prefix_tokens < 0, "--shared-prefix-tokens: must not be negative"),
        (
            options.trace is not None and options.shared_prefix_tokens > 0,
            "--shared-prefix-tokens: a trace says itself which prompts share a prefix",
        ),
        (
            options.trace is not None and not (_is_positive(options.trace.speed) and _is_positive(options.trace.scale)),
            "--trace-speed and --trace-scale: must be above 0",
        ),
        (not _is_positive(options.timeout_s), "--timeout: must be above 0"),
        (options.vocabulary_size is not None and options.vocabulary_size < 2, "--vocabulary-size: must be at least 2"),
        (options.max_model_len is not None and options.max_model_len < 2, "--max-model-len: must be at least 2"),
    )
    return [message for is_wrong, message in checks if is_wrong]


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
