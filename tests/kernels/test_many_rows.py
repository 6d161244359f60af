"""The kernels of a captured mixed step are compiled for any number of rows that an engine may have."""

from __future__ import annotations

from pathlib import Path

from test_ahead import PROGRAM, told_by

MOST_ROWS = 2**16  # of the option max_num_rows

COMPILE = """
from gapless.core.row_fields import SEAT_WORDS
from gapless.kernels.mixed import MixedInputs, begin_mixed
driver.set_active(Driver())
count, device = {rows} + 1, torch.device("cpu")
packed, inputs = torch.zeros(8, dtype=torch.int32), MixedInputs(8, 8, 2, device)
last_token, length, blocks = (torch.zeros(*size, dtype=torch.int64) for size in ((count,), (count,), (2, count, 2)))
begin_mixed(packed, last_token, length, blocks, torch.zeros(count, SEAT_WORDS, dtype=torch.int32), 16, 8, inputs)
json.dump({{"launched": Driver.launched}}, sys.stdout)
"""


def test_as_many_rows_as_an_engine_may_have(tmp_path: Path) -> None:
    program = PROGRAM.rstrip("; ") + COMPILE.format(rows=MOST_ROWS)
    assert told_by(program, tmp_path)["launched"] == ["_take_in", "_begin"]
