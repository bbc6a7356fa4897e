"""What keeps the other users of this machine from calling the workers of a local cluster: a secret of its own."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "TWINSTAGE_WORKER_SECRET_FILE"


class ClusterSecret:
    """A secret in a file that only this user can read, until all processes have it, unless the operator has one."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """`given` is what the processes get besides this process's environment."""
        self._is_given = VARIABLE in given or VARIABLE in os.environ
        self._path: Path | None = None

    def environment(self) -> dict[str, str]:
        """Where router and workers find it; made by the first call."""
        if self._is_given:
            return {}
        if self._path is None:
            descriptor, name = tempfile.mkstemp(prefix="twinstage-secret-")  # mode 0600
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32))
            self._path = Path(name)
        return {VARIABLE: str(self._path)}

    def remove(self) -> None:
        """Delete the file. Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
