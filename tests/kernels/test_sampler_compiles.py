"""The sampler's kernels compile for a GPU at a real vocabulary; Triton's interpreter does not look at types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAM = """
import torch
from without_gpu import Driver, driver

driver.set_active(Driver())
from gapless.core.limits import Limits
from gapless.core.row_fields import ALL_NEEDS
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.runner.draw import pick, score, score_samples
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import RowStore

store = RowStore(CpuDevice(driver=InlineDriver()), Limits(2, 1, 1, 1, 1), 151_936)
logits, numbers = torch.zeros(2, 151_936, dtype=torch.bfloat16), torch.zeros(99, dtype=torch.int32)
drawn = pick(logits, SampledRows(torch.arange(2), torch.arange(2), store.state), ALL_NEEDS)
score_samples(logits, drawn.tokens, numbers[:2], numbers[:1], numbers, drawn.basis)
score(logits, drawn.tokens, 1)
print(*Driver.launched)
"""


def test_every_kernel_of_a_sampler_compiles(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert {"_adjust", "_pick", "pick_by_passes", "_score"} <= set(ran.stdout.split())
