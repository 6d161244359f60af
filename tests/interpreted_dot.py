"""Dots under Triton's interpreter whose bits do not depend on where a row lies, as on a GPU.

The interpreter multiplies with numpy's BLAS. On some processors (OpenBLAS on Zen 5, for one) it rounds the first rows
of a matrix differently from the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def mend_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        assert a.data.dtype == b.data.dtype == d.data.dtype == np.float32
        acc = d.data
        for k in range(a.data.shape[1]):  # in this order for every element
            acc = acc + a.data[:, k, None] * b.data[None, k, :]
        return TensorHandle(acc, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
