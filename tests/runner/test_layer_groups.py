"""Layers in groups: each layer has a place of its own, and little is left empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runner.layer_groups import MAX_GROUPS, LayerGroups


def local(count: int, every: int, window: int) -> list[int | None]:
    """As Gemma 3 has them: every so many layers one sees everything."""
    return [None if i % every == every - 1 else window for i in range(count)]


@given(st.lists(st.sampled_from([None, 8, 16, 500]), min_size=1, max_size=70), st.integers(4, 600))
def test_no_two_layers_share_a_place(windows: list[int | None], max_model_len: int) -> None:
    groups = LayerGroups.of(windows, max_model_len)
    assert len(set(zip(groups.of_layer, groups.places, strict=True))) == len(windows)
    assert max(groups.places) < groups.num_places
    assert 1 <= len(groups.windows) <= MAX_GROUPS
    for layer, window in enumerate(windows):
        kept = groups.windows[groups.of_layer[layer]]
        assert kept == (None if window is None or window >= max_model_len else window)


@pytest.mark.parametrize(
    ("windows", "num_groups", "num_places"),
    [
        (local(18, 6, 512), 6, 3),  # Gemma 3 270M
        (local(26, 6, 512), 7, 4),  # 1B: 22 and 4, so that 2 places of 28 stay empty
        (local(48, 6, 1024), 6, 8),  # 12B
        (local(26, 2, 4096), 2, 13),  # Gemma 2
        (local(24, 2, 128), 2, 12),  # GPT-OSS 20B
        (local(32, 4, 4096), 4, 8),  # Command R7B, OLMo 3
        ([4096] * 32, 1, 32),  # Mistral 7B
        ([None] * 32, 1, 32),
    ],
)
def test_families_of_today(windows: list[int | None], num_groups: int, num_places: int) -> None:
    groups = LayerGroups.of(windows, 32768)
    assert (len(groups.windows), groups.num_places) == (num_groups, num_places)


def test_a_window_as_long_as_any_request_is_none() -> None:
    assert LayerGroups.of(local(24, 2, 128), 128) == LayerGroups.single(24)


def test_too_many_windows_are_kept_whole() -> None:
    assert LayerGroups.of(list(range(1, 12)), 100).windows == (None,)
