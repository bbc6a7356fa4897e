"""What can happen to a cluster of child processes while somebody waits for it."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.cli.child import Child


@dataclass(frozen=True, slots=True)
class Ready:
    """A process listens."""

    child: Child


@dataclass(frozen=True, slots=True)
class Ended:
    """A process ended."""

    child: Child


@dataclass(frozen=True, slots=True)
class Known:
    """The router is connected to a worker."""

    worker: str


@dataclass(frozen=True, slots=True)
class Serving:
    """The router serves requests to these gRPC services."""

    services: frozenset[str]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Somebody wants the cluster to stop."""


Event = Ready | Ended | Known | Serving | Interrupted
