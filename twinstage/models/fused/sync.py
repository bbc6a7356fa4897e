"""How the threads of one model compute a step together: all run the same code on their own part of the work.

A barrier separates phases. It spins, as phases take microseconds, and gives the processor away when that takes long,
as then another thread has none. Between steps the members sleep on semaphores. `Sync` is the memory they share.
"""

from __future__ import annotations

from twinstage.models.fused.intrinsics import (
    atomic_add,
    kernel,
    load_acquire,
    spin_pause,
    store_i64,
    store_release,
    yield_processor,
)

# Byte offsets into the shared memory of a team; each on a cache line of its own.
ARRIVED = 0  # threads that wait at the barrier
GENERATION = 64  # barriers passed
STOP = 128  # 1: members shall end
SEMAPHORES = 192  # one of SEMAPHORE_BYTES for each member
SEMAPHORE_BYTES = 64

_SPINS = 2000  # some ten microseconds
_SPINS_BETWEEN_YIELDS = 50


def sync_bytes(num_threads: int) -> int:
    """Size of the shared memory of a team."""
    return SEMAPHORES + SEMAPHORE_BYTES * num_threads


@kernel
def barrier(sync, num_threads):  # type: ignore[no-untyped-def]
    """Wait until all threads of the team are here; what they wrote before is visible after."""
    if num_threads == 1:
        return
    generation = load_acquire(sync + GENERATION)
    if atomic_add(sync + ARRIVED, 1) == num_threads - 1:
        store_i64(sync + ARRIVED, 0, 0)
        store_release(sync + GENERATION, generation + 1)
        return
    spins = 0
    while load_acquire(sync + GENERATION) == generation:
        spin_pause()
        spins += 1
        if spins > _SPINS and spins % _SPINS_BETWEEN_YIELDS == 0:
            yield_processor()
