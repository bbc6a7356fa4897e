"""BERT and its kin on kernels of their own: all layers of a batch in one call, by all threads.

`model` is what others use. Matrix products, vectors and threads are those of `twinstage/models/fused`.
"""
