"""How the threads of one model compute a step together: all run the same code on their own part of the work.

A barrier separates phases. It spins, as phases take microseconds. When that takes long, another thread of the team has
no processor: then it gives its own away, and at last sleeps until the barrier opens, so that a machine with more to do
than it has processors for is not kept busy by threads that wait. Between steps the members sleep on semaphores.
"""

from __future__ import annotations

from twinstage.models.fused.fields import SyncPlace
from twinstage.models.fused.intrinsics import (
    atomic_add,
    futex_wait,
    futex_wake_all,
    kernel,
    load_acquire,
    spin_pause,
    store_i64,
    yield_processor,
)

ARRIVED, GENERATION, ASLEEP = int(SyncPlace.ARRIVED), int(SyncPlace.GENERATION), int(SyncPlace.ASLEEP)

_SPINS = 2000  # some tens of microseconds
_SPINS_BETWEEN_YIELDS = 50
_YIELDS = 250


@kernel
def barrier(sync, num_threads):  # type: ignore[no-untyped-def]
    """Wait until all threads of the team are here; what they wrote before is visible after."""
    if num_threads == 1:
        return
    generation = load_acquire(sync + GENERATION)
    if atomic_add(sync + ARRIVED, 1) == num_threads - 1:
        store_i64(sync + ARRIVED, 0, 0)
        # One who goes to sleep says so before it looks at the generation for the last time, and here the generation
        # changes before we look for sleepers: so one of the two notices the other. Both changes are locked operations,
        # past which the processor moves nothing.
        atomic_add(sync + GENERATION, 1)
        if load_acquire(sync + ASLEEP) != 0:
            futex_wake_all(sync + GENERATION)
        return
    spins = 0
    while load_acquire(sync + GENERATION) == generation:
        spin_pause()
        spins += 1
        if spins > _SPINS and spins % _SPINS_BETWEEN_YIELDS == 0:
            if spins < _SPINS + _YIELDS * _SPINS_BETWEEN_YIELDS:
                yield_processor()
            else:
                atomic_add(sync + ASLEEP, 1)
                futex_wait(sync + GENERATION, generation)  # returns at once when it has changed
                atomic_add(sync + ASLEEP, -1)
