"""The engine: continuous batching with chunked prefill over paged KV; `core` is the place to start reading.

Import the modules, this package exports nothing, so that its torch-free ones stay torch-free.
"""
