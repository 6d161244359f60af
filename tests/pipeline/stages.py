"""Where mistakes are made: the exact toy, the toy behind captured graphs, native steps of a tiny model, and a tiny
model whose layers have windows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from fault import GRAPHS, NATIVE, TOY, WINDOWED

from gapless.core.params import MAX_LOGPROBS
from gapless.core.row_fields import SEAT_WORDS
from gapless.device.base import Device
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.proof.stage import Cast, ModelStage, Room, fresh_device
from gapless.proof.tiny import tiny_stage
from gapless.runner.kits.base import BlockMemory
from gapless.runner.logprobs import score
from gapless.runner.native_model import why_not
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
        return Cast(runner, BlockMemory([runner.buffers[1].tensor.view(-1, block_size)]), limits)

    def device(self, order: int | None, *, threads: bool, check: bool) -> Device:
        return fresh_device("cpu", order, threads=threads, check=check)


class GraphStage(ToyStage):
    """The toy with steps filled up to captured shapes. A replay runs what was recorded again, with torch's kernels."""

    def cast(self, block_size: int) -> Cast:
        """A new one each time: a mistake may leave the padding row in disorder."""
        from gapless.runner import graphs, halves, ladder

        cast, no_gpu = super().cast(block_size), lambda: None
        inner = cast.runner
        sizes = {"FEW_TOKENS": (5, 12), "MIXED_ROWS": (3,)}
        cuda = {"graph_pool_handle": no_gpu, "Stream": no_gpu, "synchronize": no_gpu, "mem_get_info": lambda: (0, 0)}
        recording = {
            "record": lambda body, pool, stream: Played(body),
            "compiled_ahead": lambda *_: nullcontext(SimpleNamespace(names=[])),
        }
        patched = patching(graphs, **recording), patching(halves, **KERNELS), patching(ladder, **sizes)
        with patched[0], patched[1], patched[2], patching(torch.cuda, **cuda):
            runner = graphs.GraphRunner(inner, inner._step, cast.limits, CpuDevice(driver=InlineDriver()))
        return Cast(runner, cast.kv, cast.limits)


class Played:
    """Stands for a graph."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def instantiate(self) -> None:
        pass

    @torch.inference_mode()
    def replay(self) -> None:
        from gapless.runner import halves

        with patching(halves, **KERNELS):
            self._body()


def patching(owner: Any, **values: Any) -> ExitStack:
    """Several attributes at once, while it lasts."""
    patches = ExitStack()
    for name, value in values.items():
        patches.enter_context(patch.object(owner, name, value))
    return patches


def begin(packed, last_token, length, blocks, block_size: int, inputs) -> None:
    """What the kernel of this name does; a wrong index raises, where the kernel would write anywhere."""
    rows, *new = packed[: (1 + len(blocks)) * inputs.batch].long().view(-1, inputs.batch)
    positions = length[rows]
    place, offset = positions // block_size, positions % block_size
    for table, found, slots in zip(blocks, new, inputs.slots, strict=True):
        table[rows, place] = torch.where(found >= 0, found, table[rows, place])
        slots[:] = table[rows, place] * block_size + offset
    inputs.ids[:], inputs.rows[:] = last_token[rows], rows
    inputs.positions[:], inputs.lengths[:] = positions, positions + 1


def end(tokens, inputs, last_token, length, counts, out) -> None:
    out[: len(tokens)] = tokens
    if counts is not None:
        count(counts, inputs.rows, tokens)
    last_token[inputs.rows], length[inputs.rows] = tokens, inputs.lengths
    last_token[-1] = length[-1] = 0


def begin_mixed(packed, last_token, length, blocks, seats, block_size: int, max_new_blocks: int, inputs) -> None:
    """What the kernels of this name do."""
    plan = read_mixed(packed)
    row, index, *new = plan.new_blocks.unbind(1)
    for table, found in zip(blocks, new, strict=True):
        table[row, index] = found
    seats[plan.seat_rows] = plan.seats.int()
    padding, rows = len(last_token) - 1, [*plan.decode_rows.tolist()]
    ids, positions = last_token[rows].tolist(), length[rows].tolist()
    samples = [(0, padding, 0)] * inputs.num_rows
    samples[: len(rows)] = [(i, row, place + 1) for i, (row, place) in enumerate(zip(rows, positions, strict=True))]
    for row, offset, start, end, sample in plan.chunks.T.tolist():
        rows += [row] * (end - start)
        positions += range(start, end)
        ids += plan.tokens[offset - len(plan.decode_rows) :][: end - start].tolist()
        if sample >= 0:
            samples[sample] = (offset + end - start - 1, row, end)
    rest = inputs.num_tokens - len(rows)
    inputs.ids[:] = torch.tensor([*ids, *[0] * rest])
    inputs.positions[:] = torch.tensor([*positions, *[0] * rest])
    owners = torch.tensor([*rows, *[padding] * rest])
    at, offset = inputs.positions // block_size, inputs.positions % block_size
    for table, slots in zip(blocks, inputs.slots, strict=True):
        slots[:] = table[owners, at] * block_size + offset
    count = len(plan.decode_rows)
    inputs.decode_rows[:], inputs.decode_lengths[:] = padding, 0
    inputs.decode_rows[:count], inputs.decode_lengths[:count] = plan.decode_rows, inputs.positions[:count] + 1
    chunked = (inputs.chunk_rows, inputs.chunk_offsets, inputs.chunk_starts, inputs.chunk_ends)
    for found, filler, known in zip(chunked, (padding, len(ids), 0, 0), plan.chunks, strict=False):
        found[:] = filler
        found[: len(known)] = known.int()
    inputs.sample_tokens[:], inputs.sample_rows[:], inputs.sample_places[:] = torch.tensor(samples).T
    inputs.score_places[:] = -1
    inputs.score_places[: len(plan.places)] = plan.places.int()
    inputs.num_top[0] = max(plan.num_top, 0)


def count(counts, rows, tokens) -> None:
    """Counts the tokens of real rows."""
    for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
        if row < len(counts) - 1 and token >= 0:
            counts[row, token] += 1


def take_in_baggage(packed, counts, biases) -> None:
    """What the kernels of this name do."""
    plan = read_mixed(packed)
    counts[plan.count_rows] = 0
    row, token, number = plan.counts.unbind(1)
    counts[row, token] = number.to(counts.dtype)
    biases[plan.biases[:, 0], plan.biases[:, 1]] = plan.biases[:, 2:].int()


def end_mixed(packed, tokens, inputs, last_token, length, counts, out) -> None:
    out[: len(tokens)] = tokens
    count(counts, inputs.sample_rows, tokens)
    last_token[inputs.sample_rows], length[inputs.sample_rows] = tokens, inputs.sample_places
    for row, _, _, end, sample in read_mixed(packed).chunks.T.tolist():
        if sample < 0:
            length[row] = end
    last_token[-1] = length[-1] = 0


def score_samples(logits, tokens, places, num_top, out, basis=None) -> None:
    """What the kernel of this name does."""
    most = min(MAX_LOGPROBS, logits.shape[1])
    found = score(logits, tokens.clamp(min=0), most)
    column = torch.arange(2 + 2 * most, device=logits.device)
    is_id, is_logprob = (column >= 2) & (column < 2 + most), column >= 2 + most
    wanted = ~is_id & ~is_logprob | is_id & (column < 2 + num_top) | is_logprob & (column < 2 + most + num_top)
    at = places.long()[:, None] * (2 + 2 * num_top) + torch.where(is_logprob, column - most + num_top, column)
    keep = wanted[None, :] & (places >= 0)[:, None]
    out[at[keep]] = found[keep]


KERNELS = {
    "begin": begin,
    "end": end,
    "begin_mixed": begin_mixed,
    "end_mixed": end_mixed,
    "take_in_baggage": take_in_baggage,
    "score_samples": score_samples,
}


@dataclass(frozen=True)
class MixedPlan:
    """A plan as `pack_mixed` packed it."""

    num_top: int
    decode_rows: torch.Tensor
    chunks: torch.Tensor  # [CHUNK_WORDS, num_chunks]
    tokens: torch.Tensor
    new_blocks: torch.Tensor
    seat_rows: torch.Tensor
    seats: torch.Tensor
    count_rows: torch.Tensor
    counts: torch.Tensor  # [n, 3]
    biases: torch.Tensor  # [n, 4]
    places: torch.Tensor


HEADER = 12  # of a packed plan


def read_mixed(packed: torch.Tensor) -> MixedPlan:
    decodes, chunks, tokens, blocks, seats, samples, num_top, counted, counts, biases, words = packed[:11].tolist()
    places = samples if num_top >= 0 else 0
    owned = (words * blocks, seats, seats * SEAT_WORDS, counted, 3 * counts, 4 * biases)
    sizes = (decodes, 5 * chunks, tokens - decodes, *owned, places)
    parts = [part.long() for part in packed[HEADER : HEADER + sum(sizes)].split(list(sizes))]
    views = (
        parts[0],
        parts[1].view(5, -1),
        parts[2],
        parts[3].view(-1, words or 3),
        parts[4],
        parts[5].view(-1, SEAT_WORDS),
    )
    return MixedPlan(num_top, *views, parts[6], parts[7].view(-1, 3), parts[8].view(-1, 4), parts[9])


def why_no_stage(name: str) -> str | None:
    """Why there is no such stage on this machine; None where there is."""
    if name == GRAPHS and find_spec("triton") is None:
        return "Triton is not installed"
    return why_not(torch.float32) if name == NATIVE else None


@cache
def stage(name: str) -> ToyStage | ModelStage:
    if name == NATIVE:
        return tiny_stage("llama", 1, native=True)
    if name == WINDOWED:
        return tiny_stage("gemma3_text", 1)
    return ToyStage() if name == TOY else GraphStage()
