"""Decode attention that streams its keys, on the GPU it is for, against float32 in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gapless.attention.base import FP8, AttentionBatch
from gapless.models.rope import RotaryRotation
from gapless.models.spec import AttentionSpec, KVUnits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BLOCK_SIZE = 16
EPS = 1e-5


@dataclass(frozen=True)
class Scene:
    """Decode rows over shuffled blocks. Slots that hold no key of an earlier step are poison, as are unseen blocks."""

    lengths: tuple[int, ...]
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    norm: bool = False
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)  # of the spec
    units: KVUnits | None = None  # of a cache of FP8

    @property
    def spec(self) -> AttentionSpec:
        scale = self.head_dim**-0.5
        return AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_dim, **{"scale": scale, "rope": None} | self.options
        )

    def first_seen(self, length: int) -> int:
        return 0 if self.spec.window is None else max(0, length - self.spec.window)

    def make(self) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor, RotaryRotation]:
        """The batch, the pool, the heads of the new tokens, and their rotation."""
        generator = torch.Generator("cuda").manual_seed(len(self.lengths))
        count, longest = len(self.lengths), max(self.lengths)
        max_blocks = -(-longest // BLOCK_SIZE) + 1
        numbers = torch.randperm(count * max_blocks, generator=generator, device="cuda") + 3
        tables = torch.zeros(count + 2, max_blocks, dtype=torch.int64, device="cuda")
        rows = torch.randperm(count + 2, generator=generator, device="cuda")[:count]
        tables[rows] = numbers.view(count, max_blocks)
        lengths = torch.tensor(self.lengths, device="cuda")
        last = lengths - 1
        slots = tables[rows, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda").to(self.dtype)

        pool = draw((len(numbers) + 3) * BLOCK_SIZE, 2 * self.num_kv_heads, self.head_dim)
        pool[: 3 * BLOCK_SIZE] = float("nan")
        for row, length in zip(rows.tolist(), self.lengths, strict=True):
            unused = tables[row].repeat_interleave(BLOCK_SIZE) * BLOCK_SIZE
            unused += torch.arange(BLOCK_SIZE, device="cuda").repeat(max_blocks)
            pool[unused[length - 1 :]] = float("nan")
            unseen = self.first_seen(length) // BLOCK_SIZE
            pool[unused[: unseen * BLOCK_SIZE]] = float("nan")
            tables[row, :unseen] = 2**40  # nowhere
        if self.units is not None:
            pool = pool.to(FP8)
        batch = AttentionBatch(
            (slots,), (tables,), rows, lengths, longest, 0, *(slots[:0].int() for _ in range(4)), chunks=()
        )
        heads = draw(count, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        weight = 1 + draw(self.num_heads + self.num_kv_heads, self.head_dim) / 4 if self.norm else None
        angle = torch.rand(count, self.head_dim // 2, generator=generator, device="cuda").repeat(1, 2) * 6.28
        sign = torch.ones(self.head_dim, device="cuda")
        sign[: self.head_dim // 2] = -1
        cos_sin = torch.stack((angle.cos(), angle.sin() * sign), dim=1).to(self.dtype)
        sinks = draw(self.num_heads) * 2 if self.spec.sinks else None
        return batch, pool, heads, RotaryRotation(cos_sin, weight, EPS, sinks)

    def expected(
        self, batch: AttentionBatch, pool: torch.Tensor, heads: torch.Tensor, rotation: RotaryRotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention gives in float32, and the keys and values of the new tokens as the pool has them."""
        kv, group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        weight = rotation.norm_weight
        exact = RotaryRotation(rotation.cos_sin.float(), None if weight is None else weight.float(), EPS)
        turned = exact.apply(heads[:, : self.num_heads + kv].float())
        if self.units is None:  # else keys are rounded once, to FP8
            turned = turned.to(self.dtype).float()
        new = torch.cat((turned[:, self.num_heads :], heads[:, self.num_heads + kv :].float()), dim=1)
        units = torch.ones(2 * kv, 1, device="cuda")
        if self.units is not None:
            units = torch.tensor([self.units.k, self.units.v], device="cuda").repeat_interleave(kv)[:, None]
            new = (new / units).clamp(-448, 448).to(FP8).float()
        found, stored = [], pool.view(torch.uint8) if self.units is not None else pool
        for i, length in enumerate(self.lengths):
            places = torch.arange(self.first_seen(length), length - 1, device="cuda")
            slots = batch.tables[0][batch.decode_rows[i], places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
            both = torch.cat((stored[slots].view(pool.dtype).float(), new[i : i + 1])) * units
            k, v = (x.repeat_interleave(group, dim=1) for x in both.split(kv, dim=1))
            scores = torch.einsum("hd,nhd->hn", turned[i, : self.num_heads], k) * self.spec.scale
            if (cap := self.spec.soft_cap) is not None:
                scores = (scores / cap).tanh() * cap
            if rotation.sinks is not None:
                scores = torch.cat((scores, rotation.sinks.float()[:, None]), dim=1)
            weights = scores.softmax(dim=1)[:, : len(k)]
            found.append(torch.einsum("hn,nhd->hd", weights, v))
        return torch.stack(found).flatten(1), new


SCENES = [
    Scene((1,)),
    Scene((15, 16, 17)),
    Scene((1000,), norm=True),
    Scene((640,) * 32, norm=True),
    Scene((640,) * 32, num_heads=32),
    Scene(tuple(range(100, 4000, 125))),
    Scene((5000, 1, 1, 1, 33, 1, 1, 700), num_heads=64),
    Scene((1,) * 40 + (300,) * 30),
    Scene((64, 65, 79, 80, 81) * 40, num_heads=8),
    Scene((100_000, 5), num_heads=32),
    Scene((333, 20, 4), num_heads=9, num_kv_heads=3, head_dim=64),
    Scene((333, 20, 4), num_heads=14, num_kv_heads=2, head_dim=64, norm=True),
    Scene((2000, 40) * 5, num_heads=5, num_kv_heads=5, head_dim=64, dtype=torch.float16),
    Scene((17,) * 300, num_heads=4, num_kv_heads=1),
    Scene(tuple(range(80, 1150, 5)), norm=True),
    Scene((1000, 4097, 4096, 5, 9000), num_heads=32, options={"window": 4096}),
    Scene((640, 17, 1, 128, 129) * 8, norm=True, options={"window": 128}),
    Scene((300, 17), options={"window": 1}),
    Scene((1000, 50), options={"soft_cap": 5.0, "scale": 1.0}),
    Scene((700, 1, 90), num_heads=64, head_dim=64, options={"sinks": True}),
    Scene((2000, 1, 90) * 9, num_heads=64, head_dim=64, options={"sinks": True, "window": 100, "soft_cap": 4.0}),
    Scene((1000, 17, 1), num_heads=4, num_kv_heads=1, head_dim=256, norm=True),
    Scene((640, 513, 512, 30) * 8, num_heads=8, num_kv_heads=4, head_dim=256, norm=True, options={"window": 512}),
    Scene((5000, 40), num_heads=16, num_kv_heads=8, head_dim=256, options={"soft_cap": 50.0}),
    Scene((700, 33, 1) * 20, num_heads=8, num_kv_heads=4, head_dim=256, units=KVUnits(0.5, 0.25)),
    Scene((1,), units=KVUnits()),
    Scene((15, 16, 17, 1000), norm=True, units=KVUnits(0.1, 3.0)),
    Scene((640,) * 32, num_heads=32, units=KVUnits(0.5, 0.25)),
    Scene((5000, 1, 1, 1, 33, 1, 1, 700), num_heads=64, units=KVUnits(0.1, 3.0)),
    Scene((100_000, 5), num_heads=32, units=KVUnits()),
    Scene((333, 20, 4), num_heads=9, num_kv_heads=3, head_dim=64, units=KVUnits(2.0, 0.1)),
    Scene((640, 17, 1, 128, 129) * 8, norm=True, options={"window": 128, "sinks": True}, units=KVUnits(0.3, 0.7)),
]


@pytest.mark.parametrize(
    "scene",
    SCENES,
    ids=lambda scene: f"{scene.lengths[:3]}x{len(scene.lengths)}{scene.options or ''}{scene.units or ''}",
)
def test_equals_float32(scene: Scene) -> None:
    from gapless.attention.triton import TritonAttention

    batch, pool, heads, rotation = scene.make()
    expected, new = scene.expected(batch, pool, heads, rotation)
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    units = None if scene.units is None else [scene.units]
    attention = TritonAttention([pool], BLOCK_SIZE, [scene.spec], len(batch.tables[0]), cores, units=units)
    if attention.stream_sizes(1) is None:
        pytest.skip("needs Hopper")
    attend = attention.begin(batch)
    found = attend(0, heads, rotation)
    error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 5e-3, error
    assert (found.float() - expected).abs().max() < 0.03
    stored = pool.float()[batch.slots[0]]
    if scene.units is None:
        torch.testing.assert_close(stored, new, rtol=1e-2, atol=1e-2)
    else:  # a number may be rounded to the other side
        torch.testing.assert_close(stored, new, rtol=0.13, atol=2**-8)
        assert (stored != new).float().mean() < 0.02
    for _ in range(3):  # each finds the counters as the one before left them
        assert torch.equal(attend(0, heads, rotation), found)


@pytest.mark.parametrize("num_decodes", [0, 1, 30, 214])
def test_rows_beside_chunks(num_decodes: int) -> None:
    """As a captured step has them: a chunk behind the decode rows, and places for more rows than there are."""
    from gapless.attention.triton import TritonAttention

    scene = Scene(tuple(range(80, 1150, 5)), norm=True)
    batch, pool, heads, rotation = scene.make()
    num_tokens, places = 40, len(scene.lengths) + 20
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    attention = TritonAttention([pool], BLOCK_SIZE, [scene.spec], len(batch.tables[0]) + 20, cores)
    if attention.stream_sizes(1) is None:
        pytest.skip("needs Hopper")
    alone = attention.begin(batch)(0, heads, rotation)
    free = next(row for row in range(len(batch.tables[0])) if row not in set(batch.decode_rows.tolist()))
    batch.tables[0][free, :3] = torch.arange(3, device="cuda")
    pool[: 3 * BLOCK_SIZE] = 0  # a block that somebody owns holds numbers
    tokens = torch.arange(num_tokens, device="cuda")

    def beside(count: int) -> torch.Tensor:
        """What the chunk gets beside the first rows, which must get what they get alone."""
        rows, lengths = (
            torch.full((places,), free, device="cuda"),
            torch.zeros_like(batch.decode_rows[:1]).repeat(places),
        )
        rows[:count], lengths[:count] = batch.decode_rows[:count], batch.decode_lengths[:count]
        chunk = (torch.tensor([x], dtype=torch.int32, device="cuda") for x in (free, count, 0, num_tokens))
        slots = torch.cat((batch.slots[0][:count], tokens))
        mixed = AttentionBatch((slots,), batch.tables, rows, lengths, max(scene.lengths), num_tokens, *chunk, chunks=())
        both = torch.cat((heads[:count], heads[:num_tokens]))
        cos_sin = torch.cat((rotation.cos_sin[:count], rotation.cos_sin[:num_tokens]))
        found = attention.begin(mixed)(0, both, RotaryRotation(cos_sin, rotation.norm_weight, EPS))
        torch.testing.assert_close(found[:count], alone[:count], rtol=2e-2, atol=5e-3)
        return found[count:]

    assert torch.isfinite(beside(0)).all()
    assert torch.equal(beside(num_decodes), beside(0))
