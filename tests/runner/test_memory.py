"""A machine that is too small says so: CapacityError, in a process with little address space too."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gapless import LLM
from gapless.errors import CapacityError, GaplessError, InvalidRequest
from gapless.runner.memory import shortage_named
from tiny import CPU, write_dummy

IN_LITTLE_SPACE = """
import resource, sys
from pathlib import Path
from gapless import LLM
from gapless.errors import CapacityError

LLM(sys.argv[1], load_format="dummy", device="cpu", max_model_len=16, num_blocks=4).close()  # what is loaded late
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
for extra in [2**20, 2**24, 2**26, 2**27]:
    resource.setrlimit(resource.RLIMIT_AS, (held + extra, resource.RLIM_INFINITY))
    try:
        LLM(sys.argv[1], load_format="dummy", device="cpu", kv_memory="512MiB")
    except CapacityError as error:
        print("refused", error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_little_address_space(tmp_path: Path) -> None:
    write_dummy(tmp_path, vocab_size=200_000, hidden_size=256, max_position_embeddings=4096)
    found = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_SPACE, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout.count("refused")) == (0, 4), found.stderr + found.stdout


@pytest.mark.parametrize("native", [True, False])
def test_weights_larger_than_any_memory(tmp_path: Path, native: bool) -> None:
    write_dummy(tmp_path, vocab_size=2**28, hidden_size=2**24)
    with pytest.raises(CapacityError, match="not enough memory for the model"):
        LLM(tmp_path, load_format="dummy", native=native, **CPU)


def test_no_thread_outlives_a_load_that_fails(tmp_path: Path) -> None:
    write_dummy(tmp_path)
    before = threading.active_count()
    with pytest.raises(GaplessError):
        LLM(tmp_path, **CPU)  # without weights
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_the_ways_to_say_it(error: Exception) -> None:
    with pytest.raises(CapacityError, match="not enough memory for the test"), shortage_named("the test"):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), InvalidRequest("out of memory"), KeyError("memory")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, shortage_named("the test"):
        raise error
    assert caught.value is error
