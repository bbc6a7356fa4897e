"""The process of one search: `python -m fuzz.search TARGET [libFuzzer's options]`. libFuzzer ends it."""

from __future__ import annotations

import sys

import atheris

# Only what is imported here is watched, so nothing of it may be imported before. Of the libraries, which have tests of
# their own, nothing is: that would cost most of the speed.
with atheris.instrument_imports(include=["twinstage", "router"]):
    from fuzz.targets import TARGETS

if __name__ == "__main__":
    program, name, *options = sys.argv
    atheris.Setup([program, *options], TARGETS[name])
    atheris.Fuzz()
