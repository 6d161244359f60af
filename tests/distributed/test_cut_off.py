"""A replica that cannot reach its API process: only it ends, while that process lives."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from local_replicas import until
from ray import serve
from test_serve_on_ray import served

from gapless.config import EngineOptions
from gapless.distributed import cluster, serve_replica
from gapless.distributed.autoscaler import Autoscaler
from gapless.distributed.cluster import Placement, here
from gapless.distributed.pool import EnginePool
from gapless.distributed.serve_app import ServeApp
from gapless.distributed.serve_replica import HOME_S, EngineReplica
from gapless.server.options import ServerOptions
from tiny import CPU

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from servers import eventually, running

APP = "cut-off"


@pytest.mark.parametrize("is_over", [True, False])
def test_the_application_ends_with_its_api_process_alone(monkeypatch: pytest.MonkeyPatch, is_over: bool) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: deleted.append(name))
    monkeypatch.setattr(serve_replica, "is_job_over", lambda job: is_over and job == "7")
    replica = EngineReplica.__new__(EngineReplica)
    ended = threading.Event()
    replica._app, replica._job = APP, "7"
    replica._relay = SimpleNamespace(is_orphan=True, is_over=ended, failure="no answer")  # type: ignore[assignment]
    ended.set()
    with pytest.raises(RuntimeError, match="no answer"):  # Serve replaces it
        replica.check_health()
    assert deleted == [APP] * is_over


def test_the_cluster_says_whether_a_job_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [{"JobID": "01", "IsDead": True}, {"JobID": "02", "IsDead": False}]
    state = SimpleNamespace(state=SimpleNamespace(job_table=lambda: jobs))
    monkeypatch.setattr(cluster, "import_ray", lambda: SimpleNamespace(_private=SimpleNamespace(state=state)))
    monkeypatch.setattr(cluster, "answers", lambda: True)
    assert [cluster.is_job_over(job) for job in ("01", "02", "03")] == [True, False, False]
    monkeypatch.setattr(cluster, "answers", lambda: False)
    assert not cluster.is_job_over("01")


@pytest.mark.slow
def test_replicas_are_cut_off_for_a_while(tiny_dir: Path, address: str) -> None:
    """The API process is this one. Nobody can call it for longer than a replica tries, and then again."""
    ray.init(address=address, log_to_driver=False)
    try:
        asyncio.run(_cut_off(tiny_dir))
    finally:
        serve.shutdown()
        ray.shutdown()


async def _cut_off(model: Path) -> None:
    host = ray.util.get_node_ip_address()
    options = EngineOptions(model=str(model), **CPU, num_blocks=64, num_threads=1)
    app = ServeApp(APP, Placement(1, 0, 1), 5.0)
    pool = EnginePool(options, ServerOptions(), app, Autoscaler(1, 1), host, here())
    task = asyncio.create_task(pool.run())
    await until(lambda: is_served(pool))
    (member,) = pool._members.values()
    assert pool._home._server is not None
    port = pool._home._server.sockets[0].getsockname()[1]
    pool._home.close()
    assert member._latest is not None
    member._latest.close()
    began = time.monotonic()
    while time.monotonic() - began < HOME_S + 8:
        assert APP in (await asyncio.to_thread(serve.status)).applications
        await asyncio.sleep(0.5)
    assert not is_served(pool)
    again = await asyncio.start_server(pool._home._take, host, port)
    await until(lambda: is_served(pool))
    again.close()
    await pool.close()
    await task


def is_served(pool: Any) -> bool:
    return any(one.is_ready for one in pool.members().values())


@pytest.mark.slow
def test_replicas_end_with_an_api_process_that_is_killed(tmp_path: Path, tiny_dir: Path, address: str) -> None:
    flags = ("--num-blocks", "64", "--replicas", "1", "--ray", address)
    with running(tmp_path / "log.jsonl", tiny_dir, *flags) as server:
        eventually(lambda: server.metric("gapless_engine_up") == 1, server)
        assert served(address)
        server.process.kill()
        server.process.wait(10)
        end = time.monotonic() + HOME_S + 30
        while served(address) and time.monotonic() < end:
            time.sleep(0.5)
        assert not served(address)
