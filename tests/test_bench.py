"""The pure parts of `bench/`, and the pipe to its engines."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.__main__ import needed_peers
from bench.contest import Contest
from bench.engines.client import EngineFailed, EngineProcess
from bench.engines.launch import Engines, own_options
from bench.machine import LoadWatch, MachineLoad, MemoryUse, parse_memory_use
from bench.peers.commands import find_tcmalloc, vllm_settings
from bench.peers.install import PEERS, PeerMissing, installed_version, is_complete
from bench.peers.servers import ServerCommand, free_port
from bench.peers.settings import Choice, Setting, best_setting, remembered
from bench.plots import Axis, draw
from bench.results import (
    Comparison,
    Curve,
    Measurement,
    RowReport,
    RowResult,
    Series,
    Target,
    read_report,
    write_report,
)
from bench.row import Context
from bench.rows import ROW_NAMES, first_token, load_row, served, transfer
from bench.session import RowTookTooLong, time_limit
from bench.summary import gaps, percentile, ratios, summarize
from bench.table import number, render
from bench.version import own_version
from fake_openai import FakeOpenAi
from twinstage.bench import LoadOptions, Protocol, TokenRange, run_load

RESULT = RowResult(
    measurements=[
        Measurement(case="8 tokens", engine="ours", quantity="speed", unit="tokens/s", values=[10.0, 30.0, 20.0]),
        Measurement(case="8 tokens", engine="theirs", quantity="speed", unit="tokens/s", values=[10.0, 10.0, 16.0]),
    ],
    comparisons=[
        Comparison(case="8 tokens", what="ours / theirs", values=[1.0, 3.0, 1.25], target=Target.at_least(1.3)),
        Comparison(case="8 tokens", what="added", values=[1234.5], unit="ms", target=Target.at_most(2000)),
        Comparison(case="8 tokens", what="untargeted", values=[7.0]),
    ],
    curves=[Curve(name="c", title="C < D", x_label="x", y_label="y", series=[Series(name="s", points=[(1.0, 2.0)])])],
    notes=["a note"],
    versions={"peer": "1.2"},
)
REPORT = RowReport(
    row="prefill",
    title="Speed",
    quick=False,
    started="2026-01-01T00:00:00+00:00",
    seconds=12.0,
    machine={"cpu": "A", "features": ["avx2"], "cores": 2, "memory_gib": 8.0, "kernel": "6", "python": "3.11"},
    load={"load_average": 0.25, "remarks": ["other processes used 30% of the CPU time"]},
    versions={"twinstage": "0.9 (0a1b2c3+)", "peer": "1.2"},
    result=RESULT,
)


def test_summary_and_ratios() -> None:
    summary = summarize([3.0, 1.0, 10.0, 2.0])
    assert (summary.median, summary.lowest, summary.highest, summary.count) == (2.5, 1.0, 10.0, 4)
    assert ratios([2.0, 9.0], [4.0, 3.0]) == [0.5, 3.0]
    assert gaps([1.0, 1.5, 3.0]) == [0.5, 1.5]
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 1.0) == 2.0
    for call in (
        lambda: summarize([]),
        lambda: summarize([float("nan")]),
        lambda: ratios([1.0], []),
        lambda: percentile([], 0),
    ):
        with pytest.raises(ValueError, match=r"cannot summarize|zip|no percentile"):
            call()


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    path = write_report(REPORT, tmp_path)
    assert render([read_report(path)]) == render([REPORT])
    assert '"met": false' in path.read_text()  # the median of the ratios is 1.25
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 0'))
    with pytest.raises(ValueError, match="measure that row again"):
        read_report(path)


def test_the_page_says_what_was_met_and_what_disturbed() -> None:
    failed = replace(REPORT, row="decode", title="Failed", result=None, error="EngineFailed: gone")
    page = render([REPORT, failed])
    assert "| prefill | 8 tokens | ours / theirs | 1.25 (1.00 .. 3.00) | >= 1.3 | no: 3.8% below |" in page
    assert "| prefill | 8 tokens | added | 1,234 ms | <= 2000 ms | yes |" in page
    assert "| 8 tokens | untargeted | 7.00 |" in page
    assert "| 8 tokens | 20.0 (10.0 .. 30.0) | 10.0 (10.0 .. 16.0) |" in page
    assert "`python -m bench prefill`, Twinstage 0.9 (0a1b2c3+), 2026" in page
    assert "**not quiet**: other processes used 30%" in page
    assert "**Not measured**: EngineFailed: gone" in page
    assert [number(value) for value in (0, 0.00123, 0.0450, 1.234, 45.67, 98765.4)] == [
        "0", "0.0012", "0.045", "1.23", "45.7", "98,765",
    ]  # fmt: skip


def test_a_plot_is_well_formed_and_in_its_frame() -> None:
    curve = Curve(
        name="c",
        title="A & <B>",
        x_label="x",
        y_label="y",
        series=[Series(name="s", points=[(128.0, 5.0), (512.0, 250.0), (2000.0, 90.0)])],
        logarithmic=True,
    )
    drawing = ElementTree.fromstring(draw(curve))
    assert "A & <B>" in "".join(drawing.itertext())
    line = next(element for element in drawing.iter() if element.tag.endswith("polyline"))
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert all(0 < x < 720 and 0 < y < 420 for x, y in places)
    assert places[1][1] < places[2][1] < places[0][1]  # more is further up
    assert Axis([0.0, 47.0], start=0, end=100).ticks == [0, 10, 20, 30, 40]


def test_the_load_watch_sees_its_own_work_and_names_what_disturbs() -> None:
    watch = LoadWatch()
    deadline_s = time.monotonic() + 0.3
    while time.monotonic() < deadline_s:
        pass
    assert watch.finish().own_share > 0
    quiet = MachineLoad(load_average=0.1, own_share=0.9, others_share=0.01, steal_share=0.0)
    assert quiet.to_dict()["is_quiet"]
    disturbed = replace(quiet, others_share=0.2, steal_share=0.1)
    assert len(disturbed.remarks) == 2


def test_every_row_loads_and_bounds_its_time() -> None:
    rows = [load_row(name) for name in ROW_NAMES]
    assert [row.name for row in rows] == list(ROW_NAMES)
    assert all(0 < row.limit_s <= 900 for row in rows)
    with pytest.raises(RowTookTooLong, match="sleepy was ended"), time_limit(0.05, what="sleepy"):
        time.sleep(5)


def test_only_the_peers_that_rows_measure_are_installed() -> None:
    assert needed_peers(["transfer", "router", "overload"], install_only=False) == []
    assert needed_peers(["transfer", "decode"], install_only=False) == ["llama"]
    assert needed_peers(["transfer"], install_only=True) == sorted(PEERS)
    for row in map(load_row, ROW_NAMES):
        assert "vllm" in row.peers or not row.needs_vllm
        assert "llama" in row.peers or not row.needs_llama_server


SMAPS = """\
7f0000000000-7f0000001000 r--s 00000000 fd:00 11                         /cache/gguf/model.safetensors
Size:               2000 kB
Rss:                1000 kB
7f0000002000-7f0000003000 rw-s 00000000 00:01 12                         /memfd:twinstage-kv (deleted)
Rss:                  30 kB
7f0000004000-7f0000005000 rw-p 00000000 00:00 0
Rss:                   7 kB
7f0000006000-7f0000007000 r-xp 00000000 fd:00 13                         /usr/lib/libc.so.6
Rss:                   5 kB
"""


def test_memory_is_told_apart_by_what_is_mapped() -> None:
    assert parse_memory_use(SMAPS, weights_below="/cache") == MemoryUse(
        weights_bytes=1000 * 1024, shared_bytes=30 * 1024, other_bytes=12 * 1024
    )


def test_what_rows_make_of_their_values() -> None:
    times = {(128, "one process"): [0.5, 0.4, 0.6], (128, "disaggregated"): [0.51, 0.42, 0.607]}
    added = first_token.result_of(times, precision="int8", versions={}).comparisons[0]
    assert added.values == pytest.approx([10.0, 20.0, 7.0])
    assert added.target == Target.at_most(15.0)  # 5 ms and 2 % of 500 ms
    shares = transfer.result_of({"memcpy": [0.01, 0.02], "shm": [0.01, 0.04], "tcp": [0.04, 0.04]}).comparisons
    assert [(entry.what, list(entry.values), entry.is_met) for entry in shares] == [
        ("shm, share of memcpy", [1.0, 0.5], False),
        ("tcp, share of memcpy", [0.25, 0.5], True),
    ]


async def test_served_compares_every_precision_and_holds_the_first_to_the_targets() -> None:
    async with FakeOpenAi() as server:
        options = LoadOptions(
            addresses=(server.address,),
            protocol=Protocol.OPENAI,
            concurrency=1,
            requests=1,
            prompt_tokens=TokenRange(8, 8),
            output_tokens=TokenRange(3, 3),
            vocabulary_size=100,
        )
        one = await run_load(options)
    names = ["Twinstage int8", "Twinstage fp32", "llama.cpp server Q8_0"]
    found = {(case, name): [one] for case in ("16 concurrent", "one client") for name in names}
    result = served.result_of(found, names, notes=[], versions={})
    assert {entry.engine for entry in result.measurements} == set(names)
    targets = {(entry.case, entry.what): entry.target for entry in result.comparisons}
    peer = "llama.cpp server Q8_0"
    assert targets == {
        ("16 concurrent", f"output tokens/s, Twinstage int8 / {peer}"): Target.at_least(1.5),
        ("16 concurrent", f"output tokens/s, Twinstage fp32 / {peer}"): None,
        ("16 concurrent", f"time to first token p50, Twinstage int8 / {peer}"): Target.at_most(0.5),
        ("16 concurrent", f"inter-token gap p50, Twinstage int8 / {peer}"): Target.at_most(0.9),
        ("one client", f"output tokens/s, Twinstage int8 / {peer}"): Target.at_least(1.0),
        ("one client", f"output tokens/s, Twinstage fp32 / {peer}"): None,
    }


def test_the_version_names_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert own_version(tmp_path).endswith("(commit unknown)")
    git("init", "-q")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "--short", "HEAD")
    (tmp_path / "bench" / "results" / "decode.json").write_text("{}")  # what a run writes is no change of the code
    assert own_version(tmp_path).endswith(f"({commit})")
    (tmp_path / "new.py").write_text("2")
    assert own_version(tmp_path).endswith(f"({commit}+)")


class ToyEngine:
    """Prefills at a pace, and fails from some call on."""

    versions: dict[str, str] = {}  # noqa: RUF012 - the protocol has it writable

    def __init__(self, name: str, seconds: float, *, fails_at: int = 1000) -> None:
        self.name = name
        self._seconds = seconds
        self._calls_left = fails_at
        self.closed = False
        self.is_awake = False

    def pause(self) -> None:
        self.is_awake = False

    def resume(self) -> None:
        self.is_awake = True

    def prefill(self, tokens: int) -> float:
        assert self.is_awake
        self._calls_left -= 1
        if self._calls_left < 0:
            raise EngineFailed("out of memory")
        return self._seconds

    def decode(self, *, batch: int, context: int, steps: int) -> float:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


def test_a_contest_compares_with_ours_and_goes_on_without_a_peer_that_fails(tmp_path: Path) -> None:
    engines = Engines(peers=None, log_directory=tmp_path, progress=lambda _: None, own=own_options())
    context = Context(quick=False, rounds=3, peers=None, engines=engines, directory=tmp_path, progress=lambda _: None)
    frail = ToyEngine("frail", 1.0, fails_at=2)
    engines_in_turn = [ToyEngine("Twinstage x", 1.0), ToyEngine("peer", 2.0), frail]
    contest = Contest(context=context, engines=[*engines_in_turn])
    contest.measure(
        "c", lambda engine: 10 / engine.prefill(10), quantity="q", unit="u", targets={"peer": Target.at_least(3)}
    )
    assert not any(engine.is_awake for engine in engines_in_turn)
    result = contest.result()
    assert [(entry.engine, entry.values) for entry in result.measurements] == [
        ("Twinstage x", [10.0] * 3),
        ("peer", [5.0] * 3),
    ]
    assert [(entry.values, entry.is_met) for entry in result.comparisons] == [([2.0] * 3, False)]
    assert frail.closed
    assert "frail failed at c" in result.notes[0]
    contest.engines[0] = ToyEngine("Twinstage x", 1.0, fails_at=0)
    with pytest.raises(EngineFailed):
        contest.measure("d", lambda engine: engine.prefill(1), quantity="q", unit="u", targets={})


def test_a_peer_is_installed_when_its_server_is_built_too(tmp_path: Path) -> None:
    peer = PEERS["llama"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert installed_version(tmp_path, peer) is None
    (tmp_path / "lib" / "python3.11" / "site-packages" / "llama_cpp_python-9.8.7.dist-info").mkdir(parents=True)
    assert installed_version(tmp_path, peer) == "9.8.7"
    assert not is_complete(tmp_path, peer)
    (tmp_path / "bin" / "llama-server").touch()
    assert is_complete(tmp_path, peer)


ENGINE = """
import sys, time
from bench.engines.protocol import serve
def load():
    print("chatter of a library")
    def fail(): raise OSError("no disk")
    def end(): sys.exit(3)
    def prefill(tokens): print("more"); return {"seconds": tokens / 10}
    return {"describe": lambda: {"name": "toy", "versions": {"toy": "2"}}, "prefill": prefill, "fail": fail, "end": end,
            "sleep": lambda: time.sleep(60)}
serve(load)
"""


def test_the_pipe_to_an_engine(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[1])
    engine = EngineProcess(
        [sys.executable, "-c", ENGINE], environment={"PYTHONPATH": root}, log_path=tmp_path / "log", start_timeout_s=60
    )
    try:
        assert (engine.name, engine.versions) == ("toy", {"toy": "2"})
        assert engine.prefill(5) == 0.5
        with pytest.raises(EngineFailed, match="OSError: no disk"):
            engine.call("fail")
        assert engine.prefill(7) == 0.7  # and it lives on
        with pytest.raises(EngineFailed, match=r"no answer within 0 s"):
            engine.call("sleep", timeout_s=0.1)
    finally:
        engine.close()
    assert "chatter of a library" in (tmp_path / "log").read_text()
    ended = EngineProcess([sys.executable, "-c", ENGINE], environment={"PYTHONPATH": root}, log_path=tmp_path / "log")
    try:
        with pytest.raises(EngineFailed, match="has ended"):
            ended.call("end")
    finally:
        ended.close()


def test_the_best_setting_of_a_server_is_found_and_remembered(tmp_path: Path) -> None:
    def start(setting: Setting) -> ServerCommand:
        port = free_port()
        serves = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port), *setting.arguments]
        return ServerCommand(
            name="peer",
            command=serves,
            environment=setting.environment,
            port=port,
            ready_path="/",
            ready_limit_s=60,
            log_path=tmp_path / "log",
        )

    rates = iter([3.0, 5.0])
    settings = [Setting(name="slow"), Setting(name="fast"), Setting(name="broken", arguments=("--no-such-flag",))]
    choice = best_setting(settings, start, lambda _: next(rates), progress=lambda _: None)
    assert choice.in_words() == "fast (tried, output tokens/s: slow 3; fast 5; broken failed)"
    assert "no-such-flag" in choice.failed["broken"]
    with pytest.raises(PeerMissing, match="no-such-flag"):
        best_setting(settings[2:], start, lambda _: 0.0, progress=lambda _: None)

    path, calls, chosen = tmp_path / "settings" / "peer.json", [], replace(choice, failed={})

    def choose() -> Choice:
        calls.append(1)
        return chosen

    for version in ("1", "1", "2"):  # another version is tried again
        found = remembered(path, circumstances={"version": version, "settings": ("a",)}, choose=choose)
        assert found == chosen
    assert len(calls) == 2
    chosen = choice  # where a setting failed, it may have been the machine's fault
    for _ in range(2):
        remembered(path, circumstances={"version": "3"}, choose=choose)
    assert len(calls) == 4


def test_tcmalloc_is_preloaded_for_vllm_where_it_is(tmp_path: Path) -> None:
    assert find_tcmalloc([tmp_path]) is None
    assert not any("LD_PRELOAD" in setting.environment for setting in vllm_settings(None))
    library = tmp_path / "x86_64-linux-gnu" / "libtcmalloc_minimal.so.4"
    library.parent.mkdir()
    library.touch()
    assert find_tcmalloc([tmp_path]) == library
    with_it = [setting for setting in vllm_settings(library) if "LD_PRELOAD" in setting.environment]
    assert len(with_it) == 3
    assert all("tcmalloc" in setting.name for setting in with_it)
