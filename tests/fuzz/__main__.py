"""`python -m fuzz`: searches for inputs that break a target, guided by coverage (Atheris). `make fuzz` calls it.

Each target is searched in a process of its own (`search`). What is found goes to `build/fuzz`; with `--keep`, the
smallest of it goes to `corpus/`. An input that breaks a target is written to `build/fuzz` and named, and the exit code
is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from fuzz.seeds import seeds, write_corpus

BUILD = Path(__file__).resolve().parent.parent.parent / "build" / "fuzz"
MAX_INPUT_BYTES = 4096
MAX_KEPT, MAX_KEPT_BYTES = 60, 512  # inputs of a target in `corpus/`, and the size of one
NAMES = ("frames", "public", "worker", "bundle")


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="time for all targets together")
    parser.add_argument("--target", choices=NAMES, action="append", help="only this one; repeatable")
    parser.add_argument("--keep", action="store_true", help="write what was found to the corpus that tests repeat")
    arguments = parser.parse_args()
    if find_spec("atheris") is None:
        sys.exit("fuzz: Atheris is not installed; pip install -e '.[fuzz]' does that on Linux with Python 3.11 to 3.13")
    names = arguments.target or NAMES
    broken = [name for name in names if not _run(name, seconds=60 * arguments.minutes / len(names))]
    if arguments.keep and not broken:
        for name in names:
            _keep(name)
    print(f"fuzz: broken: {', '.join(broken)}" if broken else f"fuzz: {', '.join(names)} held")
    return 1 if broken else 0


def _run(name: str, *, seconds: float) -> bool:
    found = BUILD / name
    found.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(name)):
        (found / f"seed-{number}").write_bytes(data)
    options = [f"-max_total_time={max(1, round(seconds))}", f"-max_len={MAX_INPUT_BYTES}", "-rss_limit_mb=2048"]
    return _libfuzzer(name, *options, "-timeout=10", f"-artifact_prefix={BUILD}/{name}-", str(found))


def _keep(name: str) -> None:
    """Write down the smallest inputs that each reached something new."""
    known = set(seeds(name))
    found = [data for path in (BUILD / name).iterdir() if (data := path.read_bytes()) not in known]
    found = [data for data in found if len(data) <= MAX_KEPT_BYTES]
    write_corpus(name, sorted(found, key=lambda data: (len(data), data))[:MAX_KEPT])


def _libfuzzer(name: str, *options: str) -> bool:
    return subprocess.run([sys.executable, "-m", "fuzz.search", name, *options], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
