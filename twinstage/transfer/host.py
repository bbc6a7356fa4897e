"""Which host this is: two processes with the same id can share memory when they can reach each other's socket."""

from __future__ import annotations

import functools
import hashlib
import secrets
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """32 hexadecimal digits, equal in all processes and containers that run on one kernel since its last boot.

    The boot id needs no privileges and is the same in every namespace, unlike the host name. Equal ids are a hint
    only: whether a process can reach another's socket, and whose it is, shows at the handshake. Without a boot id the
    answer is random, so that nobody believes to share memory with anybody.
    """
    try:
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        boot_id = ""
    if not boot_id:
        return secrets.token_hex(16)
    return hashlib.sha256(b"twinstage-host:" + boot_id.encode()).hexdigest()[:32]
