"""One server for all tests that leave it as they found it, and a slow one whose engine may be taken down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from servers import MAX_LEN, Server, running

from tiny import write_tiny


@pytest.fixture(scope="session")
def long_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with room for long answers."""
    return write_tiny(tmp_path_factory.mktemp("long"), max_position_embeddings=MAX_LEN)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, long_dir: Path) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.jsonl"
    flags = ("--num-blocks", "512", "--max-queue", "64", "--max-body", "64KiB", "--max-n", "4", "--max-choices", "8")
    with running(log, long_dir, *flags, "--served-model-name", "tiny", "--served-model-name", "alias") as server:
        yield server


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory, long_dir: Path) -> Iterator[Server]:
    """Its steps take at least 5 ms; see faulty_engine.py for what else is wrong with it."""
    log = tmp_path_factory.mktemp("faulty") / "log.jsonl"
    flags = ("--num-blocks", "2048", "--step-timeout", "2", "--health-timeout", "0.5", "--body-timeout", "1")
    flags += ("--header-timeout", "1")
    with running(log, long_dir, *flags, "--served-model-name", "tiny", script="faulty_server.py") as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()
