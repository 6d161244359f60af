"""Calls of Python's logits processors, between the two halves of a step.

They run where the second half begins, on the compute stream. A processor that raises spoils its own rows, whose
requests then end; the step goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gapless.core.processor import LogitsProcessor, RowFacts
from gapless.core.request import LongArray


@dataclass(eq=False, slots=True)
class Call:
    """One processor and its rows in one step. What came of it is known when the step is collected."""

    processor: LogitsProcessor
    samples: LongArray  # [n] which of the step's samples
    rows: tuple[RowFacts, ...]
    error: Exception | None = None
    seconds: float = 0.0  # on the thread that called it


def processed(logits: torch.Tensor, calls: Sequence[Call]) -> torch.Tensor | None:
    """A float32 copy of these logits, changed; None where there is nothing to call."""
    if not calls:
        return None
    copy = logits.float() if logits.dtype != torch.float32 else logits.clone()
    process(copy, calls)
    return copy


@torch.inference_mode()
def process(logits: torch.Tensor, calls: Sequence[Call]) -> None:
    """Change logits [num_samples, vocab_size] float32 in place, one call after the other.

    Rows of a call that raised are spoiled at the end only: the calls after it may share some of them, and must not
    fail because of what they find there.
    """
    for call in calls:
        began = time.perf_counter()
        index = _on_device(call.samples, logits.device)
        try:
            logits[index] = _checked(call.processor(logits[index], call.rows), logits, len(index))
        except Exception as error:
            call.error = error
        call.seconds = time.perf_counter() - began
    for call in calls:
        if call.error is not None:
            logits[_on_device(call.samples, logits.device)] = torch.nan  # nothing is sampled from such a row


def _checked(found: object, logits: torch.Tensor, count: int) -> torch.Tensor:
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"it returned {type(found).__name__} instead of a tensor")
    if found.shape != (count, logits.shape[1]) or found.dtype != logits.dtype or found.device != logits.device:
        wanted = f"{[count, logits.shape[1]]} {logits.dtype} on {logits.device}"
        given = f"{list(found.shape)} {found.dtype} on {found.device}"
        raise ValueError(f"it returned a tensor {given} instead of {wanted}")
    return found


def _on_device(numbers: LongArray, device: torch.device) -> torch.Tensor:
    """Without a wait for the device, which is busy with the first half."""
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
