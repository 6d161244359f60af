"""The time and memory that loading takes on a CPU, beside transformers: `python -m gapless.bench.load_times`.

Each family has a model of about 200 MB of random bfloat16 weights. Both load it in a process of their own, one after
the other, and compute one token, because mapped weights are read when they are first used. Imports are not counted.
Gapless packs weights while the first steps run; the processor time of that is a column of its own. Memory is the most
that the process held above what it had before, pages of mapped files included.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gapless.models.registry import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "max_position_embeddings": 2048,
    "head_dim": 64,
    "n_embd": 768,
    "n_layer": 8,
    "n_head": 12,
    "n_positions": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"intermediate_size": 512}  # of one expert
NUM_RUNS = 3


@contextmanager
def load_own(folder: Path) -> Iterator[None]:
    """The rest of it is packing, which goes on after the first token."""
    from gapless.core.params import SamplingParams
    from gapless.llm import LLM
    from gapless.runner.native_model import wait_until_packed

    with LLM(folder, device="cpu", dtype="bfloat16", max_num_rows=1, max_batch_tokens=16, num_blocks=16) as llm:
        llm.generate([[5]], SamplingParams(max_tokens=1, temperature=0))
        yield
        wait_until_packed()


@contextmanager
def load_by_transformers(folder: Path) -> Iterator[None]:
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    with torch.inference_mode():
        model = kind.from_pretrained(folder, dtype=torch.bfloat16)
        model(torch.tensor([[5]]))
        yield
        del model


LOADERS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "gapless": load_own,
    "transformers": load_by_transformers,
}


@dataclass(frozen=True, slots=True)
class LoadFigures:
    wall_s: float  # to the first token
    cpu_s: float  # likewise, of all threads; it depends less on what else the machine does
    rest_s: float  # processor time from then until everything is packed
    peak_bytes: int


def child(name: str, warm: Path, folder: Path) -> None:
    """Load a small model first, so that imports and libraries are there, then time the large one."""
    with LOADERS[name](warm):
        pass
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted anew
    before, began, cpu = _peak_bytes(), time.perf_counter(), time.process_time()
    with LOADERS[name](folder):
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    rest_s = time.process_time() - cpu - cpu_s
    print(json.dumps(asdict(LoadFigures(wall_s, cpu_s, rest_s, _peak_bytes() - before))))


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def measured(name: str, warm: Path, folder: Path) -> LoadFigures:
    """From a process of its own."""
    command = [sys.executable, "-m", "gapless.bench.load_times", "--child", name, str(warm), str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return LoadFigures(**json.loads(done.stdout.splitlines()[-1]))


def save(folder: Path, model_type: str, architecture: str, **changes: Any) -> int:
    """A random model; its size in bytes."""
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    raw = SIZES | {"model_type": model_type, "architectures": [architecture]} | changes
    kind.from_config(transformers.AutoConfig.for_model(**raw), dtype=torch.bfloat16).save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def row(model_type: str, architecture: str, num_runs: int) -> str:
    """A line of the table."""
    changes = EXPERTS if "moe" in model_type or model_type in ("mixtral", "gpt_oss") else {}
    with tempfile.TemporaryDirectory() as root:
        warm, folder = Path(root, "warm"), Path(root, "model")
        save(warm, model_type, architecture, **changes, num_hidden_layers=2, n_layer=2, vocab_size=320)
        size = save(folder, model_type, architecture, **changes)
        runs = [{name: measured(name, warm, folder) for name in LOADERS} for _ in range(num_runs)]
    own, other = ([run[name] for run in runs] for name in LOADERS)
    ratio = median(theirs.cpu_s / ours.cpu_s for ours, theirs in zip(own, other, strict=True))
    cells = [architecture, f"{size / 1e6:.0f} MB"]
    for figures in (own, other):
        cells += [f"{median(f.wall_s for f in figures):.2f} s", f"{median(f.cpu_s for f in figures):.3f} s"]
    cells += [f"{ratio:.2f}", f"{median(f.rest_s for f in own):.2f} s"]
    cells += [f"{median(f.peak_bytes for f in figures) / size:.2f}" for figures in (own, other)]
    return f"| {' | '.join(cells)} |"


HEAD = (
    *("architecture", "weights", "Gapless", "its CPU time", "transformers", "its CPU time", "ratio of CPU times"),
    *("packing, later", "peak memory / weights", "of transformers"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; all of them unless given")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="how often each loads (default: %(default)s)")
    parser.add_argument("--child", nargs=3, metavar=("WHO", "WARM", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], *map(Path, args.child[1:]))
        return
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for family in FAMILIES:
        if family.model_type in (args.families or [family.model_type]) and family.model_type != "gemma3":
            print(row(family.model_type, family.architecture, args.runs), flush=True)


if __name__ == "__main__":
    main()
