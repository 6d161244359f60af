"""The deployment on Ray Serve that has the replicas of a server. Serve places them, replaces those that die, and
updates them one after the other. Requests do not go through Serve: each replica calls the API process.

All methods block, and belong on a thread.
"""

from __future__ import annotations

import logging
from typing import Any

from gapless.distributed.cluster import LONGEST_REASON, Placement, answers, own_job
from gapless.distributed.home import HomeAddress
from gapless.distributed.serve_replica import EngineReplica

DEPLOYMENT = "engine"
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 30.0  # how soon a replica that died is replaced
LEAVE_EXTRA_S = 10.0  # for an engine to end after its last request
log = logging.getLogger(__name__)


class ServeApp:
    """One application of Ray Serve."""

    def __init__(self, name: str, placement: Placement, drain_timeout_s: float) -> None:
        self._name = name
        self._placement = placement
        self._leave_timeout_s = drain_timeout_s + LEAVE_EXTRA_S
        self._address: HomeAddress | None = None

    def start(self, address: HomeAddress, num_replicas: int) -> None:
        """Deploy; returns before the replicas are ready."""
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._address = address
        serve.start(proxy_location="Disabled")
        self.restart(num_replicas)

    def restart(self, num_replicas: int) -> None:
        """Replace all replicas, one after the other: Serve updates an application that is deployed again."""
        from ray import serve

        engine = serve.deployment(
            name=DEPLOYMENT,
            num_replicas=num_replicas,
            ray_actor_options={"num_gpus": self._placement.num_gpus, "num_cpus": self._placement.num_cpus},
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=self._leave_timeout_s + LEAVE_EXTRA_S,
        )(EngineReplica)
        target = serve.RunTarget(
            engine.bind(self._address, self._name, own_job(), self._leave_timeout_s),
            name=self._name,
            route_prefix=None,
            external_scaler_enabled=True,
        )
        serve.run_many([target], wait_for_applications_running=False)

    def scale(self, num_replicas: int) -> None:
        """More or fewer replicas; the others go on. This is what Serve's REST API for scalers does."""
        import ray
        from ray.serve._private.common import DeploymentID
        from ray.serve.context import _get_global_client

        deployment = DeploymentID(name=DEPLOYMENT, app_name=self._name)
        client: Any = _get_global_client()
        ray.get(client._controller.update_deployment_replicas.remote(deployment, num_replicas))

    def problem(self) -> str | None:
        """Why Serve gave up, or None."""
        from ray import serve

        app = serve.status().applications.get(self._name)
        if app is None or app.status != "DEPLOY_FAILED":
            return None
        text = " ".join(one.message for one in app.deployments.values()) or app.message
        if "No module named 'gapless" in text:
            return "a node of the cluster has no Gapless; install the same version on all nodes"
        return " ".join(text.split())[:LONGEST_REASON]

    def stop(self) -> None:
        """End the replicas; and Serve, unless it has other applications."""
        from ray import serve

        if not answers():  # a signal to a whole group of processes ends a local Ray before us
            return
        serve.delete(self._name)
        if not serve.status().applications:
            serve.shutdown()
