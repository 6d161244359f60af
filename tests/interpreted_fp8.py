"""Casts to FP8 under Triton's interpreter, made to round as a GPU does. Its own lose the carry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def mend_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    from triton import language as tl
    from triton.runtime import interpreter

    inner = interpreter._convert_float

    def convert(value: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if wanted != tl.float8e4nv or given != tl.float32:
            return inner(value, given, wanted, rounding)
        number = torch.from_numpy(np.ascontiguousarray(value)).view(torch.float32).clamp(-448, 448)
        return number.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
