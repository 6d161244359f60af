"""Attention by libraries, against the reference; the libraries are stand-ins, the KV write is our kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from batches import BLOCK_SIZE, DEVICE, SHAPES, Shape, make_batch

import flash_libraries
from gapless.attention.base import Attention, AttentionBatch, Span
from gapless.attention.flash import LIBRARIES, LibraryAttention
from gapless.attention.reference import ReferenceAttention
from gapless.attention.triton import TritonAttention
from gapless.models.rope import RotaryRotation

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the stand-ins are for the CPU")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_libraries.install(monkeypatch, **flash_libraries.FLASH3, **flash_libraries.FLASHINFER)


@dataclasses.dataclass(frozen=True)
class Scene:
    """One layer's inputs, twice: for what is tested and for the reference."""

    batch: AttentionBatch
    shape: Shape
    heads: torch.Tensor
    rotation: RotaryRotation
    pools: list[torch.Tensor]

    @classmethod
    def of(cls, shape: Shape) -> Scene:
        generator = torch.Generator().manual_seed(shape.head_dim)
        batch, num_slots = make_batch(shape, generator)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        pool = draw(num_slots, 2 * shape.num_kv_heads, shape.head_dim)
        heads = draw(len(batch.slots[0]), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        weight = draw(shape.num_heads + shape.num_kv_heads, shape.head_dim) if shape.norm else None
        rotation = RotaryRotation(draw(len(batch.slots[0]), 2, shape.head_dim), weight, 1e-5)
        return cls(batch, shape, heads, rotation, [pool.clone(), pool.clone()])

    def library(self, decode: str | None, chunks: str | None) -> Attention:
        own = TritonAttention(self.pools[:1], BLOCK_SIZE, [self.shape.spec(scale=0.3)], len(self.batch.tables[0]), 4)
        kernels = {name: LIBRARIES[name].load(0.3, DEVICE) for name in (decode, chunks) if name is not None}
        return LibraryAttention(own, BLOCK_SIZE, decode=kernels.get(decode or ""), chunks=kernels.get(chunks or ""))

    def check(self, attention: Attention, batch: AttentionBatch) -> None:
        """`batch` is what the attention is told; the reference is told the truth."""
        reference = ReferenceAttention(self.pools[1:], BLOCK_SIZE, [self.shape.spec(scale=0.3)])
        expected = reference.begin(self.batch)(0, self.heads, self.rotation)
        found = attention.begin(batch)(0, self.heads, self.rotation)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(self.pools[0], self.pools[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("decode", "chunks"), [("flash3", None), (None, "flash3"), ("flash3", "flash3"), ("flashinfer", None)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(shape: Shape, decode: str | None, chunks: str | None) -> None:
    scene = Scene.of(shape)
    scene.check(scene.library(decode, chunks), scene.batch)


def test_where_chunks_begin_comes_from_the_device() -> None:
    """A captured graph has the host's numbers of the padding it was captured with: one chunk of all, then nothing."""
    scene = Scene.of(Shape(4, 2, 16, (5,), ((0, 7), (6, 9), (3, 1))))
    padding = (Span(1, 0, 17), Span(18, 0, 0), Span(18, 0, 0))
    scene.check(scene.library("flash3", "flash3"), dataclasses.replace(scene.batch, chunks=padding))


def test_empty_chunks_after_the_last_one() -> None:
    """As padding leaves them: a chunk of nothing looks at nothing."""
    scene = Scene.of(Shape(4, 2, 16, (), ((0, 7), (6, 9))))
    batch = scene.batch
    more = {"rows": 0, "offsets": 16, "starts": 0, "ends": 0}
    longer: dict[str, Any] = {
        f"chunk_{name}": torch.cat((getattr(batch, f"chunk_{name}"), torch.tensor([value], dtype=torch.int32)))
        for name, value in more.items()
    }
    padded = dataclasses.replace(batch, **longer, chunks=(*batch.chunks, Span(16, 0, 0)))
    scene.check(scene.library(None, "flash3"), padded)


def test_a_whole_step_is_not_copied() -> None:
    """Where the library did all tokens, its tensor is the output."""
    scene = Scene.of(Shape(4, 2, 16, (7, 9), ()))
    given = torch.zeros(2, 4, 16)
    own = TritonAttention(scene.pools[:1], BLOCK_SIZE, [scene.shape.spec()], 2, 4)
    attention = LibraryAttention(own, BLOCK_SIZE, decode=lambda q, k, v, pieces: given)
    found = attention.begin(scene.batch)(0, scene.heads, scene.rotation)
    assert found.data_ptr() == given.data_ptr()


@pytest.mark.parametrize(
    ("name", "head_dim", "block_size", "dtype", "reason"),
    [
        ("flash3", 128, 16, torch.bfloat16, None),
        ("flash3", 72, 5, torch.float16, None),
        ("flash3", 20, 16, torch.bfloat16, "its head sizes are multiples of 8 up to 256, not 20"),
        ("flash3", 264, 16, torch.bfloat16, "its head sizes are multiples of 8 up to 256, not 264"),
        ("flash3", 128, 16, torch.float32, "it knows float16 and bfloat16, not float32"),
        ("flashinfer", 64, 16, torch.bfloat16, None),
        ("flashinfer", 72, 16, torch.bfloat16, "its head sizes are multiples of 16 up to 256, not 72"),
        ("flashinfer", 64, 8, torch.bfloat16, "its block sizes are 16, 32, 64, 128, not 8"),
    ],
)
def test_what_a_library_cannot_do(
    name: str, head_dim: int, block_size: int, dtype: torch.dtype, reason: str | None
) -> None:
    assert LIBRARIES[name].why_not([Shape(4, 2, head_dim, (), ()).spec()], block_size, dtype) == reason


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_not_called_for_windows(name: str) -> None:
    spec = dataclasses.replace(Shape(4, 2, 64, (), ()).spec(), window=8)
    assert LIBRARIES[name].why_not([spec], 16, torch.bfloat16) == "it is not called for sliding windows"
