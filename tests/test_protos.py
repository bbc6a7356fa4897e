"""The generated code is what the protos say, and the protos say what every client may rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions

from twinstage.v1 import (
    admin_pb2,
    common_pb2,
    embedding_pb2,
    generation_pb2,
    model_pb2,
    scoring_pb2,
    tokenizer_pb2,
)

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("*_pb2*", "*.protoset")
PUBLIC = (admin_pb2, common_pb2, embedding_pb2, generation_pb2, model_pb2, scoring_pb2, tokenizer_pb2)


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "protos" / "generate.py"), str(tmp_path)], check=True)
    generated = sorted(path.relative_to(tmp_path) for pattern in GENERATED for path in tmp_path.rglob(pattern))
    checked_in = sorted(
        path.relative_to(ROOT)
        for pattern in GENERATED
        for path in (ROOT / "twinstage").rglob(pattern)
        if path.suffix != ".pyc"
    )
    assert generated == checked_in
    stale = [str(path) for path in generated if (tmp_path / path).read_bytes() != (ROOT / path).read_bytes()]
    assert not stale, f"run `make protos`: {stale}"


def test_reference_is_fresh_and_has_every_call_and_field(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "protos" / "document.py"), str(tmp_path)], check=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "api").iterdir()}
    assert kept == written, "run `make protos`"
    for module in PUBLIC:
        page = written[f"{Path(module.DESCRIPTOR.name).stem}.md"]
        for service in module.DESCRIPTOR.services_by_name.values():
            assert all(f"\n### {method.name}\n" in page for method in service.methods)
        for message in module.DESCRIPTOR.message_types_by_name.values():
            section = page.partition(f"\n## {message.name}\n")[2].partition("\n## ")[0]
            rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
            assert [row[0] for row in rows] == [f"| `{field.name}`" for field in message.fields], message.full_name
            assert all(len(row[3]) > 5 for row in rows), message.full_name


def test_reads_say_that_they_have_no_side_effects() -> None:
    methods = [
        method
        for module in PUBLIC
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    ]
    reads = {m.name for m in methods if m.GetOptions().idempotency_level == MethodOptions.NO_SIDE_EFFECTS}
    beginnings = ("Get", "List", "Tokenize", "Detokenize", "Render", "Encode", "Embed", "Score", "Rerank")
    assert reads == {method.name for method in methods if method.name.startswith(beginnings)}


def test_files_have_packages_for_other_languages() -> None:
    for module in PUBLIC:
        options = module.DESCRIPTOR.GetOptions()
        assert options.go_package
        assert options.java_package
        assert options.java_multiple_files


def test_scalars_with_another_default_than_zero_track_presence() -> None:
    """A client that leaves out `temperature` must be told apart from one that sends 0."""
    sampling = common_pb2.SamplingOptions.DESCRIPTOR
    without_presence = [
        field.name
        for field in sampling.fields
        if not field.is_repeated and field.type != FieldDescriptor.TYPE_MESSAGE and not field.has_presence
    ]
    assert not without_presence


def test_no_field_is_of_type_any() -> None:
    fields = [
        f"{message.full_name}.{field.name}"
        for module in PUBLIC
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.message_type is not None and field.message_type.full_name == "google.protobuf.Any"
    ]
    assert not fields


def test_buf_lint_format_and_breaking_pass() -> None:
    buf = str(Path(sys.executable).with_name("buf"))
    breaking = ["breaking", "--against", "protos/released.binpb", "--exclude-path", "protos/twinstage/worker"]
    for arguments in (["lint"], ["format", "--diff", "--exit-code"], breaking):
        result = subprocess.run([buf, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
