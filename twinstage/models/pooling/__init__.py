"""Models that pool: embedders, classifiers, scorers of pairs. They prefill and never decode.

layout -> what the files ask for          heads -> what is computed of a batch
pool, after_pooling -> the parts of a     model -> inputs to batches to results
sentence-transformers pipeline
"""
