"""Where mistakes are made: the exact toy, the toy behind captured graphs, and native steps of a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from fault import GRAPHS, NATIVE, TOY

from gapless.device.base import Device
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.proof.stage import Cast, ModelStage, Room, fresh_device
from gapless.proof.tiny import tiny_stage
from gapless.runner.native import why_not
from toy import VOCAB, toy_runner


class ToyStage:
    """The exact toy model as a stage for schedules."""

    room = Room(num_rows=8, num_places=192, max_batch_tokens=48, max_model_len=48)
    tokenizer = None
    config = SimpleNamespace(vocab_size=VOCAB)
    exact, has_ties = True, False

    def cast(self, block_size: int) -> Cast:
        limits = self.room.limits(block_size)
        runner = toy_runner(CpuDevice(driver=InlineDriver()), limits)
        return Cast(runner, [runner.buffers[1].tensor.view(-1, block_size)], limits)

    def device(self, order: int | None, *, threads: bool, check: bool) -> Device:
        return fresh_device("cpu", order, threads=threads, check=check)


class GraphStage(ToyStage):
    """The toy with steps filled up to captured shapes. A replay runs what was recorded again, with torch's kernels."""

    def cast(self, block_size: int) -> Cast:
        """A new one each time: a mistake may leave the padding row in disorder."""
        from gapless.runner import graphs

        cast, no_gpu = super().cast(block_size), lambda: None
        inner = cast.runner
        sizes = {"CHUNK_TOKENS": (5, 12), "MIXED_ROWS": (3,), "NUM_CHUNKS": 3}
        cuda = {"graph_pool_handle": no_gpu, "Stream": no_gpu, "synchronize": no_gpu, "mem_get_info": lambda: (0, 0)}
        recording = {"_record": lambda body, pool, stream: Played(body)}
        with patching(graphs, **recording, **sizes), patching(torch.cuda, **cuda):
            runner = graphs.GraphRunner(inner, inner._step, cast.limits, mixed=True)
        return Cast(runner, cast.layers, cast.limits)


class Played:
    """Stands for a graph."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    @torch.inference_mode()
    def replay(self) -> None:
        from gapless.runner import graphs

        with patching(graphs, begin=begin, end=end):
            self._body()


def patching(owner: Any, **values: Any) -> ExitStack:
    """Several attributes at once, while it lasts."""
    patches = ExitStack()
    for name, value in values.items():
        patches.enter_context(patch.object(owner, name, value))
    return patches


def begin(packed, last_token, length, blocks, block_size: int, inputs) -> None:
    """What the kernel of this name does; a wrong index raises, where the kernel would write anywhere."""
    rows, new = packed[: 2 * inputs.batch].long().view(2, -1)
    positions = length[rows]
    place, offset = positions // block_size, positions % block_size
    blocks[rows, place] = torch.where(new >= 0, new, blocks[rows, place])
    inputs.ids[:], inputs.rows[:] = last_token[rows], rows
    inputs.positions[:], inputs.lengths[:] = positions, positions + 1
    inputs.slots[:] = blocks[rows, place] * block_size + offset


def end(tokens, inputs, last_token, length, out) -> None:
    out[: len(tokens)] = tokens
    last_token[inputs.rows], length[inputs.rows] = tokens, inputs.lengths
    last_token[-1] = length[-1] = 0


def why_no_stage(name: str) -> str | None:
    """Why there is no such stage on this machine; None where there is."""
    if name == GRAPHS and find_spec("triton") is None:
        return "Triton is not installed"
    return why_not(torch.float32) if name == NATIVE else None


@cache
def stage(name: str) -> ToyStage | ModelStage:
    if name == NATIVE:
        return tiny_stage("llama", 1, native=True)
    return ToyStage() if name == TOY else GraphStage()
