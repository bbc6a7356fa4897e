"""A peer's server at its best: its settings are tried under the load that it will be measured with.

What was found is kept in the bench's home, as a server may take minutes to start, and tried again when the peer, the
machine or the settings to choose from are others. To have it tried again all the same, remove `settings/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.peers.install import PeerMissing
from bench.peers.servers import PeerServer, ServerCommand
from twinstage.errors import InternalError

Start = Callable[["Setting"], ServerCommand]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`name` tells a reader what is set; `arguments` and `environment` set it."""

    name: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best of what was tried. `rates` are output tokens per second by the setting's name; `failed` says why not."""

    name: str
    rates: Mapping[str, float]
    failed: Mapping[str, str] = field(default_factory=dict)

    def in_words(self) -> str:
        """What was chosen, and from what."""
        tried = [f"{name} {rate:,.0f}" for name, rate in self.rates.items()]
        tried += [f"{name} failed" for name in self.failed]
        return f"{self.name} (tried, output tokens/s: {'; '.join(tried)})"


def best_setting(
    settings: Sequence[Setting], start: Start, rate: Callable[[PeerServer], float], *, progress: Callable[[str], None]
) -> Choice:
    """Start the server with each setting in turn and load it; `rate` gives output tokens per second.

    Raises PeerMissing when it works with none of them.
    """
    rates: dict[str, float] = {}
    failed: dict[str, str] = {}
    for setting in settings:
        how = start(setting)
        progress(f"trying {how.name}: {setting.name} (log: {how.log_path})")
        try:
            with PeerServer(how) as server:
                rates[setting.name] = rate(server)
        except (PeerMissing, InternalError) as error:
            failed[setting.name] = str(error)
    if not rates:
        raise PeerMissing("; ".join(f"{name}: {why}" for name, why in failed.items()))
    return Choice(name=max(rates, key=lambda name: rates[name]), rates=rates, failed=failed)


def remembered(path: Path, *, circumstances: Mapping[str, object], choose: Callable[[], Choice]) -> Choice:
    """What `path` holds of the same circumstances, else what `choose` finds, which is written there.

    Unless a setting failed: that may have been the machine's fault, and is tried again the next time.
    """
    wanted = json.loads(json.dumps(circumstances))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["circumstances"] == wanted:
            return Choice(**document["choice"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or it is of another kind
    choice = choose()
    if choice.failed:
        return choice
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"circumstances": wanted, "choice": asdict(choice)}, indent=1), encoding="utf-8")
    return choice
