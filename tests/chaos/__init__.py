"""Chaos: a real cluster under mixed load while its processes and links fail, by a schedule drawn from one seed.

    schedule   what happens when: calls and faults, drawn from a seed, and as JSON to play again
    cases      the requests to generate, and what one engine alone answers to them
    drawing    which of them there are: of all kinds
    pooling    the requests to encode and to score, their answers, and whether those came back
    cluster    router and workers as processes, each behind a link that can fail
    faults     carries the faults out
    load       makes the calls and keeps what came back
    lag        how late this process itself is
    judge      what came back against what must come back
    invariants what must hold when all faults are healed, and after the end
    report     the summary, for people and as JSON
    run        all of it in order

A run is rounds of half a minute, each with the next seed; after each, everything heals and is checked, so that a round
which fails can be played again alone. `make chaos SEED=7 MINUTES=2`, or
`PYTHONPATH=tests python -m chaos --seed 7 --minutes 2`.
"""
