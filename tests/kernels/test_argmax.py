"""The largest logit of each row, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gapless.kernels.argmax import argmax

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_argmax_takes_the_first_of_equals() -> None:
    logits = torch.randn(5, 333, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[1, [7, 200, 332]] = 9.0
    logits[2, :] = -3.0
    logits[3, 332] = 9.0
    expected = logits.cpu().argmax(dim=1)
    assert argmax(logits, tile=64).tolist() == expected.tolist()
    assert argmax(logits, tile=64)[1] == 7
