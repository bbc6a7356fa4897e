"""Shared memory: the sender writes granted blocks in place, in the receiver's own memory.

The receiver listens on a unix socket (mode 0600) in a directory of its own that nobody else may enter (0700), and
passes the descriptor of its memory once the handshake is done. The sender maps it and copies; a Write frame then only
says what stands there.

What makes a revoked block safe: the sender writes only after Opened; its one writer thread answers Revoke between two
copies; and it ends the connection only when that thread has stopped. The end of the stream therefore means that no
copy runs. It means so as well when the process was killed, because the kernel takes a process' memory away before its
descriptors, and descriptors are not inherited by programs the process starts.

A killed process leaves its directory behind. Whoever listens holds a lock on his directory, which the kernel takes
away from the dead, so the next to start below the same parent can tell and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from twinstage.errors import ConfigError, TransferError
from twinstage.kv.copying import copy_with_checksum
from twinstage.kv.memory import BlockMemory
from twinstage.telemetry.log import get_logger
from twinstage.transfer.frames import HEADER, decode_header, encode
from twinstage.transfer.messages import Message, Piece, Write
from twinstage.transfer.portion import Portion
from twinstage.transfer.wire import Frame, FrameSocket

logger = get_logger(__name__)

_MAX_PATH_BYTES = 107  # of a unix socket's address, without the final zero
_BACKLOG = 64
_PREFIX = "kv-"
_SOCKET = "s"


class PrivateSocket:
    """A listening unix socket of mode 0600 in a fresh directory of mode 0700; both are gone after `close`."""

    def __init__(self, parent: Path) -> None:
        """Listen below `parent`, made when missing, and remove what the dead left there. Raises ConfigError."""
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_stale(parent)
            self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
            self._lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without such locks: nobody will tidy up after us
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"cannot make a directory for shared memory below {parent}: {error}") from error
        self.path = self._directory / _SOCKET
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
                raise ConfigError(
                    f"the path {self.path} is too long for a unix socket: choose a directory of at most "
                    f"{_MAX_PATH_BYTES - len('/kv-12345678/s')} bytes for shared memory"
                )
            self.listener.bind(os.fspath(self.path))
            self.path.chmod(0o600)  # nobody else can enter the directory either; nobody can connect before `listen`
            self.listener.listen(_BACKLOG)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot listen on the unix socket {self.path}: {error}") from error
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening and remove the socket and its directory. Idempotent."""
        self.listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_stale(parent: Path) -> None:
    """Remove directories of `PrivateSocket` below `parent` whose owners are dead: those that nobody locks."""
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or somebody else's
        try:
            # A socket appears only once the directory is locked; whatever looks different is not one of ours.
            if os.fstat(lock).st_uid == os.geteuid() and os.listdir(lock) == [_SOCKET]:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISSOCK(os.stat(_SOCKET, dir_fd=lock, follow_symlinks=False).st_mode):
                    os.unlink(_SOCKET, dir_fd=lock)
                    directory.rmdir()
                    logger.info("removed the kv socket of a dead worker", directory=str(directory))
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)


class Descriptor:
    """A descriptor that came from the peer; closed when its scope ends."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def attach(self, *, num_blocks: int, block_bytes: int) -> BlockMemory:
        """Map the peer's memory, which has its own life from here. Raises TransferError when it is not as told."""
        if self._fd is None:
            raise TransferError("the receiver passed no memory")
        try:
            return BlockMemory.attach(self._fd, num_blocks=num_blocks, block_bytes=block_bytes)
        except ConfigError as error:
            raise TransferError(f"the receiver's memory cannot be mapped: {error}") from error


def send_with_descriptor(stream: FrameSocket, message: Message, *, descriptor: int) -> None:
    """Send a frame and a copy of `descriptor` with its first byte."""
    data = encode(message)
    try:
        sent = socket.send_fds(_unix_socket(stream), [data], [descriptor])
    except OSError as error:
        raise TransferError(f"the memory's descriptor could not be passed: {error}") from error
    if sent != len(data):
        raise TransferError("the memory's descriptor could not be passed: the peer takes nothing")


def receive_descriptor(stream: FrameSocket, *, timeout_s: float) -> tuple[Frame, Descriptor]:
    """Receive a frame and the descriptor that came with its first byte, if any. Raises TransferError."""
    stream.wait_readable(time.monotonic() + timeout_s)
    try:
        data, fds, flags, _ = socket.recv_fds(_unix_socket(stream), HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise TransferError(f"the memory's descriptor could not be received: {error}") from error
    descriptor = Descriptor(fds[0] if fds else None)
    with contextlib.ExitStack() as stack:
        stack.push(descriptor)
        if flags & socket.MSG_CTRUNC:
            raise TransferError("the receiver passed more than the descriptor of its memory")
        frame = stream.receive_message(decode_header(data))
        stack.pop_all()
    return frame, descriptor


def _unix_socket(stream: FrameSocket) -> socket.socket:
    assert isinstance(stream.connection, socket.socket)  # TLS is for TCP
    return stream.connection


def connect(path: str, *, timeout_s: float) -> socket.socket:
    """Connect to a receiver's unix socket. Raises TransferError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except (OSError, ValueError) as error:
        connection.close()
        raise TransferError(f"cannot reach the shared memory at {path}: {error}") from error
    return connection


class ShmBlockWriter:
    """Writes into the receiver's memory, then tells it."""

    turn_bytes = 4 * 1024 * 1024  # a turn costs some 50 us besides the copying, which takes 100 us a MiB

    def __init__(self, stream: FrameSocket, remote: BlockMemory) -> None:
        """Take `remote`, the receiver's memory as mapped here, over."""
        self._stream = stream
        self._remote = remote

    def write(self, transfer_id: int, portions: Sequence[Portion]) -> None:
        """Copy the portions to where they belong. Raises StaleHandle, TransferError."""
        pieces: list[Piece] = []
        for portion in portions:
            start, source = portion.offset, portion.source
            target = self._remote.block(portion.block_id)[start : start + len(source)]
            pieces.append(portion.piece(checksum=copy_with_checksum(target, source)))
        self._stream.send(Write(transfer_id, tuple(pieces)))

    def close(self) -> None:
        """Unmap the receiver's memory."""
        self._remote.close()
