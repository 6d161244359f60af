"""Experts by kernels against plain torch, pair by pair, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from gapless.kernels.expert_products import (
    ExpertStack,
    ExpertStream,
    add_experts,
    add_of_one,
    fits_one,
    pack_narrow,
    tilings_for,
)
from gapless.kernels.products import SQUARES_TILES
from gapless.kernels.tilings import MAX_ROWS
from gapless.models.mxfp4_scheme import dequantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32  # the interpreter has no bfloat16 products
TOLERANCE = 1e-2 if torch.cuda.is_available() else 1e-5
EPS = 0.1  # large enough to be seen


def draw(*size: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    values = scale * torch.randn(*size, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, DTYPE)


def stack_of(
    count: int,
    hidden: int,
    inner: int,
    num_chosen: int,
    *,
    bias: bool = False,
    normalized: bool = True,
    num_shared: int = 0,
) -> ExpertStack:
    """With biases, the activation is the clamped one, and weights so large that it clamps."""
    scale = 3.0 if bias else 1.0
    return ExpertStack(
        both=draw(count, 2 * inner, hidden, seed=1, scale=scale * hidden**-0.5),
        down=draw(count, hidden, inner, seed=2, scale=inner**-0.5),
        both_bias=draw(count, 2 * inner, seed=3, scale=scale) if bias else None,
        down_bias=draw(count, hidden, seed=4) if bias else None,
        router_bias=draw(count, seed=5) if bias else None,
        num_chosen=num_chosen,
        is_normalized=normalized,
        is_clamped=bias,
        num_shared=num_shared,
    )


def expected_of(x: torch.Tensor, logits: torch.Tensor, stack: ExpertStack) -> torch.Tensor:
    """Row by row and choice by choice, in float32."""
    routed = stack.count - stack.num_shared
    scores = logits[:, :routed] if stack.router_bias is None else logits + stack.router_bias.float()
    best = scores.topk(stack.num_chosen, dim=-1)
    shares = best.values.softmax(-1) if stack.is_normalized else scores.softmax(-1).gather(1, best.indices)
    if stack.num_shared:
        shares = torch.cat((shares, logits[:, routed, None].sigmoid().expand(-1, stack.num_shared)), 1)
    out = torch.zeros(len(x), stack.down.shape[1], device=x.device)
    for row, experts in enumerate(best.indices.tolist()):
        for place, expert in enumerate([*experts, *range(routed, stack.count)]):
            both = stack.both[expert].float() @ x[row]
            if stack.both_bias is not None:
                both += stack.both_bias[expert].float()
            gate, up = both.chunk(2)
            if stack.is_clamped:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
            else:
                inner = F.silu(gate) * up
            found = stack.down[expert].float() @ inner
            if stack.down_bias is not None:
                found += stack.down_bias[expert].float()
            out[row] += shares[row, place] * found
    return out


def added(
    x: torch.Tensor, logits: torch.Tensor, stack: ExpertStack, *, normed: bool, invariant: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is added to a stream of zeros, or where the norm is fused to the stream itself, and what it should be."""
    squares = torch.full((SQUARES_TILES, MAX_ROWS), math.nan, device=DEVICE)
    half = x.shape[1] // 2
    squares[0, : len(x)], squares[1, : len(x)] = (part.float().square().sum(1) for part in x.split(half, 1))
    stream = ExpertStream(x.clone() if normed else torch.zeros_like(x), squares, 2 if normed else 0, EPS)
    before = stream.values.float().clone()
    read = F.rms_norm(x.float(), x.shape[1:], eps=EPS) if normed else x.float()
    counts = torch.zeros(stack.count, dtype=torch.int32, device=DEVICE)
    left = add_experts(stream.values if normed else x, logits, stack, stream, counts, invariant=invariant)
    assert not counts.any()  # ready for the next layer
    sums = squares[:left, : len(x)].sum(0)
    torch.testing.assert_close(sums, stream.values.float().square().sum(1), rtol=1e-4, atol=1e-4)
    return stream.values.float(), before + expected_of(read, logits, stack), squares


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found - expected).norm() / expected.norm()
    assert error < TOLERANCE, error


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "count", "hidden", "inner", "num_chosen"),
    [(1, 5, 48, 24, 2), (3, 8, 64, 32, 3), (7, 5, 48, 24, 2), (40, 4, 32, 16, 1)],
    ids=["one row", "more experts than tiles", "odd sizes", "many rows"],
)
def test_experts(num_rows: int, count: int, hidden: int, inner: int, num_chosen: int, normed: bool) -> None:
    x, stack = draw(num_rows, hidden), stack_of(count, hidden, inner, num_chosen, normalized=normed)
    found, expected, _ = added(x, draw(num_rows, count, seed=9).float(), stack, normed=normed)
    assert_near(found, expected)


@pytest.mark.parametrize(("num_rows", "num_shared", "num_logits"), [(1, 2, 6), (7, 1, 32), (40, 3, 6)])
def test_a_shared_expert(num_rows: int, num_shared: int, num_logits: int) -> None:
    """It has a logit of its own, behind which may stand others that mean nothing."""
    x, stack = draw(num_rows, 32), stack_of(5 + num_shared, 32, 16, 2, num_shared=num_shared, normalized=False)
    logits = draw(num_rows, num_logits, seed=9).float()
    logits[:, 6:] = 100.0
    found, expected, _ = added(x, logits, stack, normed=True)
    assert_near(found, expected)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_experts_with_biases(num_rows: int) -> None:
    x, stack = draw(num_rows, 64), stack_of(6, 64, 32, 2, bias=True)
    found, expected, _ = added(x, draw(num_rows, 6, seed=9).float(), stack, normed=False)
    assert_near(found, expected)


@pytest.mark.parametrize(
    ("count", "num_chosen", "normalized", "num_shared"), [(5, 3, True, 0), (12, 2, False, 0), (4, 1, False, 2)]
)
def test_one_row_in_kernels_of_its_own(count: int, num_chosen: int, normalized: bool, num_shared: int) -> None:
    x, stack = draw(1, 256), stack_of(count, 256, 256, num_chosen, num_shared=num_shared)
    router = draw(32 if num_shared else count, 256, seed=9)
    stack = replace(stack, is_normalized=normalized, router_bias=draw(count, seed=5) if normalized else None)
    assert fits_one(stack)
    squares = torch.full((SQUARES_TILES, MAX_ROWS), math.nan, device=DEVICE)
    squares[0, 0], squares[1, 0] = (part.float().square().sum() for part in x.split(128, 1))
    read = F.rms_norm(x.float(), (256,), eps=EPS)
    expected = x.float() + expected_of(read, read @ router.float().T, stack)
    counts = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # the first leaves everything ready for the second
        stream = ExpertStream(x.clone(), squares.clone(), 2, EPS)
        left = add_of_one(stream.values, router, stack, stream, counts)
        assert_near(stream.values.float(), expected)
        torch.testing.assert_close(stream.squares[:left, 0].sum(), stream.values.float().square().sum())
        assert not counts.any()


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 96), (7, 160), (60, 96)])
def test_numbers_of_four_bits(num_rows: int, hidden: int) -> None:
    """Sizes that do not fill the tiles for which numbers are packed."""
    whole, narrow = narrow_stacks(5, hidden, 64, 2)
    x, logits = draw(num_rows, hidden), draw(num_rows, 5, seed=9).float()
    stream = ExpertStream(torch.zeros_like(x), torch.zeros(SQUARES_TILES * MAX_ROWS, device=DEVICE), 0, EPS)
    add_experts(x, logits, narrow, stream, torch.zeros(5, dtype=torch.int32, device=DEVICE))
    assert_near(stream.values.float(), expected_of(x.float(), logits, whole))


def narrow_stacks(count: int, hidden: int, inner: int, num_chosen: int) -> tuple[ExpertStack, ExpertStack]:
    """The same experts, whole and in 4 bits."""
    stack = stack_of(count, hidden, inner, num_chosen, bias=True)
    both, down = random_blocks(count, 2 * inner, hidden), random_blocks(count, hidden, inner)
    codes, powers = (torch.stack(part).to(DEVICE) for part in zip(*map(pack_narrow, *both), strict=True))
    down_codes, down_powers = (torch.stack(part).to(DEVICE) for part in zip(*map(pack_narrow, *down), strict=True))
    narrow = replace(stack, both=codes, both_scales=powers, down=down_codes, down_scales=down_powers)
    return replace(stack, both=dequantize(*both).to(DEVICE), down=dequantize(*down).to(DEVICE)), narrow


def random_blocks(count: int, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(size)
    blocks = torch.randint(0, 256, (count, rows, size // 32, 16), generator=dice, dtype=torch.uint8)
    return blocks, torch.randint(120, 124, (count, rows, size // 32), generator=dice, dtype=torch.uint8)


def test_what_the_kernels_for_one_row_do_not_take() -> None:
    stack = stack_of(5, 256, 256, 2)
    assert fits_one(stack)
    assert not fits_one(stack_of(5, 48, 24, 2))
    assert not fits_one(replace(stack, down_bias=draw(5, 256)))
    assert not fits_one(replace(stack, both_scales=draw(5, 512, 2)))
    assert not fits_one(replace(stack, num_chosen=65))  # too much code


def test_all_rows_at_one_expert_and_experts_without_rows() -> None:
    """Two lists, each longer than a tile; four are empty."""
    num_rows, stack = 37, stack_of(6, 32, 16, 2)
    logits = torch.zeros(num_rows, 6, device=DEVICE)
    logits[:, 4], logits[:, 1] = 2.0, 1.0
    found, expected, _ = added(draw(num_rows, 32), logits, stack, normed=True)
    assert_near(found, expected)


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    """Nothing is read outside the weights, and no other row sees it."""
    x, stack = draw(3, 64), stack_of(5, 64, 32, 2)
    logits = draw(3, 5, seed=9).float()
    expected = expected_of(x.float(), logits, stack)
    logits[1, 2:] = math.nan
    found = torch.zeros_like(x)
    squares = torch.zeros(SQUARES_TILES * MAX_ROWS, device=DEVICE)
    counts = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    for rows in (slice(0, 3), slice(1, 2)):
        add_experts(x[rows], logits[rows].contiguous(), stack, ExpertStream(found[rows], squares, 0, EPS), counts)
    assert_near(found[::2].float(), expected[::2])
    assert not counts.any()


def test_invariant_rows_do_not_depend_on_their_batch() -> None:
    x, stack = draw(6, 32), stack_of(5, 32, 16, 2)
    logits = draw(6, 5, seed=9).float()
    whole, expected, _ = added(x, logits, stack, normed=False, invariant=True)
    assert_near(whole, expected)
    for rows in (slice(3, 4), slice(2, 6)):
        alone, _, _ = added(x[rows], logits[rows].contiguous(), stack, normed=False, invariant=True)
        assert torch.equal(alone, whole[rows])


def test_invariant_rows_are_rounded_alike_among_few_and_many() -> None:
    """Halves of 16 bits, because parts that are rounded only among many rows are not seen in float32."""
    stack = stack_of(5, 32, 16, 2)
    stack = replace(stack, both=stack.both.half(), down=stack.down.half())
    x, logits = draw(MAX_ROWS + 20, 32).half(), draw(MAX_ROWS + 20, 5, seed=9).float()
    squares = torch.zeros(SQUARES_TILES * MAX_ROWS, device=DEVICE)
    found = []
    for rows in (slice(0, MAX_ROWS + 20), slice(2, 9)):
        values, counts = torch.zeros_like(x[rows]), torch.zeros(5, dtype=torch.int32, device=DEVICE)
        stream = ExpertStream(values, squares, 0, EPS)
        add_experts(x[rows], logits[rows].contiguous(), stack, stream, counts, invariant=True)
        found.append(values)
    assert torch.equal(found[0][2:9], found[1])


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    stack = replace(stack_of(8, 32, 16, 2), both=torch.empty(8, 32, 32, dtype=torch.bfloat16))
    sizes = [tilings_for(num_rows, stack, invariant=False).gate.block_m for num_rows in (2, 32, 256, 4096)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 16
    assert len({tilings_for(num_rows, stack, invariant=True) for num_rows in (1, 32, 4096)}) == 1
