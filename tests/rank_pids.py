"""The processes of ranks of this machine, for tests that end them."""

from __future__ import annotations

from gapless.ranks.local import ChildLife
from gapless.ranks.team import Team


def child_pids(team: Team) -> list[int]:
    return [mate.life.process.pid for mate in team._mates if isinstance(mate.life, ChildLife)]
