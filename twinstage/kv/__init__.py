"""KV memory: what a block is, who owns it, and the only code that touches its bytes.

Torch-free but for `store`; import the modules, this package exports nothing.
"""
