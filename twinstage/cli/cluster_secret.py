"""What keeps the other users of this machine from calling the workers of a local cluster: a secret of its own.

Workers ask for it on their gRPC ports, and both ends of a KV channel prove that they know it.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLES = ("TWINSTAGE_WORKER_SECRET_FILE", "TWINSTAGE_KV_SECRET_FILE")


class ClusterSecret:
    """A secret in a file that only this user can read, until all processes have it; for what the operator has none."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """`given` is what the processes get besides this process's environment."""
        self._lacking = [variable for variable in VARIABLES if variable not in given and variable not in os.environ]
        self._path: Path | None = None

    def environment(self) -> dict[str, str]:
        """Where router and workers find it; made by the first call."""
        if not self._lacking:
            return {}
        if self._path is None:
            descriptor, name = tempfile.mkstemp(prefix="twinstage-secret-")  # mode 0600
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32))
            self._path = Path(name)
        return dict.fromkeys(self._lacking, str(self._path))

    def remove(self) -> None:
        """Delete the file. Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
