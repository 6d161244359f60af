"""Memory of `gapless run` over very many lines: `python -m gapless.bench.many_lines --lines 1000000`.

Makes a tiny random model and a file of prompts, has the command complete it, one token a line, and watches the memory
of the process that does. The results are counted and their order is checked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from gapless.models.registry import hf_config
from gapless.models.shapes import weight_shapes
from gapless.report import readable_bytes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
LOOK_EVERY_S = 0.02


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Memory of gapless run over many lines.")
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="of the results")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_model(folder / "model")
        prompts, out = folder / "in.jsonl", folder / f"out.{args.format}"
        with prompts.open("w") as file:
            file.writelines(json.dumps({"prompt": [1 + i % 96, 1 + i // 96 % 96, 7]}) + "\n" for i in range(args.lines))
        began = time.monotonic()
        command = [sys.executable, "-m", "gapless", "run", str(prompts), "-o", str(out), "--max-tokens", "1"]
        options = ["--model", str(folder / "model"), "--device", "cpu", "--dtype", "float32", "--num-blocks", "4096"]
        with subprocess.Popen(command + options) as process:
            seen = _watch(process, Path(f"{out}.part"))
        seconds = time.monotonic() - began
        if process.returncode:
            return process.returncode
        if not seen:
            print("the run was over before its memory could be seen; try more lines")
            return 1
        for share in (0.01, 0.1, 0.25, 0.5, 0.75, 1.0):
            at, memory = seen[min(int(share * len(seen)), len(seen) - 1)]
            print(f"after {at:5.1f} s: {readable_bytes(memory)}")
        if args.format == "jsonl":
            with out.open() as results:
                assert [json.loads(line)["index"] for line in results] == list(range(args.lines))
        print(
            f"{args.lines} lines in {seconds:.0f} s, {args.lines / seconds:.0f} lines/s; "
            f"memory at most {readable_bytes(max(memory for _, memory in seen))}"
        )
    return 0


def _write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = weight_shapes(hf_config(CONFIG))
    save_file({name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}, folder / "model.safetensors")


def _watch(process: subprocess.Popen[bytes], part: Path) -> list[tuple[float, int]]:
    """Seconds and resident bytes, from the first result to the end."""
    seen: list[tuple[float, int]] = []
    began = time.monotonic()
    while process.poll() is None:
        if (seen or part.exists()) and (resident := _resident(process.pid)):
            seen.append((time.monotonic() - began, resident))
        time.sleep(LOOK_EVERY_S)
    return seen


def _resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0)


if __name__ == "__main__":
    sys.exit(main())
