"""The command line: what each command prints and how it ends, with stand-ins for a router's API and for the roles."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decode_worker.config import DecodeSettings
from fake_public_api import FakeApi, serving
from router.config import RouterSettings
from twinstage.cli.addresses import check_port_is_free, reachable
from twinstage.cli.cluster import Cluster
from twinstage.cli.cluster_config import ClusterConfig
from twinstage.cli.main import app, main
from twinstage.cli.model_choice import choose_model
from twinstage.cli.output import human_bytes
from twinstage.cli.port_security import PortSecurity
from twinstage.cli.signals import stopped_by_signals
from twinstage.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    ModelError,
    Unauthenticated,
)
from twinstage.settings import read_settings
from twinstage.types import Role, Task
from twinstage.types.constraints import ConstraintForm
from twinstage.v1 import common_pb2

START_TIMEOUT_S = 60.0


# --- commands that call a router ------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi()) as served:
        yield served


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `twinstage ARGUMENTS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["twinstage", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_answer_on_stdout_and_totals_on_stderr(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    flags = ["--max-tokens", "9", "--temperature", "0.5", "--seed", "3", "--stop", "END", "--stop", "."]
    flags += ["--top-p", "0.75", "--top-k", "5", "--min-p", "0.25", "--repetition-penalty", "1.5"]
    flags += ["--model", "m", "--timeout", "20"]
    assert run(monkeypatch, command, "Hi", "--address", api.address, *flags) == 0
    output = capsys.readouterr()
    assert output.out == "Paris\n"
    assert "7 prompt tokens" in output.err
    assert "3 completion tokens" in output.err
    assert "finished by stop" in output.err
    assert "total 1250.0 ms" in output.err
    assert "prefill-0 -> decode-0, 2.0 KiB of KV by shm, 1 retries" in output.err
    (request,) = api.requests
    assert (request.model, request.stopping.max_tokens, list(request.stopping.stop)) == ("m", 9, ["END", "."])
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 3)
    assert (request.sampling.top_p, request.sampling.top_k, request.sampling.min_p) == (0.75, 5, 0.25)
    assert request.sampling.repetition_penalty == 1.5
    assert (request.prompt if command == "generate" else request.messages[0].content) == "Hi"


def test_every_form_of_structured_output_has_a_flag(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schema, grammar, tag = (tmp_path / name for name in ("schema.json", "a.lark", "tag.json"))
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "ä"')
    tag.write_text('{"type": "structural_tag"}')
    forms: dict[str, tuple[list[str], dict[str, Any]]] = {
        "json_schema": (["--json-schema", str(schema)], {"json_schema": '{"type": "object"}'}),
        "json_object": (["--json-object"], {"json_object": True}),
        "regex": (["--regex", "a+", "--grammar-backend", "xgrammar"], {"regex": "a+", "backend": 1}),
        "choice": (["--choice", "yes", "--choice", "no"], {"choice": {"values": ["yes", "no"]}}),
        "grammar": (["--grammar", str(grammar)], {"grammar": 'start: "ä"'}),
        "structural_tag": (["--structural-tag", str(tag)], {"structural_tag": '{"type": "structural_tag"}'}),
    }
    assert {form.value for form in ConstraintForm} == set(forms)
    for command, (flags, fields) in zip(itertools.cycle(["chat", "generate"]), forms.values(), strict=False):
        assert run(monkeypatch, command, "Hi", "--address", api.address, *flags) == 0
        assert api.requests[-1].structured_output == common_pb2.StructuredOutput(**fields)
    for flags, complaint in (
        (["--json-schema", str(tmp_path / "none")], "cannot be read"),
        (["--regex", "a", "--json-schema", str(schema)], "--json-schema and --regex exclude each other"),
        (["--grammar-backend", "xgrammar"], "--grammar-backend needs one of"),
    ):
        assert run(monkeypatch, "generate", "Hi", *flags) == 2
        assert complaint in capsys.readouterr().err


def test_options_that_are_left_out_are_left_to_the_router(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "chat", "Hi", "--address", api.address) == 0
    (request,) = api.requests
    assert not request.sampling.HasField("temperature")
    assert not request.stopping.HasField("min_tokens")
    assert request.stopping.max_tokens == 256  # the command's own


def test_answer_as_json(api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "chat", "Hi", "--address", api.address, "--json") == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["text"] == "Paris"
    assert document["finish"] == {"reason": "stop", "matched_token_id": 2, "matched_text": None}
    assert document["summary"]["placement"]["kv_bytes"] == 2048
    assert document["prompt_info"]["model"] == "m"
    assert output.err == ""


def test_embed(api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "embed", "a", "b", "--address", api.address) == 0
    output = capsys.readouterr()
    assert output.out == '2 dimensions  [1.000000, -2.000000]  "a"\n2 dimensions  [1.000000, -2.000000]  "b"\n'
    assert "queue 1.0 ms · decode 500.0 ms · total 1250.0 ms" in output.err  # and no phase that there was not
    assert run(monkeypatch, "embed", "a", "--address", api.address, "--json") == 0
    assert json.loads(capsys.readouterr().out)["vectors"] == [[1.0, -2.0]]


def test_tables(api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TWINSTAGE_ADDRESS", api.address)
    assert run(monkeypatch, "workers") == 0
    table = capsys.readouterr().out
    assert re.search(
        r"decode-0 +decode +ready +SmolLM2-135M-Instruct +10\.0\.0\.1:50062 +60/64 +75% .*3\.0 MiB +shm tcp", table
    )
    assert re.search(r"\? +\? +refused .* 7/9, 2 leaked .*other layout", table)
    assert run(monkeypatch, "models") == 0
    assert re.search(r"m +generate +yes +8192 +49152", capsys.readouterr().out)
    assert run(monkeypatch, "workers", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["transports"] == ["shm", "tcp"]


def test_the_trace_of_a_request(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWINSTAGE_ADDRESS", api.address)
    assert run(monkeypatch, "trace", "mine") == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine  m  1250.0 ms  trace 0af7",
        "       0.0 ms        0.0 ms  router    attempt: WORKER_LOST: gone",
        "     500.0 ms        0.0 ms  decode-0  decode (attempt 2)",
    ]
    assert run(monkeypatch, "trace", "mine", "--json") == 0
    assert json.loads(capsys.readouterr().out)["spans"][0]["process"] == "decode-0"


def test_draining_a_worker(api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "drain", "prefill-1", "--router", api.address) == 0
    assert capsys.readouterr().out == "prefill-1  draining, 3 left\n"
    assert run(monkeypatch, "drain", "prefill-1", "--address", api.address, "--wait", "--timeout", "9") == 0
    assert capsys.readouterr().out == "prefill-1  drained\n"
    monkeypatch.setenv("TWINSTAGE_ADDRESS", api.address)
    assert run(monkeypatch, "drain", "prefill-1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["unfinished"] == 3
    assert run(monkeypatch, "undrain", "prefill-1") == 0
    assert capsys.readouterr().out == "prefill-1  ready\n"
    assert [(request.worker_id, getattr(request, "wait", None)) for request in api.requests] == [
        ("prefill-1", False),
        ("prefill-1", True),
        ("prefill-1", False),
        ("prefill-1", None),
    ]
    api.error = DeadlineExceeded("worker prefill-1 drains, and 3 requests were left at the deadline")
    assert run(monkeypatch, "drain", "prefill-1", "--wait") == 1
    assert "3 requests were left" in capsys.readouterr().err


def test_resetting_prefix_caches(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWINSTAGE_ADDRESS", api.address)
    assert run(monkeypatch, "reset-prefix-cache") == 0
    assert capsys.readouterr().out == "decode-0  4 blocks dropped\n"
    assert run(monkeypatch, "reset-prefix-cache", "--model", "m", "--worker", "prefill-1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [{"worker_id": "prefill-1", "dropped_blocks": 4}]
    assert [(request.model, request.worker_id) for request in api.requests] == [("", ""), ("m", "prefill-1")]


@pytest.mark.parametrize("flags", [["--seed", str(2**64)], ["--max-tokens", str(2**32)]])
def test_a_number_that_no_message_holds_is_one_line(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert run(monkeypatch, "generate", "Hello", "--address", api.address, *flags) == 1
    assert capsys.readouterr().err.startswith("twinstage: the request cannot be sent: ")


def test_a_refused_request_is_one_line(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.texts, api.error = (), InvalidRequest([FieldViolation("prompt", "must not be empty")])
    assert run(monkeypatch, "generate", "", "--address", api.address) == 1
    assert capsys.readouterr().err == "twinstage: prompt: must not be empty\n"


def test_no_router_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "chat", "Hi", "--address", "127.0.0.1:1") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("twinstage: no router answers at 127.0.0.1:1")
    assert "twinstage serve" in error


def test_a_server_that_does_not_speak_plain_grpc_is_asked_about_tls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang_up(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test is over
            while True:
                server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=hang_up, args=(server,), daemon=True).start()
        assert run(monkeypatch, "chat", "Hi", "--address", f"127.0.0.1:{server.getsockname()[1]}") == 1
        server.shutdown(socket.SHUT_RDWR)
    assert "does it speak TLS?" in capsys.readouterr().err


def test_who_sends_no_token_is_told_of_the_flag(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.texts, api.error = (), Unauthenticated("send a token")
    assert run(monkeypatch, "generate", "Hi", "--address", api.address) == 1
    assert capsys.readouterr().err == "twinstage: send a token; --token-file FILE sends one\n"


def test_wrong_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "chat", "Hi", "--max-tokens", "0") == 2
    assert "--max-tokens" in capsys.readouterr().err


# --- what to start --------------------------------------------------------------------------------


def test_models_and_their_tasks(tmp_path: Path) -> None:
    generative, embedder, broken = tmp_path / "llama", tmp_path / "minilm", tmp_path / "broken"
    for directory in (generative, embedder, broken):
        directory.mkdir()
    (generative / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (embedder / "modules.json").write_text("[]")
    assert choose_model(str(generative)).task is Task.GENERATE
    named = choose_model(f"mini={embedder}")
    assert (named.name, named.reference, named.task, named.label) == ("mini", str(embedder), Task.EMBED, "mini")
    assert choose_model("demo-embedding").task is Task.EMBED
    assert choose_model("org/not-here").task is Task.GENERATE
    assert choose_model(f"{tmp_path}/a=b/model.gguf").label == "model"
    with pytest.raises(ModelError):
        choose_model(str(broken))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ClusterConfig(models=()), "at least one model"),
        (ClusterConfig(models=("demo", "demo")), "the same name"),
        (ClusterConfig(models=("demo",), decode=0), "at least one worker of each"),
        (ClusterConfig(models=("demo", "a=demo"), tasks=("score",)), "say of which model.* demo, a$"),
        (ClusterConfig(models=("demo", "a=demo"), tokenizers=("b=x",)), "no model is called b; there are demo, a$"),
        (ClusterConfig(tasks=("embed", "demo=score")), "has another one already"),
        (ClusterConfig(tasks=("translate",)), "is none of generate, "),
        (ClusterConfig(security=PortSecurity(tls_certificate=Path("missing"))), "name both"),
        (ClusterConfig(security=PortSecurity(tokens_file=Path("missing"))), "--tokens-file missing: No such file"),
    ],
)
def test_clusters_that_cannot_be(config: ClusterConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Cluster(config)


def test_serve_hands_its_flags_to_the_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[ClusterConfig] = []
    monkeypatch.setattr("twinstage.cli.serve.serve", lambda config, **_: configs.append(config))
    monkeypatch.setenv("TWINSTAGE_TLS_CLIENT_CA", "ca.pem")
    arguments = "--tls-certificate a.pem --tls-key a.key --tokens-file tokens --model x=demo --model y=org/reranker"
    more = "--tokenizer x=words --revision y=v2 --task y=score --speculative draft_model --draft-model d/e"
    done = CliRunner().invoke(app, ["serve", *arguments.split(), *more.split(), "--draft-revision", "v3"])
    assert done.exit_code == 0, done.output
    (config,) = configs
    first, second = config.chosen_models()
    assert (first.task, first.worker_flags) == (Task.GENERATE, ("--served-model-name", "x", "--tokenizer", "words"))
    named = ("--served-model-name", "y", "--task", "score", "--revision", "v2")
    assert (second.task, second.worker_flags) == (Task.SCORE, named)
    secured = "--tls-certificate a.pem --tls-key a.key --tls-client-ca ca.pem --tokens-file tokens"
    assert " ".join(config.security.flags) == secured
    assert config.decode_flags[2:] == ("--draft-model", "d/e", "--draft-revision", "v3")
    read_settings(RouterSettings, [*config.security.flags, "--workers", "127.0.0.1:1"])
    decode = read_settings(DecodeSettings, [*config.worker_flags(Role.DECODE), *second.worker_flags])
    assert decode.speculation is not None
    assert decode.speculation.draft_revision == "v3"


def test_addresses() -> None:
    assert reachable("0.0.0.0:80") == "127.0.0.1:80"
    assert reachable("[::]:80") == "[::1]:80"
    assert reachable("10.0.0.1:80") == "10.0.0.1:80"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*in use"):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)
    with pytest.raises(ConfigError):
        check_port_is_free("host.invalid", 50051)


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 2048, 5 * 2**30)] == ["0 bytes", "1023 bytes", "2.0 KiB", "5.0 GiB"]


# --- a local cluster, with programs that stand in for the roles -----------------------------------

WORKER = """
import json, os, signal, sys, time
from twinstage.telemetry.process import exit_with_parent_if_asked

def flag(name):
    return sys.argv[sys.argv.index(name) + 1]

exit_with_parent_if_asked()
name, model = flag("--worker-id"), flag("--model")
trace = open(os.environ["TRACE"], "a", buffering=1)
if model == "broken-model":
    sys.exit(print(f"worker: model {model!r} is not here", file=sys.stderr) or 2)
if model == "crashing-model":
    os.kill(os.getpid(), signal.SIGKILL)

def stop(*_):
    trace.write(f"stop {name}\\n")
    if model == "stubborn-model":
        return
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
trace.write(f"start {name} {os.getpid()} {' '.join(sys.argv[1:])}\\n")
assert flag("--log-level") in ("debug", "info"), "a role says that it is ready at level info"
print(json.dumps({"event": "loading", "level": "info", "step": "weights"}), flush=True)
if model != "slow-model":
    print(json.dumps({"event": "worker ready", "level": "info", "address": "127.0.0.1:1"}), flush=True)
while True:
    signal.pause()
"""
ROUTER = """
import json, os, signal, socket, sys
from twinstage.telemetry.process import exit_with_parent_if_asked

exit_with_parent_if_asked()
trace = open(os.environ["TRACE"], "a", buffering=1)
host, _, port = sys.argv[sys.argv.index("--listen") + 1].rpartition(":")
server = socket.create_server((host, int(port)))

def stop(*_):
    trace.write("stop router\\n")
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
trace.write(f"start router {os.getpid()} {' '.join(sys.argv[1:])}\\n")
print(json.dumps({"event": "router ready", "address": f"127.0.0.1:{server.getsockname()[1]}"}), flush=True)
services = ["twinstage.v1.GenerationService", "twinstage.v1.EmbeddingService", "twinstage.v1.ScoringService"]
print(json.dumps({"event": "serving", "services": services}), flush=True)
for line in open(os.environ["TRACE"]):
    kind, name, *_ = line.split()
    if kind == "start" and name not in ("router", os.environ.get("UNREACHABLE")):
        print(json.dumps({"event": "worker ready", "worker": name, "address": "127.0.0.1:1"}), flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put programs in the place of the three roles; returns the file in which they note what happens to them."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, program in (("prefill_worker", WORKER), ("decode_worker", WORKER), ("router", ROUTER)):
        (programs / f"{name}.py").write_text(program)
    trace = tmp_path / "trace"
    trace.touch()
    monkeypatch.setenv("PYTHONPATH", str(programs))
    monkeypatch.setenv("TRACE", str(trace))
    return trace


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(map(lives, pids)):
        assert time.monotonic() < deadline_s, f"still there: {[pid for pid in pids if lives(pid)]}"
        time.sleep(0.02)


def traced(trace: Path, word: str) -> list[list[str]]:
    return [line.split()[1:] for line in trace.read_text().splitlines() if line.split()[0] == word]


@pytest.mark.parametrize(
    ("cpus", "changes", "expected"),
    [
        (4, {"pin_cpus": True}, ["--threads 2 --cpus 0-1", "--threads 2 --cpus 2-3"]),
        (3, {"pin_cpus": True}, ["--threads 1 --cpus 0 ", "--threads 2 --cpus 1-2"]),
        (4, {}, ["--threads 2 --log", "--threads 2 --log"]),
        (4, {"pin_cpus": True, "threads": 3}, ["--threads 3 --log", "--threads 3 --log"]),
        (1, {"pin_cpus": True}, ["--threads 1 --log", "--threads 1 --log"]),
    ],
)
def test_workers_share_the_cores(
    roles: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, changes: dict[str, Any], expected: list[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    with Cluster(ClusterConfig(port=0, **changes)) as cluster:
        cluster.wait_ready(START_TIMEOUT_S)
    started = {name: " ".join(flags) for name, _, *flags in traced(roles, "start")}
    assert expected[0] in started["prefill-0"]
    assert expected[1] in started["decode-0"]


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries)


def test_a_cluster_has_a_secret_of_its_own(roles: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other users of the machine reach the ports of the workers, too."""

    def variable(pid: int, name: str = "WORKER") -> str:
        return _environment(pid)[f"TWINSTAGE_{name}_SECRET_FILE"]

    with Cluster(ClusterConfig(port=0)) as cluster:
        path = Path(variable(cluster.processes["prefill-0"].pid))
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(path.read_text()) >= 32
        cluster.wait_ready(START_TIMEOUT_S)
        for name in ("WORKER", "KV"):
            assert {variable(child.pid, name) for child in cluster.processes.values()} == {str(path)}
        assert not path.exists(), "all have read it"
    monkeypatch.setenv("TWINSTAGE_WORKER_SECRET_FILE", str(tmp_path / "own"))
    with Cluster(ClusterConfig(port=0)) as cluster:
        cluster.wait_ready(START_TIMEOUT_S)
        assert {variable(child.pid) for child in cluster.processes.values()} == {str(tmp_path / "own")}
        assert {variable(child.pid, "KV") for child in cluster.processes.values()}.isdisjoint({str(tmp_path / "own")})


def test_a_cluster_starts_serves_and_stops_in_order(
    roles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, tokens = tmp_path / "logs", tmp_path / "tokens"
    logs.mkdir()
    tokens.write_text("search search-token-0123456789")
    monkeypatch.setenv("TWINSTAGE_TLS_CERTIFICATE", "of the router")
    lines: list[tuple[str, str]] = []
    config = ClusterConfig(
        models=("big=demo", "demo-embedding"),
        prefill=1,
        decode=2,
        port=0,
        threads=3,
        kv_cache_bytes="8MiB",
        kv_transports="tcp",
        prefix_cache=False,
        log_level="debug",
        log_directory=logs,
        decode_flags=("--block-size", "8"),
        tasks=("demo-embedding=score",),
        security=PortSecurity(tokens_file=tokens),
    )
    cluster = Cluster(config, on_line=lambda name, line, event: lines.append((name, line)))
    with cluster:
        cluster.wait_ready(START_TIMEOUT_S)
        assert re.fullmatch(r"127\.0\.0\.1:\d+", cluster.address)
        with socket.create_connection(("127.0.0.1", int(cluster.address.rpartition(":")[2])), timeout=5):
            pass
        pids = [child.pid for child in cluster.processes.values()]
        assert all(map(lives, pids))
        niceness = {name: os.getpriority(os.PRIO_PROCESS, child.pid) for name, child in cluster.processes.items()}
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert niceness.pop("demo-embedding-prefill-0") == min(19, own + 10)  # encoding lets generation go first
        assert set(niceness.values()) == {own}
        told = {name: _environment(child.pid) for name, child in cluster.processes.items()}
        assert [name for name, known in told.items() if "TWINSTAGE_TLS_CERTIFICATE" in known] == ["router"]
    wait_until_gone(pids)
    assert cluster.stop() == dict.fromkeys(cluster.processes, 0)  # again, without harm
    started = {name: " ".join(flags) for name, _, *flags in traced(roles, "start")}
    workers = ["big-prefill-0", "big-decode-0", "big-decode-1", "demo-embedding-prefill-0"]
    assert sorted(started) == sorted([*workers, "router"])
    assert "--model demo --worker-id big-decode-1 --listen 127.0.0.1:0 --threads 3" in started["big-decode-1"]
    for flag in ("--served-model-name big", "--kv-cache-bytes 8MiB", "--kv-transports tcp", "--no-prefix-cache"):
        assert flag in started["big-decode-1"]
    assert "--log-level debug" in started["big-decode-1"]
    assert "--block-size 8" in started["big-decode-0"]
    assert "--block-size" not in started["big-prefill-0"]
    assert [name for name, flags in started.items() if "--task score" in flags] == ["demo-embedding-prefill-0"]
    assert [name for name, flags in started.items() if f"--tokens-file {tokens}" in flags] == ["router"]
    assert started["router"].count("--workers 127.0.0.1:1") == len(workers)
    stopped = [name for name, *_ in traced(roles, "stop")]
    assert stopped[0] == "router"
    assert sorted(stopped[1:]) == sorted(workers)
    assert ("big-prefill-0", '{"event": "loading", "level": "info", "step": "weights"}') in lines
    assert "router ready" in (logs / "router.log").read_text()


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("broken-model", ConfigError, "worker: model 'broken-model' is not here"),
        ("crashing-model", InternalError, "was killed by SIGKILL"),
    ],
)
def test_a_worker_that_dies_at_the_start_ends_everything(
    roles: Path, model: str, error: type[Exception], message: str
) -> None:
    cluster = Cluster(ClusterConfig(models=(model,), port=0))
    with cluster, pytest.raises(error, match=message):
        cluster.wait_ready(START_TIMEOUT_S)
    wait_until_gone([child.pid for child in cluster.processes.values()])
    assert not any(name == "router" for name, *_ in traced(roles, "start"))


def test_a_log_that_cannot_be_written_ends_everything(roles: Path, tmp_path: Path) -> None:
    (tmp_path / "prefill-0.log").mkdir()
    config = ClusterConfig(port=0, log_directory=tmp_path, stop_grace_s=5)
    cluster = Cluster(config)
    with pytest.raises(ConfigError, match=r"--log-directory: cannot write .*prefill-0\.log: Is a directory"), cluster:
        cluster.wait_ready(START_TIMEOUT_S)
    assert not any(lives(child.pid) for child in cluster.processes.values())


def test_a_cluster_that_does_not_get_ready(roles: Path) -> None:
    cluster = Cluster(ClusterConfig(models=("slow-model",), port=0))
    with cluster, pytest.raises(DeadlineExceeded):
        cluster.wait_ready(0.3)
    wait_until_gone([child.pid for child in cluster.processes.values()])


def test_an_interrupted_start(roles: Path) -> None:
    cluster = Cluster(ClusterConfig(models=("slow-model",), port=0))
    with cluster:
        cluster.interrupt()
        with pytest.raises(Cancelled):
            cluster.wait_ready(START_TIMEOUT_S)


def test_a_worker_that_ignores_the_signal_is_killed(roles: Path) -> None:
    config = ClusterConfig(models=("stubborn-model",), port=0, stop_grace_s=3.0)
    with Cluster(config) as cluster:
        cluster.wait_ready(START_TIMEOUT_S)
        assert cluster.stop() == {"router": 0, "prefill-0": -signal.SIGKILL, "decode-0": -signal.SIGKILL}


def test_losing_one_worker_of_several_is_survived(roles: Path) -> None:
    lines: list[str] = []
    config = ClusterConfig(models=("demo",), decode=2, port=0)
    with Cluster(config, on_line=lambda name, line, event: lines.append(line)) as cluster:
        cluster.wait_ready(START_TIMEOUT_S)
        os.kill(cluster.processes["decode-0"].pid, signal.SIGKILL)
        cluster.processes["decode-0"].join(10)
        cluster.interrupt()
        cluster.wait()
        assert "decode-0 was killed by SIGKILL; the others go on" in lines
        os.kill(cluster.processes["decode-1"].pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="decode-1 was killed by SIGKILL"):
            cluster.wait()


# --- twinstage serve, as a process ----------------------------------------------------------------


@contextlib.contextmanager
def serve_process(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A running `twinstage serve` in a session of its own, and the file with all that it prints."""
    output = tmp_path / "output"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "twinstage.cli.main", "serve", *flags],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, output
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)


def wait_for_text(output: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while text not in output.read_text():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline_s, output.read_text()
        time.sleep(0.02)


def pids_of(trace: Path) -> list[int]:
    return [int(pid) for _, pid, *_ in traced(trace, "start")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(roles: Path, tmp_path: Path, number: int) -> None:
    with serve_process(tmp_path, "--port", "0") as (process, output):
        wait_for_text(output, "try: twinstage chat", process)
        assert re.search(r"^serving on 127\.0\.0\.1:\d+$", output.read_text(), re.MULTILINE)
        assert re.search(r"^prefill-0 +loading step=weights$", output.read_text(), re.MULTILINE)
        pids = pids_of(roles)
        assert len(pids) == 3
        process.send_signal(number)
        assert process.wait(20) == 0
        wait_until_gone(pids)
        said = re.findall(r"^(?:stopping|stopped .+)", output.read_text(), re.MULTILINE)
        assert said == ["stopping", "stopped router", "stopped prefill-0", "stopped decode-0"]
    assert len(traced(roles, "stop")) == 3


def test_a_signal_is_acted_on_while_the_main_thread_executes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it arrives just before the main thread begins to wait: handlers in Python would run after the wait."""
    cluster = Cluster(ClusterConfig(port=0))
    interrupted, also = threading.Event(), threading.Event()
    monkeypatch.setattr(cluster, "interrupt", interrupted.set)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # zeros: an unlocked mutex
    in_time: list[bool] = []

    def signal_then_unlock() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        in_time.append(interrupted.wait(5) and also.wait(5))
        libc.pthread_mutex_unlock(mutex)

    with stopped_by_signals(cluster) as interruption:
        interruption.also = also.set
        libc.pthread_mutex_lock(mutex)
        timer = threading.Timer(0.2, signal_then_unlock)
        timer.start()
        libc.pthread_mutex_lock(mutex)  # waits, and no signal interrupts it
        timer.join()
    assert in_time == [True]


def test_a_cluster_is_not_ready_before_the_router_knows_the_last_worker(
    roles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its health says that it serves, as one worker of each kind is enough for that."""
    monkeypatch.setenv("UNREACHABLE", "decode-1")
    timers: list[threading.Timer] = []

    def give_up_a_second_after(name: str, line: str, event: dict[str, object] | None) -> None:
        if name == "router" and "decode-0" in line:
            timers.append(threading.Timer(1.0, cluster.interrupt))
            timers[0].start()

    cluster = Cluster(ClusterConfig(decode=2, port=0), on_line=give_up_a_second_after)
    with cluster, pytest.raises(Cancelled):
        cluster.wait_ready(START_TIMEOUT_S)


def test_a_second_signal_kills_at_once(roles: Path, tmp_path: Path) -> None:
    with serve_process(tmp_path, "--model", "stubborn-model", "--port", "0") as (process, output):
        wait_for_text(output, "serving on", process)
        pids = pids_of(roles)
        process.send_signal(signal.SIGINT)
        wait_for_text(output, "stopping", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT
        wait_until_gone(pids)


def test_a_killed_launcher_leaves_no_process(roles: Path, tmp_path: Path) -> None:
    with serve_process(tmp_path, "--port", "0", "--log-level", "error") as (process, output):
        wait_for_text(output, "serving on", process)
        assert "loading" not in output.read_text()
        pids = pids_of(roles)
        assert len(pids) == 3
        process.kill()
        process.wait(10)
        wait_until_gone(pids)


def test_a_port_in_use_is_told_before_anything_starts(roles: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serve_process(tmp_path, "--port", str(port)) as (process, output):
            assert process.wait(30) == 2
    assert f"port {port} of 127.0.0.1 is in use" in output.read_text()
    assert "Traceback" not in output.read_text()
    assert roles.read_text() == ""


@pytest.mark.parametrize(("model", "code"), [("broken-model", 2), ("crashing-model", 1)])
def test_serve_says_why_it_could_not_start(roles: Path, tmp_path: Path, model: str, code: int) -> None:
    with serve_process(tmp_path, "--model", model, "--port", "0") as (process, output):
        assert process.wait(30) == code
    last_line = output.read_text().splitlines()[-1]
    assert re.match(r"twinstage: (prefill|decode)-0 (ended with exit code 2: worker: model|was killed by)", last_line)
    assert "Traceback" not in output.read_text()
