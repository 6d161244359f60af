"""One small Ray cluster for all tests of this folder, and a run that is completed on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray_tasks import NODE, Task

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2] / "src"))  # for processes of nodes


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Of one node without GPUs."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def task(tmp_path: Path, tiny_dir: Path) -> Task:
    return Task(tmp_path, tiny_dir, 60, 80)
