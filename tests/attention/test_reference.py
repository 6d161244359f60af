"""Paged attention in torch equals dense attention, whatever the block tables, the mix of the batch and the specs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.attention.base import AttentionBatch, Span
from gapless.attention.reference import ReferenceAttention
from gapless.models.spec import AttentionSpec

NUM_LAYERS = 2


class Turn:
    """A rotation that can be told from none: heads are scaled by a number of each token."""

    norm_weight, eps = None, 0.0

    def __init__(self, factors: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        self.cos_sin = factors  # [n, 1, 1]; only `apply` is asked
        self.sinks = sinks

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        return heads * self.cos_sin


def plain_spec(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, rope=None)


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    decode_lengths: tuple[int, ...]  # this step's token included
    chunks: tuple[tuple[int, int], ...]  # start, count
    seed: int = 0
    heads_first: bool = False  # how the pool lies in memory
    window: int | None = None  # of the second layer, as is what follows; the first is plain
    soft_cap: float | None = None
    sinks: bool = False

    def specs(self) -> list[AttentionSpec]:
        plain = plain_spec(self.num_heads, self.num_kv_heads, self.head_dim)
        changes = {"window": self.window, "soft_cap": self.soft_cap, "sinks": self.sinks}
        return [plain, replace(plain, scale=1.5 * plain.scale, **changes)]

    @property
    def ends(self) -> list[int]:
        return [*self.decode_lengths, *(start + count for start, count in self.chunks)]


class World:
    """Rows with a history of heads, scattered over a pool by random block tables."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        self.num_all = case.num_heads + 2 * case.num_kv_heads
        num_rows, max_blocks = len(case.ends), -(-max(case.ends) // case.block_size) + 1
        num_blocks = num_rows * max_blocks + 2
        order = torch.randperm(num_blocks - 1, generator=self.generator)[
            : num_rows * max_blocks
        ]  # the last is nobody's
        self.blocks = order.view(num_rows, max_blocks)
        num_slots, num_heads = num_blocks * case.block_size, 2 * case.num_kv_heads
        self.pool = torch.full((NUM_LAYERS, num_slots, num_heads, case.head_dim), torch.nan)  # where nobody may look
        if case.heads_first:
            self.pool = self.pool.transpose(1, 2).contiguous().transpose(1, 2)
        self.heads = [self.random(NUM_LAYERS, end, self.num_all, case.head_dim) for end in case.ends]
        self.turns = [1 + 0.5 * self.random(end, 1, 1) for end in case.ends]
        self.sinks = self.random(case.num_heads)
        self._write_history()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def slot(self, row: int, position: int) -> int:
        size = self.case.block_size
        return int(self.blocks[row, position // size]) * size + position % size

    def places(self) -> list[tuple[int, int]]:
        """Row and position of the step's tokens, in the order of the batch."""
        decodes = [(row, length - 1) for row, length in enumerate(self.case.decode_lengths)]
        first = len(decodes)
        spans = enumerate(self.case.chunks, first)
        return decodes + [(row, p) for row, (start, count) in spans for p in range(start, start + count)]

    def batch(self) -> AttentionBatch:
        case, places = self.case, self.places()
        num_decodes = len(case.decode_lengths)
        offsets, offset = [], num_decodes
        for _, count in case.chunks:
            offsets.append(offset)
            offset += count
        spans = tuple(Span(at, start, count) for at, (start, count) in zip(offsets, case.chunks, strict=True))

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return AttentionBatch(
            slots=(torch.tensor([self.slot(*place) for place in places]),),
            tables=(self.blocks,),
            decode_rows=torch.arange(num_decodes),
            decode_lengths=torch.tensor(case.decode_lengths, dtype=torch.int64),
            max_decode_length=max(case.decode_lengths, default=0),
            num_chunk_tokens=sum(count for _, count in case.chunks),
            chunk_rows=torch.arange(num_decodes, len(case.ends)).int(),
            chunk_offsets=ints(offsets),
            chunk_starts=ints([start for start, _ in case.chunks]),
            chunk_ends=ints([start + count for start, count in case.chunks]),
            chunks=spans,
        )

    def step_heads(self, layer: int) -> torch.Tensor:
        return torch.stack([self.heads[row][layer, position] for row, position in self.places()])

    def rotation(self, layer: int = 0) -> Turn:
        factors = torch.stack([self.turns[row][position] for row, position in self.places()])
        return Turn(factors, self.sinks if self.case.specs()[layer].sinks else None)

    def dense(self, layer: int) -> torch.Tensor:
        """Each token of the step, by a softmax over its own row alone."""
        q_heads, kv_heads, spec = self.case.num_heads, self.case.num_kv_heads, self.case.specs()[layer]
        out = []
        for row, position in self.places():
            seen = slice(0 if spec.window is None else max(position + 1 - spec.window, 0), position + 1)
            heads, turns = self.heads[row][layer, seen], self.turns[row][seen]
            q = heads[-1, :q_heads] * turns[-1]
            k = (heads[:, q_heads : q_heads + kv_heads] * turns).repeat_interleave(q_heads // kv_heads, 1)
            v = heads[:, q_heads + kv_heads :].repeat_interleave(q_heads // kv_heads, 1)
            scores = torch.einsum("hd,phd->hp", q, k) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            weights = scores.exp() / (scores.exp().sum(-1) + (self.sinks.exp() if spec.sinks else 0))[:, None]
            out.append(torch.einsum("hp,phd->hd", weights, v).flatten())
        return torch.stack(out)

    def _write_history(self) -> None:
        """What earlier steps stored: k and v of every position before the step's."""
        first = {}
        for row, position in self.places():
            first.setdefault(row, position)
        q_heads, kv_heads = self.case.num_heads, self.case.num_kv_heads
        for row, start in first.items():
            for position in range(start):
                k = self.heads[row][:, position, q_heads : q_heads + kv_heads] * self.turns[row][position]
                v = self.heads[row][:, position, q_heads + kv_heads :]
                self.pool[:, self.slot(row, position)] = torch.cat((k, v), dim=1)


def check(case: Case) -> None:
    world = World(case)
    assert ReferenceAttention.why_not(case.specs()) is None
    attention = ReferenceAttention(list(world.pool.unbind(0)), case.block_size, case.specs())
    attend = attention.begin(world.batch())
    for layer in range(NUM_LAYERS):
        found = attend(layer, world.step_heads(layer), world.rotation(layer))
        torch.testing.assert_close(found, world.dense(layer), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 2, 8, 4, (1,), ()),
        Case(4, 2, 8, 4, (5, 12, 1), ()),
        Case(4, 4, 8, 4, (), ((0, 7),)),
        Case(4, 1, 8, 4, (3, 9), ((0, 5), (4, 4), (6, 1))),
        Case(4, 2, 8, 4, (3, 9), ((0, 5), (4, 4), (6, 1)), heads_first=True),
        Case(6, 3, 10, 1, (2, 3), ((0, 1), (3, 2))),
        Case(2, 1, 6, 16, (17, 16, 15), ((16, 16), (15, 2), (0, 33))),
        Case(4, 2, 8, 4, (17, 3), ((0, 9), (5, 7), (0, 3)), window=3),
        Case(4, 2, 8, 4, (17, 3), ((0, 9), (5, 7), (0, 3)), window=1),
        Case(4, 2, 8, 4, (17, 3), ((0, 9), (5, 7), (0, 3)), soft_cap=0.5),
        Case(4, 2, 8, 4, (17, 3), ((0, 9), (5, 7), (0, 3)), sinks=True),
        Case(4, 2, 8, 4, (17, 3), ((0, 9), (5, 7), (0, 3)), heads_first=True, window=4, soft_cap=2.0, sinks=True),
    ],
    ids=str,
)
def test_equals_dense_attention(case: Case) -> None:
    check(case)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    decodes = tuple(draw(st.lists(st.integers(1, 20), max_size=4)))
    chunk = st.tuples(st.integers(0, 12), st.integers(1, 9))
    chunks = tuple(draw(st.lists(chunk, min_size=not decodes, max_size=3)))
    group, size = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4, 16]))
    head_dim, seed = draw(st.sampled_from([2, 6, 8])), draw(st.integers(0, 999))
    case = Case(group * kv_heads, kv_heads, head_dim, size, decodes, chunks, seed, draw(st.booleans()))
    window, soft_cap = draw(st.none() | st.integers(1, 24)), draw(st.sampled_from([None, 0.7, 30.0]))
    return replace(case, window=window, soft_cap=soft_cap, sinks=draw(st.booleans()))


@given(cases())
def test_equals_dense_attention_for_any_batch(case: Case) -> None:
    check(case)


def test_a_step_writes_the_slots_of_its_tokens_and_no_others() -> None:
    case = Case(4, 2, 8, 4, (6, 1), ((3, 4),))
    world = World(case)
    world.pool.nan_to_num_(1e4)  # to be able to compare
    before = world.pool.clone()
    attend = ReferenceAttention(list(world.pool.unbind(0)), 4, world.case.specs()).begin(world.batch())
    attend(1, world.step_heads(1), world.rotation())
    changed = (world.pool != before).flatten(2).any(-1)
    assert not changed[0].any()
    slots = sorted(world.slot(*place) for place in world.places())
    assert torch.nonzero(changed[1]).flatten().tolist() == slots


def test_a_prompt_in_chunks_equals_the_prompt_in_one_piece() -> None:
    whole = World(Case(4, 2, 8, 4, (), ((0, 11),)))
    attention = ReferenceAttention(list(whole.pool.unbind(0)), 4, whole.case.specs())
    expected = attention.begin(whole.batch())(0, whole.step_heads(0), whole.rotation())
    parts = []
    pool = torch.full_like(whole.pool, 1e4)
    for start, count in ((0, 4), (4, 1), (5, 6)):
        part = World(Case(4, 2, 8, 4, (), ((start, count),)))
        part.blocks, part.heads, part.turns = whole.blocks, whole.heads, whole.turns
        attend = ReferenceAttention(list(pool.unbind(0)), 4, part.case.specs()).begin(part.batch())
        parts.append(attend(0, part.step_heads(0), part.rotation()))
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=1e-5)


def test_the_output_has_the_type_of_the_heads() -> None:
    world = World(Case(4, 2, 8, 4, (3,), ()))
    attend = ReferenceAttention(list(world.pool.unbind(0)), 4, world.case.specs()).begin(world.batch())
    rotation = Turn(world.rotation().cos_sin.bfloat16())
    assert attend(0, world.step_heads(0).bfloat16(), rotation).dtype == torch.bfloat16
