"""The soft cap of attention scores in Triton: scores never leave the range from -cap to cap.

Kernels hold scores in units for powers of two, so the cap is multiplied by LOG2_E as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """cap * tanh(score / cap) of scaled scores; as they are where the cap is 0."""
    if CAP > 0:
        turns = tl.exp2(scores * (2.0 / CAP))  # infinite for large scores, which makes the quotient 0
        scores = (CAP * LOG2_E) * (1.0 - 2.0 / (turns + 1.0))
    return scores
