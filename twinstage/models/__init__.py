"""Models: find them, prepare them, load them, and run them on paged KV.

    reference -> resolve -> directory of standard files -> load -> PagedModel (or PoolingModel)

`resolve`, `describe` and `config_files` are free of torch; import the module you need.
"""
