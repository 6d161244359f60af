"""Layers in groups by their window, each group with block tables of its own.

A block holds some tokens of one group. All blocks come from one pool, so groups have equally many places for layers: a
layer's keys and values lie in its group's blocks at its place. Layers of one window may form several groups, and the
last of these may leave places empty. Knows sizes, not memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gapless.core.windows import Windows

MAX_GROUPS = 8  # a row's tables grow by a block of each, and a GPU keeps as many tables
TYPICAL_WINDOWS = 4  # length of the row, in windows, whose memory decides


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups, and where each layer belongs."""

    windows: Windows  # of each group
    of_layer: tuple[int, ...]  # its group
    places: tuple[int, ...]  # its place among the layers of its group
    num_places: int  # of each group

    @classmethod
    def single(cls, num_layers: int) -> LayerGroups:
        """All layers in one group, which keeps everything."""
        return cls((None,), (0,) * num_layers, tuple(range(num_layers)), num_layers)

    @classmethod
    def of(cls, windows: Sequence[int | None], max_model_len: int) -> LayerGroups:
        """Groups for layers with these windows. A window as long as any request is none."""
        seen = [None if window is None or window >= max_model_len else window for window in windows]
        members = {w: [layer for layer, window in enumerate(seen) if window == w] for w in dict.fromkeys(seen)}
        typical = min(max_model_len, TYPICAL_WINDOWS * max([w for w in members if w is not None], default=0))
        choices = [size for size in range(len(seen), 0, -1) if _num_groups(members, size) <= MAX_GROUPS]
        if members.keys() == {None} or len(members) > MAX_GROUPS:
            return cls.single(len(seen))
        size = min(choices, key=lambda size: _cost(members, size, typical))
        groups = [(w, layers[i : i + size]) for w, layers in members.items() for i in range(0, len(layers), size)]
        found = {layer: (group, i) for group, (_, layers) in enumerate(groups) for i, layer in enumerate(layers)}
        of_layer, places = zip(*(found[layer] for layer in range(len(seen))), strict=True)
        return cls(tuple(window for window, _ in groups), of_layer, places, size)


Members = dict[int | None, list[int]]  # layers by window


def _num_groups(members: Members, size: int) -> int:
    return sum(-(-len(layers) // size) for layers in members.values())


def _cost(members: Members, size: int, length: int) -> int:
    """Places, filled or not, that a row of this length takes, in tokens of one layer."""
    return sum(-(-len(layers) // size) * size * min(length, window or length) for window, layers in members.items())
