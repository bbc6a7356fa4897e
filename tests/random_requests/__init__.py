"""Random requests, right and wrong, to a real cluster: none ends with INTERNAL, none hangs, and all blocks come back.

make random-requests                          # 10,000 of them
make random-requests REQUESTS=500 SEED=7
"""
