"""A run that is completed with and without a cluster, and the processes of its replicas."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from gapless.cli import main

NODE = {"num_cpus": 8, "object_store_memory": 80_000_000, "include_dashboard": False}


class Task:
    """A prompt file, and the commands that complete it with and without a cluster."""

    def __init__(self, folder: Path, model: Path, num_lines: int, max_tokens: int) -> None:
        self.prompts, self.wanted, self.out = folder / "in.jsonl", folder / "wanted.jsonl", folder / "out.jsonl"
        self.part = folder / "out.jsonl.part"
        self.said = folder / "said.txt"
        self.num_lines = num_lines
        dice = random.Random(3)
        with self.prompts.open("w") as file:
            for index in range(num_lines):
                tokens = [dice.randrange(1, 97) for _ in range(dice.randrange(1, 30))]
                line = {"id": f"row {index}", "prompt": tokens, "temperature": 0.9 * (index % 2)}
                line |= {"temperature": -1} if index % 20 == 7 else {}  # refused
                file.write(json.dumps(line) + "\n")
        engine = ["--device", "cpu", "--dtype", "float32", "--num-blocks", "64", "--max-num-rows", "4"]
        self.options = ["--model", str(model), *engine, "--max-tokens", str(max_tokens), "--num-threads", "1"]
        assert main(self.command(self.wanted)) == 1, "some prompts are refused"

    def command(self, out: Path, *more: str) -> list[str]:
        return ["run", str(self.prompts), "-o", str(out), *self.options, *more]

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gapless", *self.command(self.out, *more)]
        with self.said.open("ab") as said:  # not a pipe: nobody reads while it runs
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)

    def num_kept(self) -> int:
        return max(0, self.part.read_bytes().count(b"\n") - 1) if self.part.exists() else 0

    def check(self) -> None:
        """The results are those of one process that nobody disturbed, to the byte."""
        assert self.out.read_bytes() == self.wanted.read_bytes()


def replicas(address: str) -> list[psutil.Process]:
    """Processes of replicas. The cluster stands in the command line of their parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "ray::Replica" in " ".join(process.cmdline()):
                parent = process.parent()
                if parent is not None and any(address in word for word in parent.cmdline()):
                    found.append(process)
    return found


def wait_for(true: Callable[[], bool], most_s: float = 60) -> None:
    end = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
