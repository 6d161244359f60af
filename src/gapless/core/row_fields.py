"""The fields that the device keeps of each row's owner, declared once.

A seat is one record of these fields. The host keeps a column of all rows for each field, a plan carries the records of
new owners, and the device keeps them as the rows of a matrix in which every field is a view. A new sampling parameter
is a line here and a processor that reads it (runner/processors.py).

A field may have a neutral value. A row with a different value needs the processors that read the field. A plan has the
needs of all its sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gapless.core.params import MAX_STOP_IDS

if TYPE_CHECKING:
    from gapless.core.request import Request

NO_TOKEN = -1
LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowField:
    """One field of a seat."""

    name: str
    dtype: type[np.generic]
    of: Callable[[Request], Any]
    width: int = 1
    neutral: float | None = None  # None: the field alone does not make a processor run


def _stop_ids(request: Request) -> tuple[int, ...]:
    return request.stop_ids + (NO_TOKEN,) * (MAX_STOP_IDS - len(request.stop_ids))


def _min_total(request: Request) -> int:
    """The first place, counted from 1, at which a stop token may come."""
    least = request.params.min_tokens
    return min(request.num_prompt + least + 1, LARGEST) if least else 0


def _if_drawn(name: str, neutral: float) -> Callable[[Request], float]:
    """Greedy rows ignore filters."""
    return lambda request: getattr(request.params, name) if request.params.temperature > 0 else neutral


def _is_adjusted(request: Request) -> bool:
    """Whether any field needs it that changes logits one by one or by all of them."""
    params = request.params
    narrows = params.temperature > 0 and (params.top_n_sigma > 0 or params.typical_p < 1)
    return narrows or params.has_penalties or len(params.logit_bias) > 0 or request.guide is not None


def _has_processed_scores(request: Request) -> bool:
    return request.params.logprobs is not None and request.params.logprobs_mode == "processed_logprobs"


FIELDS = (
    RowField("seed", np.int64, lambda request: request.seed),
    RowField("temperature", np.float32, lambda request: request.params.temperature, neutral=0.0),  # 0 is greedy
    RowField("top_k", np.int32, _if_drawn("top_k", 0), neutral=0),
    RowField("top_p", np.float32, _if_drawn("top_p", 1.0), neutral=1.0),
    RowField("min_p", np.float32, _if_drawn("min_p", 0.0), neutral=0.0),
    RowField("min_total", np.int32, _min_total, neutral=0),
    RowField("repetition_penalty", np.float32, lambda request: request.params.repetition_penalty, neutral=1.0),
    RowField("presence_penalty", np.float32, lambda request: request.params.presence_penalty, neutral=0.0),
    RowField("frequency_penalty", np.float32, lambda request: request.params.frequency_penalty, neutral=0.0),
    RowField("num_biases", np.int32, lambda request: len(request.params.logit_bias), neutral=0),
    RowField("top_n_sigma", np.float32, _if_drawn("top_n_sigma", 0.0), neutral=0.0),
    RowField("typical_p", np.float32, _if_drawn("typical_p", 1.0), neutral=1.0),
    RowField("adjusted", np.int32, _is_adjusted),  # a GPU's sampler reads a copy of the row's logits
    RowField("processed_scores", np.int32, _has_processed_scores, neutral=0),
    RowField("masked", np.int32, lambda request: request.guide is not None, neutral=0),  # the row's mask counts
    RowField("stop_ids", np.int32, _stop_ids, width=MAX_STOP_IDS),  # NO_TOKEN where there are fewer
)

SEAT = np.dtype([(f.name, f.dtype, (f.width,)) if f.width > 1 else (f.name, f.dtype) for f in FIELDS], align=True)
SEAT_WORDS = SEAT.itemsize // 4  # of int32
_BITS = {field.name: 1 << index for index, field in enumerate(FIELDS) if field.neutral is not None}
ALL_NEEDS = sum(_BITS.values())


def need(*names: str) -> int:
    """The bits of these fields."""
    return sum(_BITS[name] for name in names)


COUNTED = need("repetition_penalty", "presence_penalty", "frequency_penalty")  # rows whose tokens are counted
BIASED = need("num_biases")
PROCESSED_SCORES = need("processed_scores")


def write_seat(seats: npt.NDArray[Any], row: int, request: Request) -> int:
    """Fill the record of a row from a request; return the needs of the request. seats: of type SEAT."""
    seats[row] = tuple([field.of(request) for field in FIELDS])
    stored = zip(FIELDS, seats[row].item(), strict=True)  # as rounded to the field's type
    return sum([_BITS[field.name] for field, value in stored if field.neutral is not None and value != field.neutral])
