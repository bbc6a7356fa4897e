"""The threads that compute the steps of one model together."""

from __future__ import annotations

import ctypes
import threading
import weakref

from twinstage.models.fused.buffers import Table
from twinstage.models.fused.fields import SEMAPHORE_BYTES, StepField, SyncPlace
from twinstage.models.fused.memory import AlignedMemory
from twinstage.models.fused.native import LoadedProgram


class Team:
    """The threads beside the caller's that compute a step."""

    def __init__(self, program: LoadedProgram, tables: AlignedMemory, table: Table, *, threads: int) -> None:
        self._sync = AlignedMemory(SyncPlace.SEMAPHORES + SEMAPHORE_BYTES * threads)
        self._tables = tables  # the members read them
        table[StepField.SYNC] = self._sync.address
        libc = ctypes.CDLL(None)
        semaphores = [self._sync.address + SyncPlace.SEMAPHORES + SEMAPHORE_BYTES * index for index in range(threads)]
        for semaphore in semaphores:
            libc.sem_init(ctypes.c_void_p(semaphore), 0, 0)
        members = [
            threading.Thread(target=program, args=(table.ctypes.data, index), name=f"compute-{index}", daemon=True)
            for index in range(1, threads)
        ]
        for member in members:
            member.start()
        self._close = weakref.finalize(self, _end_members, self._sync, semaphores, members)

    def close(self) -> None:
        self._close()


def _end_members(sync: AlignedMemory, semaphores: list[int], members: list[threading.Thread]) -> None:
    stop = ctypes.c_int64.from_address(sync.address + SyncPlace.STOP)
    stop.value = 1
    libc = ctypes.CDLL(None)
    for semaphore in semaphores:
        libc.sem_post(ctypes.c_void_p(semaphore))
    for member in members:
        member.join()
