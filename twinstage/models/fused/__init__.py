"""A second way to run a model: packed weights and compiled kernels of its own, one compiled call a step.

    spec -> weights (packed once, kept in the cache) -> model, which runs `step` (compiled once, kept in the cache)

For the common dense decoder (RMSNorm, RoPE, grouped-query attention, gated MLP); other models run as stock modules.
"""
