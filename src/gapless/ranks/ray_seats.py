"""Seats for ranks, given by Ray: a placement group with a bundle for each rank, and an actor in each bundle.

Rank 0 stays in this process, which is on a node of the cluster, so its bundle is on that node. An actor says where it
is and which GPU it got. On rank 0's node that is all it does: ranks there are children of rank 0. Elsewhere it starts
the process of its rank, which calls rank 0. Ray ends the actors and frees the group when this process ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gapless.child import spawn
from gapless.distributed.cluster import LONGEST_REASON, NodeVersions, answers, connect, here, import_ray
from gapless.errors import ConfigError
from gapless.ranks.desk import LINK, PLANS, DeskAddress, call
from gapless.ranks.local import COMMAND
from gapless.ranks.mate import RankLife, how_it_ended
from gapless.ranks.remote import Seat

PLACE_S = 60.0  # for Ray to find room, which others may still be giving back
ANSWER_S = 60.0  # for the actors to start
NODE_ID = "ray.io/node-id"  # a label that every node has


@dataclass(frozen=True, slots=True)
class SeatWishes:
    """What is asked of a cluster."""

    address: str
    num_ranks: int
    placement: str  # a strategy of Ray, in small letters
    wants_gpus: bool | None  # None: if this node has any
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SeatFacts:
    """What an actor says of itself."""

    node_id: str
    node: str  # its address
    gpus: tuple[str, ...]
    versions: NodeVersions


class SeatActor:
    """The actor."""

    def where(self) -> SeatFacts:
        ray = import_ray()
        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return SeatFacts(context.get_node_id(), ray.util.get_node_ip_address(), gpus, here())

    def follow(self, address: DeskAddress, rank: int, timeout_s: float) -> int:
        """The process of a rank, from start to end; its exit status."""
        ends = [call(address, rank, part, timeout_s) for part in (LINK, PLANS)]
        process = spawn(COMMAND, [end.fileno() for end in ends])
        for end in ends:
            end.close()
        return process.wait()


class ActorLife:
    """A process that an actor started; it dies with the actor."""

    def __init__(self, actor: Any, ending: Any) -> None:
        self._actor, self._ending = actor, ending

    def kill(self) -> None:
        if answers():
            import_ray().kill(self._actor)

    def wait(self, timeout_s: float) -> str | None:
        ray = import_ray()
        try:
            return how_it_ended(ray.get(self._ending, timeout=timeout_s))
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayTaskError as error:
            return f"could not start ({_short(error.cause)})"
        except ray.exceptions.RayError:
            return "is gone with its actor or its node"


class RaySeat:
    """Room for one rank on a node that is not rank 0's."""

    def __init__(self, rank: int, node: str, actor: Any, timeout_s: float) -> None:
        self.rank, self.node = rank, node
        self._actor, self._timeout_s = actor, timeout_s

    def sit(self, address: DeskAddress) -> RankLife:
        return ActorLife(self._actor, self._actor.follow.remote(address, self.rank, self._timeout_s))


class Reservation:
    """The seats of a group, until they are released."""

    def __init__(self, wishes: SeatWishes) -> None:
        """Raises ConfigError."""
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_cluster(wishes.address))
            self._reserve(wishes, stack)
            self._stack = stack.pop_all()

    def _reserve(self, wishes: SeatWishes, stack: contextlib.ExitStack) -> None:
        ray = import_ray()
        own_id, self.host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        bundle = _bundle(wishes, own_id, [node for node in ray.nodes() if node["Alive"]])
        self.has_gpus = "GPU" in bundle
        group = stack.enter_context(_placed(wishes, bundle, own_id))
        actors = [_actor(group, place, bundle) for place in range(wishes.num_ranks)]
        facts = _ask(actors)
        own = [rank for rank, fact in enumerate(facts) if fact.node_id == own_id]
        assert own[:1] == [0], "the first bundle is on this node"
        self.ranks_here = own[1:]  # rank 0 is this process
        self.gpus_here = [name for rank in own for name in facts[rank].gpus]
        self._actors = actors  # an actor ends when nobody knows it
        self.seats: list[Seat] = [
            RaySeat(rank, fact.node, actors[rank], wishes.timeout_s)
            for rank, fact in enumerate(facts)
            if fact.node_id != own_id
        ]

    def release(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[None]:
    """The cluster; the one that this process is connected to already, if it is."""
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    with _same_signals():
        connect(address, "ranks_on_ray")
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _same_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _bundle(wishes: SeatWishes, own_id: str, nodes: list[dict[str, Any]]) -> dict[str, float]:
    """What Ray reserves for each rank. Raises ConfigError where the cluster never has enough."""
    (own,) = [node["Resources"] for node in nodes if node["NodeID"] == own_id]
    wants_gpus = "GPU" in own if wishes.wants_gpus is None else wishes.wants_gpus
    kind = "GPU" if wants_gpus else "CPU"
    _check_room(wishes, kind, int(own.get(kind, 0)), [int(node["Resources"].get(kind, 0)) for node in nodes])
    has_cpus = all(node["Resources"].get("CPU", 0) >= 1 for node in nodes)
    return {"CPU": 1.0} if not wants_gpus else {"GPU": 1.0, "CPU": 1.0} if has_cpus else {"GPU": 1.0}


def _check_room(wishes: SeatWishes, kind: str, own: int, counts: list[int]) -> None:
    needs = f"too few {kind}s: {wishes.num_ranks} ranks need 1 each"
    if wishes.placement == "strict_pack" and own < wishes.num_ranks:
        raise ConfigError(f"{needs} on the node of rank 0, which has {own}; or use rank_placement pack or spread")
    if sum(counts) < wishes.num_ranks:
        has = f"the cluster has {sum(counts)} on {len(counts)} nodes"
        raise ConfigError(f"{needs}, and {has}; use a smaller tensor_parallel")
    if own < 1:
        raise ConfigError(f"{needs}, and this node, where rank 0 runs, has none; run this command on one that has")


@contextlib.contextmanager
def _placed(wishes: SeatWishes, bundle: dict[str, float], own_id: str) -> Iterator[Any]:
    """A placement group whose first bundle is on this node. Raises ConfigError if there is no room for it now."""
    from ray.util.placement_group import placement_group, remove_placement_group

    selectors = [{NODE_ID: own_id}, *({} for _ in range(wishes.num_ranks - 1))]
    bundles = [bundle] * wishes.num_ranks
    group = placement_group(bundles, wishes.placement.upper(), bundle_label_selector=selectors)
    try:
        if not group.wait(PLACE_S):
            raise ConfigError(
                f"ranks_on_ray: Ray found no room for {wishes.num_ranks} ranks within {PLACE_S:g} s, because others "
                "use the cluster; see `ray status`"
            )
        yield group
    finally:
        if answers():
            remove_placement_group(group)  # with its actors


def _actor(group: Any, place: int, bundle: dict[str, float]) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    remote: Any = ray.remote(SeatActor)
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
    amounts = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
    return remote.options(scheduling_strategy=where, **amounts).remote()


def _ask(actors: list[Any]) -> list[SeatFacts]:
    """Raises ConfigError where a node cannot have a rank."""
    ray = import_ray()
    try:
        found: list[SeatFacts] = ray.get([actor.where.remote() for actor in actors], timeout=ANSWER_S)
    except ray.exceptions.RayError as error:
        if "No module named 'gapless" in str(error):
            raise ConfigError("a node of the cluster has no Gapless; install the same version on all nodes") from None
        raise ConfigError(f"ranks_on_ray: an actor for a rank did not start: {_short(error)}") from None
    for fact in found:
        if difference := here().difference(fact.versions):
            raise ConfigError(f"node {fact.node} has {difference}; install the same versions on all nodes")
    return found


def _short(error: object) -> str:
    return " ".join(str(error).split())[:LONGEST_REASON]
