"""The engines that Twinstage is compared with, each in a virtual environment of its own outside the repository.

    $TWINSTAGE_BENCH_HOME (~/.cache/twinstage/bench)
        peers/llama/     llama.cpp, built from source for this machine's CPU
        peers/vllm/      vLLM's CPU build
        models/          the demo model as Q8_0, for llama.cpp
        settings/        which settings of their servers proved best
        logs/            what installing and running them printed

Transformers is measured in the project's own environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.loading import CONTEXT, SLOTS, Server
from bench.machine import describe_machine
from bench.peers.commands import (
    NO_TCMALLOC,
    find_tcmalloc,
    llama_server,
    llama_settings,
    vllm_server,
    vllm_settings,
)
from bench.peers.install import PEERS, PeerMissing, install_peer, installed_version, is_complete
from bench.peers.models import prepare_q8_0
from bench.peers.servers import PeerServer, ServerCommand
from bench.peers.settings import Choice, Setting, Start, best_setting, remembered
from twinstage.models.resolve import resolve_model

__all__ = ["PEERS", "PeerMissing", "Peers", "bench_home"]


def bench_home() -> Path:
    """The folder of everything that outlives a run: $TWINSTAGE_BENCH_HOME, else ~/.cache/twinstage/bench."""
    configured = os.environ.get("TWINSTAGE_BENCH_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "twinstage" / "bench"


@dataclass(kw_only=True)
class Peers:
    """Where the peers are. `directory` has a virtual environment for each, by name.

    `vllm_dtype`: float32 or bfloat16; by default what suits the CPU.
    """

    home: Path
    directory: Path
    progress: Callable[[str], None]
    vllm_dtype: str = ""
    missing: dict[str, str] = field(default_factory=dict)  # why one cannot be measured
    settings: dict[str, str] = field(default_factory=dict)  # with which a server runs, in words
    _vllm: PeerServer | None = None

    def install(self, names: Sequence[str]) -> None:
        """Install those that are not there yet. One that cannot be installed is noted in `missing`."""
        for name in names:
            if is_complete(self.directory / name, PEERS[name]):
                continue
            try:
                install_peer(
                    PEERS[name],
                    self.directory / name,
                    log_path=self.log_path(f"install-{name}"),
                    progress=self.progress,
                )
            except PeerMissing as error:
                self.missing[name] = str(error)
                self.progress(f"{name} cannot be measured: {error}")

    def python(self, name: str) -> Path:
        """The interpreter of a peer. Raises PeerMissing when it is not installed."""
        if name in self.missing:
            raise PeerMissing(self.missing[name])
        if installed_version(self.directory / name, PEERS[name]) is None:
            raise PeerMissing(f"{name} is not installed in {self.directory / name}")
        return self.directory / name / "bin" / "python"

    def version(self, name: str) -> str:
        """Raises PeerMissing."""
        self.python(name)
        version = installed_version(self.directory / name, PEERS[name])
        assert version is not None
        return version

    def q8_0_model(self) -> Path:
        """The demo model for llama.cpp, made when it is not there yet. Raises PeerMissing."""
        return prepare_q8_0(self.home / "models", python=self.python("llama"), log_path=self.log_path("quantize"))

    def llama(self, *, threads: int) -> ServerCommand:
        """llama.cpp's server for the load of rows, at its best setting. Raises PeerMissing."""

        def start(setting: Setting) -> ServerCommand:
            return llama_server(self, slots=SLOTS, context_tokens=CONTEXT, threads=threads, setting=setting)

        return self._at_its_best("llama", llama_settings(), start)

    def vllm(self) -> PeerServer:
        """The server of vLLM at its best setting, started once for all rows, as that takes minutes, and paused.

        Raises PeerMissing.
        """
        if self._vllm is not None:
            return self._vllm
        directory = resolve_model("demo", progress=self.progress).directory
        tcmalloc = find_tcmalloc()

        def start(setting: Setting) -> ServerCommand:
            return vllm_server(self, directory, dtype=self.vllm_dtype or _vllm_dtype(), setting=setting)

        try:
            how = self._at_its_best("vllm", vllm_settings(tcmalloc), start)
            self.progress(f"starting {how.name} (this takes minutes; log: {how.log_path})")
            self._vllm = PeerServer(how)
        except PeerMissing as error:
            self.missing["vllm"] = str(error)
            raise
        if tcmalloc is None:
            self.progress(NO_TCMALLOC)
            self.settings["vllm"] += f". {NO_TCMALLOC}"
        self._vllm.pause()
        return self._vllm

    def _at_its_best(self, name: str, settings: Sequence[Setting], start: Start) -> ServerCommand:
        """How a server is started so that it serves most tokens per second. Raises PeerMissing."""

        def choose() -> Choice:
            return best_setting(
                settings, start, lambda server: Server.of_peer(server).trial_rate(), progress=self.progress
            )

        machine = describe_machine()
        circumstances = {
            "version": self.version(name),
            "server": start(settings[0]).name,
            "cpu": machine.cpu,
            "cores": machine.cores,
            "settings": [asdict(setting) for setting in settings],
        }
        choice = remembered(self.home / "settings" / f"{name}.json", circumstances=circumstances, choose=choose)
        self.settings[name] = choice.in_words()
        return start(next(setting for setting in settings if setting.name == choice.name))

    def close(self) -> None:
        """End what was started for several rows. Idempotent."""
        if self._vllm is not None:
            self._vllm.close()
            self._vllm = None

    def log_path(self, name: str) -> Path:
        directory = self.home / "logs"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"{name}.log"


def _vllm_dtype() -> str:
    """Bfloat16 where the CPU multiplies such numbers."""
    has_bfloat16 = {"avx512_bf16", "amx_bf16"} & set(describe_machine().features)
    return "bfloat16" if has_bfloat16 else "float32"
