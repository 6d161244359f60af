"""The kernels around a captured decode step, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gapless.core.plan import NO_SAMPLE
from gapless.kernels.argmax import argmax
from gapless.kernels.ends import DecodeInputs, begin, end

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE, NUM_ROWS, SCRATCH = 4, 3, 99


def test_a_step_takes_in_blocks_and_moves_real_rows_on() -> None:
    last_token = torch.tensor([11, 12, 13, 0], device=DEVICE)
    length = torch.tensor([4, 6, 0, 0], device=DEVICE)
    tables = [[[5, 0], [7, 8], [0, 0]], [[15, 0], [17, 18], [0, 0]]]  # of two groups of layers
    blocks = torch.tensor([[*table, [SCRATCH, SCRATCH]] for table in tables], device=DEVICE)
    new = [6, -1, -1, 16, -1, -1]  # row 0 gets block 6 in one, block 16 in the other
    packed = torch.tensor([0, 1, NUM_ROWS, *new], dtype=torch.int32, device=DEVICE)
    inputs = DecodeInputs(3, 2, DEVICE)
    begin(packed, last_token, length, blocks, BLOCK_SIZE, inputs)
    assert inputs.ids.tolist() == [11, 12, 0]
    assert inputs.positions.tolist() == [4, 6, 0]
    assert inputs.slots.tolist() == [[6 * 4, 8 * 4 + 2, SCRATCH * 4], [16 * 4, 18 * 4 + 2, SCRATCH * 4]]
    assert inputs.lengths.tolist() == [5, 7, 1]
    assert blocks[:, 0].tolist() == [[5, 6], [15, 16]]

    out = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(4, 30, dtype=torch.int16, device=DEVICE)
    end(torch.tensor([21, 22, 23], device=DEVICE), inputs, last_token, length, counts, out)
    assert counts.nonzero().tolist() == [[0, 21], [1, 22]]
    assert out.tolist() == [21, 22, 23, 0]
    assert last_token.tolist() == [21, 22, 13, 0]
    assert length.tolist() == [5, 7, 0, 0]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_logits_without_a_largest_have_no_sample_and_leave_a_token_that_can_be_fed(value: float) -> None:
    logits = torch.zeros(2, 333, device=DEVICE)
    logits[0] = value
    tokens = argmax(logits, tile=64)
    assert tokens.tolist() == [NO_SAMPLE, 0]

    last_token, length = torch.tensor([5, 5, 5, 0], device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    inputs = DecodeInputs(2, 1, DEVICE)
    inputs.rows.copy_(torch.arange(2))
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    end(tokens, inputs, last_token, length, None, out)
    assert (out.tolist(), last_token.tolist()) == ([NO_SAMPLE, 0], [0, 0, 5, 0])
