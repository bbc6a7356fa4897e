"""What a caller may say about a request besides its input."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinstage.types import RawOutput, RawRepetition, RawSampling, RawStopping
from twinstage.types.constraints import RawReasoning, RawStructuredOutput

# The same types that the router makes of a message: every field may be left out, and the router checks them.
Sampling = RawSampling
Stopping = RawStopping
Repetition = RawRepetition
Output = RawOutput
StructuredOutput = RawStructuredOutput
Reasoning = RawReasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a generation. `timeout_s` becomes the call's deadline; None leaves it to the router.

    Cached beginnings of prompts are shared only between requests of equal `cache_salt`.
    """

    model: str = ""
    request_id: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    output: Output = field(default_factory=Output)
    structured_output: StructuredOutput | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None


DEFAULT_OPTIONS = Options()
