"""The KV channel: how the blocks of a prompt get from the worker that computed it to the worker that goes on.

`sender` and `receiver` are its two ends, `values` is what both report, `messages` and `frames` are what they say to
each other, and bytes move in `shm` and `tcp`. This package exports nothing; import the modules.
"""
