"""Writes the Python code of the protos, with type stubs, and the protoset of the public ones (for clients that read
descriptors, such as grpcurl and ghz) into the twinstage package, or below another directory.

python protos/generate.py [OUTPUT_DIRECTORY]
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from document import document, read_protoset
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent


def generate(output: Path) -> None:
    """Generate all modules below `output`. Raises SystemExit when protoc refuses a file."""
    sources = sorted(PROTOS.rglob("*.proto"))
    programs = Path(sys.executable).parent  # of this environment, which need not be the one on PATH
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={programs / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={programs / 'protoc-gen-mypy_grpc'}",
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        f"--mypy_out=quiet:{output}",
        f"--mypy_grpc_out=quiet:{output}",
        *(str(source) for source in sources),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for directory in {output / source.relative_to(PROTOS).parent for source in sources}:
        while directory != output:
            (directory / "__init__.py").touch()
            directory = directory.parent
    read_protoset(output / "twinstage" / "v1" / "twinstage.protoset")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
    if len(sys.argv) == 1:
        document(PROTOS.parent / "docs" / "api")
