"""The generated code is what the protos say, and the protos say what every client may rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor

from twinstage.v1 import (
    admin_pb2,
    common_pb2,
    embedding_pb2,
    generation_pb2,
    model_pb2,
    tokenizer_pb2,
)

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = (admin_pb2, common_pb2, embedding_pb2, generation_pb2, model_pb2, tokenizer_pb2)


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "protos" / "generate.py"), str(tmp_path)], check=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*"))
    checked_in = sorted(
        path.relative_to(ROOT) for path in (ROOT / "twinstage").rglob("*_pb2*") if path.suffix != ".pyc"
    )
    assert generated == checked_in
    stale = [str(path) for path in generated if (tmp_path / path).read_bytes() != (ROOT / path).read_bytes()]
    assert not stale, f"run `make protos`: {stale}"


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


def test_buf_lint_and_format_pass() -> None:
    buf = str(Path(sys.executable).with_name("buf"))
    for arguments in (["lint"], ["format", "--diff", "--exit-code"]):
        result = subprocess.run([buf, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
