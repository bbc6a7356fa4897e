"""How the peers' servers are started, and the settings that are worth trying on a machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.loading import MODEL
from bench.peers.install import PeerMissing
from bench.peers.servers import ServerCommand, free_port
from bench.peers.settings import Setting

if TYPE_CHECKING:
    from bench.peers import Peers

LLAMA_READY_S = 60.0
VLLM_READY_S = 900.0  # compiling takes most of it, the first time
PLAIN = Setting(name="as it comes")
NO_TCMALLOC = "tcmalloc was not found for vLLM, which recommends it; Debian has it as libtcmalloc-minimal4"


def llama_settings() -> list[Setting]:
    """Its cache of earlier prompts in memory is of no use to a load without repetitions, and costs time."""
    no_cache = ("--cache-ram", "0")
    return [
        PLAIN,
        Setting(name="no prompt cache", arguments=no_cache),
        Setting(name="no prompt cache, no flash attention", arguments=(*no_cache, "--flash-attn", "off")),
    ]


def llama_server(
    peers: Peers, *, slots: int, context_tokens: int, threads: int, setting: Setting = PLAIN
) -> ServerCommand:
    """llama.cpp's own server with room for `slots` requests of `context_tokens` tokens. Raises PeerMissing."""
    port = free_port()
    binary = peers.python("llama").with_name("llama-server")
    if not binary.exists():
        raise PeerMissing(f"llama.cpp's server is not at {binary}")
    command = [str(binary), "--model", str(peers.q8_0_model()), "--alias", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * context_tokens), "--no-webui", *setting.arguments]
    return ServerCommand(
        name="llama.cpp server Q8_0",
        command=command,
        environment=setting.environment,
        port=port,
        ready_path="/health",
        ready_limit_s=LLAMA_READY_S,
        log_path=peers.log_path("llama-server"),
    )


def vllm_settings(tcmalloc: Path | None) -> list[Setting]:
    """Where its OpenMP threads run, and who allocates memory. Left to itself, it keeps one core for its scheduler."""
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    bindings = {
        "threads bound to all CPUs": {"VLLM_CPU_OMP_THREADS_BIND": cpus, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
        "one core kept free": {"VLLM_CPU_OMP_THREADS_BIND": "auto"},
        "threads not bound": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }
    if tcmalloc is None:
        return [Setting(name=name, environment=environment) for name, environment in bindings.items()]
    preload = {"LD_PRELOAD": str(tcmalloc)}
    with_it = [
        Setting(name=f"tcmalloc, {name}", environment={**preload, **environment})
        for name, environment in bindings.items()
    ]
    name, environment = next(iter(bindings.items()))
    return [*with_it, Setting(name=f"no tcmalloc, {name}", environment=environment)]


def vllm_server(peers: Peers, model_directory: Path, *, dtype: str, setting: Setting) -> ServerCommand:
    """`vllm serve`. Raises PeerMissing. `dtype`: float32, or bfloat16 where the CPU multiplies such numbers."""
    port = free_port()
    command = [str(peers.python("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_directory), "--served-model-name", MODEL, "--dtype", dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096", "--max-num-seqs", "32"]
    command += ["--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log", *setting.arguments]
    openmp = peers.directory / "vllm" / "lib" / "libiomp5.so"  # its documentation says to preload it
    preloaded = [str(openmp)] if openmp.exists() else []
    preloaded += [setting.environment["LD_PRELOAD"]] if "LD_PRELOAD" in setting.environment else []
    return ServerCommand(
        name=f"vLLM CPU {dtype}",
        command=command,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(peers.home / "vllm-cache"),
            **setting.environment,
            "LD_PRELOAD": ":".join(preloaded),
        },
        port=port,
        ready_path="/health",
        ready_limit_s=VLLM_READY_S,
        log_path=peers.log_path("vllm-server"),
    )


def find_tcmalloc(roots: Sequence[Path] = (Path("/usr/lib"), Path("/usr/local/lib"))) -> Path | None:
    """The library that vLLM's documentation says to preload; None where it is not installed."""
    names = ("libtcmalloc_minimal.so.4", "*-linux-gnu/libtcmalloc_minimal.so.4")
    return next((path for root in roots for name in names for path in sorted(root.glob(name))), None)
