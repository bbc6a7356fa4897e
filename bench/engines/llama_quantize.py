"""Makes the Q8_0 file that llama.cpp is measured with: `python -m bench.engines.llama_quantize SOURCE TARGET`.

The demo model comes as Q4_1. Its weights are made Q8_0 (norms stay float32), so that no engine computes with less than
eight bits; every other engine gets the values of the same source.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp


def quantize(source: Path, target: Path) -> None:
    """Raises RuntimeError when llama.cpp refuses. `target` appears when it is whole."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    parameters.allow_requantize = True
    temporary = target.with_suffix(".new")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(temporary).encode(), parameters)
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")
    temporary.replace(target)


if __name__ == "__main__":
    quantize(Path(sys.argv[1]), Path(sys.argv[2]))
