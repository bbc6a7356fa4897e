"""Fuzzing: what reads bytes from others (`targets`), inputs to begin with (`seeds`), and the search for more.

make fuzz MINUTES=10                 # all targets, guided by coverage
make fuzz MINUTES=10 TARGET=public   # one of them
"""
