"""What may import what, and what must stay light: the structure that ARCHITECTURE.md promises."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("router", "prefill_worker", "decode_worker")


def _sources(*packages: str) -> list[Path]:
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return [path for path in files if "_pb2" not in path.name]


def _imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_grpc_and_protobuf_stay_at_the_door() -> None:
    """Protos stop in rpc/, client/, the services and the command line; everything else speaks domain types."""
    doors = {ROOT / "twinstage" / "rpc", ROOT / "twinstage" / "client", ROOT / "twinstage" / "cli"}
    offenders: list[str] = []
    for path in _sources("twinstage", *ROLES):
        at_the_door = any(door in path.parents for door in doors) or path.stem.startswith("service")
        if at_the_door or "service" in path.parent.name:
            continue
        offenders += [
            f"{path.relative_to(ROOT)} imports {module}"
            for module in sorted(_imported_modules(path))
            if module.split(".")[0] in {"grpc", "google"} or module.startswith(("twinstage.v1", "twinstage.worker"))
        ]
    assert not offenders, "\n".join(offenders)


def test_nobody_forks() -> None:
    """A fork of a process with threads and gRPC hangs sooner or later; processes are started anew."""
    offenders = [
        str(path.relative_to(ROOT))
        for path in _sources("twinstage", *ROLES)
        if any(module.split(".")[0] == "multiprocessing" for module in _imported_modules(path))
        or "os.fork" in path.read_text(encoding="utf-8")
    ]
    assert not offenders


@pytest.mark.parametrize(
    "module",
    [
        "router.__main__",
        "twinstage.client",
        "twinstage.bench",
        "twinstage.cli.main",
        "twinstage.kv.block_pool",
        "twinstage.kv.layout",
        "twinstage.engine.plan",
        "twinstage.engine.loop",
        "twinstage.hosting.assemble",
        "twinstage.engine.prefill_scheduler",
        "twinstage.engine.decode_scheduler",
        "twinstage.lifecycle",
        "twinstage.text.stream",
        "twinstage.transfer.sender",
        "twinstage.transfer.receiver",
        "prefill_worker.worker",
        "decode_worker.worker",
    ],
)
def test_imports_without_torch(module: str) -> None:
    heavy = ["torch", "transformers"]
    if module == "twinstage.client":  # it is in the process of somebody else
        heavy += ["pydantic", "pydantic_settings", "structlog"]
    code = f"import {module}, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["router.__main__", "twinstage.client"])
def test_router_and_client_import_quickly(module: str) -> None:
    """Under a second of CPU time in the best of three; CPU time and not wall time, as the machine may be busy."""
    code = f"import time; import {module}; print(time.process_time())"
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(seconds) < 1.0
