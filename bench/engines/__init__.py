"""Engines as processes that compute on command.

Each engine is a program that reads one JSON object a line, `{"command": "prefill", "tokens": 512}`, and answers with
one, `{"seconds": 0.9}`. Between commands it does nothing, so that several of them take turns on one machine. `protocol`
is their side of it, `client` ours. A peer's program runs in the peer's own virtual environment and imports nothing of
ours but `protocol`.

    describe                          -> {"name": "llama.cpp Q8_0", "versions": {"llama.cpp": "..."}}
    prefill  tokens                   -> {"seconds"}  from a prompt nobody has seen to its first token
    decode   batch, context, steps    -> {"seconds"}  for `steps` steps of `batch` sequences that have `context` tokens
"""
