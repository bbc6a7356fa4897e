"""The kernels for a processor without AVX-512, run on whatever this machine is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fused_models import stock_logits, tiny_config, tokens
from tiny_models import make_tiny_model

pytestmark = pytest.mark.xdist_group("fused")

_RUN = """
import sys
import numpy as np
from fused_models import FusedOnBlocks, tokens
from twinstage.models.fused.load import load_fused
from twinstage.models.fused.target import target
from twinstage.models.resolve import resolve_model
assert (target().lanes, target().integer_dot) == (8, False), target()
model = load_fused(resolve_model(sys.argv[1]), precision=sys.argv[3], threads=1)
fused = FusedOnBlocks(model)
whole = fused.logits(tokens(40))
assert (fused.logits(tokens(40), cuts=(1, 30)) == whole).all()
np.save(sys.argv[2], whole)
"""


def test_avx2_kernels_equal_stock(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "llama", tiny_config("llama"), weight_scale=1.5)
    expected = stock_logits(directory, tokens(40))[-1]
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell", "PYTHONPATH": str(Path(__file__).parent)}
    for precision, tolerance in (("fp32", 1e-4), ("int8", 0.05 * float(np.abs(expected).max()))):
        result = tmp_path / f"{precision}.npy"
        command = [sys.executable, "-c", _RUN, str(directory), str(result), precision]
        subprocess.run(command, env=environment, check=True, timeout=400)
        np.testing.assert_allclose(np.load(result), expected, rtol=0, atol=tolerance)
