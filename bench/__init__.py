"""Measures Twinstage and, on the same machine in the same run, the engines that it is compared with.

    python -m bench --list            the rows of the table
    python -m bench prefill decode    some rows
    make bench                        all of them, with peers
    make bench-quick                  in under five minutes, without

`row.py` says what a row is, `rows/` has them, `engines/` the processes that compute on command, `peers/` installs what
is not ours. Results: one JSON file a row, plots, and `RESULTS.md`.
"""
