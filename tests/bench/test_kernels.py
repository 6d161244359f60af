"""A decode step taken apart: whole steps only, overlapping kernels, and the time when none runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from gapless.bench.kernels import COPIES, NUM_STEPS, Launch, decode_steps, profile_decode, tabulate


def step(start: float, *, gap: float = 0.0) -> list[Launch]:
    """Ten µs: two products, the second of which begins before the first is over, and maybe a gap before the end."""
    return [
        Launch("_begin", start, start + 1),
        Launch("product", start + 1, start + 6),
        Launch("product", start + 4, start + 9 - gap),
        Launch("_end", start + 9, start + 10),
    ]


def test_prefill_and_the_first_decode_step_are_left_out() -> None:
    prefill = [Launch("prefill", 0, 50), Launch("product", 50, 90)]
    launches = [*prefill, *step(100), *step(130), *step(140), *step(150)]
    chosen, num_steps = decode_steps(launches[::-1])  # in any order
    assert num_steps == 3
    assert [launch.start for launch in chosen] == sorted(launch.start for launch in launches if launch.start >= 130)


def test_later_steps_do_not_count() -> None:
    """By then the first requests may be over."""
    launches = [launch for start in range(0, 10 * NUM_STEPS + 50, 10) for launch in step(start)]
    chosen, num_steps = decode_steps(launches)
    assert num_steps == NUM_STEPS
    assert (chosen[0], chosen[-1].end) == (Launch("_begin", 10, 11), 10 * NUM_STEPS + 10)


@pytest.mark.parametrize(
    ("launches", "seen"),
    [
        ([Launch("prefill", 0, 50)], "0 decode steps begin and 0 end"),
        ([*step(0), *step(10)], "2 decode steps begin and 2 end"),
        ([*step(0), *step(10), *step(20), *step(30)[:-1]], "4 decode steps begin and 3 end"),
    ],
)
def test_a_profile_without_whole_decode_steps_is_refused(launches: list[Launch], seen: str) -> None:
    with pytest.raises(ValueError, match=seen):
        decode_steps(launches)


def test_a_mean_step() -> None:
    table = tabulate([*step(0), *step(10, gap=2)], 2)
    assert table.step_us == 10
    assert table.idle_us == 1  # two µs in one of two steps
    product, *others = table.rows
    assert (product.name, product.calls_per_step, product.us_per_call) == ("product", 2, (5 + 5 + 5 + 3) / 4)
    assert product.us_per_step == 9
    assert {row.name: row.us_per_step for row in others} == {"_begin": 1, "_end": 1}


def test_overlapping_kernels_are_not_idle() -> None:
    launches = [Launch("a", 0, 10), Launch("b", 2, 4), Launch("c", 12, 13)]
    assert tabulate(launches, 1).idle_us == 2
    assert [row.name for row in tabulate(launches, 1).rows] == ["a", "b", "c"]


def test_as_text() -> None:
    lines = str(tabulate([*step(0), *step(10, gap=2)], 2)).splitlines()
    assert lines[0] == "2 steps of 10 µs, 4 kernels each; none ran for 1.0 µs"
    assert lines[2].split() == ["9.0", "90.0%", "2.0", "4.50", "product"]


def test_a_profile_is_of_the_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run beside it, and so do the host's calls, which the profiler lists too."""
    launches = [*step(0), *step(10), *step(20)]
    aside = [Launch(f"{COPIES[1]} (Device -> Pinned)", 12, 13)]
    asked: list[Any] = []

    class Profile:
        def __init__(self, activities: Any) -> None: ...

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[Any]:
            times = [(item, DeviceType.CUDA) for item in (*launches, *aside)]
            times.append((Launch("cudaLaunchKernel", 12, 25), DeviceType.CPU))
            return [
                SimpleNamespace(
                    name=item.name, time_range=SimpleNamespace(start=item.start, end=item.end), device_type=kind
                )
                for item, kind in times
            ]

    monkeypatch.setattr("torch.profiler.profile", Profile)
    llm = SimpleNamespace(generate=lambda prompts, params: asked.append((prompts, params.max_tokens)))
    table = profile_decode(llm, [[1, 2]])
    assert asked == [([[1, 2]], 1 + NUM_STEPS + 1)]  # the prompt's step, one left out, and those that count
    assert (table.num_steps, table.step_us, table.idle_us) == (2, 10, 0)
    assert {row.name for row in table.rows} == {"_begin", "product", "_end"}
