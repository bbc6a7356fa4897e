"""Measures Twinstage and, on the same machine in the same run, the engines that it is compared with."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from bench.engines.launch import ROOT
from bench.peers import PEERS, Peers, bench_home
from bench.rows import ROW_NAMES, load_row
from bench.session import Session
from twinstage.telemetry.log import configure_logging

ROUNDS, QUICK_ROUNDS = 5, 2


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 when a row could not be measured."""
    options = _parser().parse_args(arguments)
    if options.list:
        for name in ROW_NAMES:
            row = load_row(name)
            print(f"{name:<16} {row.title} (at most {row.limit_s:.0f} s)")
        return 0
    configure_logging(role="bench", level="warning", format="console")
    session = _session(options)
    if options.render:
        print(session.render())
        return 0
    names = [name for name in options.rows or ROW_NAMES if not options.missing or not session.is_measured(name)]
    if options.quick and not options.rows:
        names = [name for name in names if load_row(name).quick]
    if session.peers is not None:
        session.peers.install(needed_peers(names, install_only=options.install))
        if options.install:
            return 1 if session.peers.missing else 0
    try:
        reports = session.run(names)
    finally:
        if session.peers is not None:
            session.peers.close()
    print(session.output / "RESULTS.md")
    return 1 if any(report.result is None for report in reports) else 0


def needed_peers(names: Sequence[str], *, install_only: bool) -> list[str]:
    """Those that the rows measure: building one takes many minutes, and most rows have none."""
    return sorted(PEERS) if install_only else sorted({peer for name in names for peer in load_row(name).peers})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "rows", nargs="*", choices=[*ROW_NAMES, []], metavar="ROW", help="rows to measure; all by default"
    )
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("--render", action="store_true", help="write table and plots again from the JSON files")
    parser.add_argument("--install", action="store_true", help="only install the peers")
    parser.add_argument("--missing", action="store_true", help="leave out rows that have a result already")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller cases")
    parser.add_argument("--no-peers", action="store_true", help="measure Twinstage alone")
    parser.add_argument(
        "--peers-at", type=Path, metavar="DIR", help="the peers' virtual environments (DIR/llama, DIR/vllm)"
    )
    parser.add_argument(
        "--rounds", type=int, help=f"how often to measure; {ROUNDS} by default, {QUICK_ROUNDS} when quick"
    )
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the time limits, for slow machines")
    parser.add_argument(
        "--weights", help="precisions of our engine, such as int8,fp32; the first is compared with peers"
    )
    parser.add_argument("--vllm-dtype", default="", help="float32 or bfloat16; by default what suits the CPU")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results, plots and RESULTS.md go")
    return parser


def _session(options: argparse.Namespace) -> Session:
    home = bench_home()
    peers = None
    if not options.no_peers:
        peers = Peers(
            home=home, directory=options.peers_at or home / "peers", progress=_progress, vllm_dtype=options.vllm_dtype
        )
    output = options.output or (ROOT / "build" / "bench-quick" if options.quick else ROOT / "bench")
    return Session(
        output=output,
        home=home,
        peers=peers,
        quick=options.quick,
        rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
        patience=options.patience,
        weights=options.weights.split(",") if options.weights else ["int8"] if options.quick else None,
        progress=_progress,
    )


def _progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that scopes are left, and what was started is ended


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
