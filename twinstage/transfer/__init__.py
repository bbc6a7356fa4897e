"""The KV channel: how the blocks of a prompt get from the worker that computed it to the worker that goes on.

    of the sender      sender      what its owner uses; one peer for each decode worker
                       peer        one connection: its writer thread and its reader thread
                       outgoing    one transfer
                       dial        reaching the receiver
    of the receiver    receiver    what its owner uses; listens
                       callers     who is connected, and how many may be
                       connection  one connection: its thread
                       incoming    the books: all transfers, and which blocks nobody may reuse yet
                       gate        what shuts a revoked transfer's blocks off, over tcp
    of both            values      what their owners see
                       messages    what they say to each other; `frames` how it is encoded, `wire` how it is sent,
                                   `reasons` how errors are named
                       handshake   finding out that they fit together; `host` whether they share memory
                       shm, tcp    how bytes move

This package exports nothing; import the modules.
"""
