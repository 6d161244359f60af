"""The group of ranks by torch.distributed: gloo between CPUs, NCCL between GPUs.

Owns one process group, which is no global of the process, so that several engines may follow each other. Every call
has a time limit. With NCCL a call only queues work on the current stream, so that a graph can capture it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

from torch import Tensor

LOCAL = "127.0.0.1"
dist: Any = import_module("torch.distributed")  # the types of its process groups are not told
c10d: Any = import_module("torch._C._distributed_c10d")


class CollectiveFailed(RuntimeError):
    """The ranks did not come together: one of them is gone, or late."""


class TorchGroup:
    """One rank's end."""

    def __init__(
        self, backend: str, store: Any, rank: int, size: int, timeout_s: float, own_address: str = LOCAL
    ) -> None:
        """backend: gloo or nccl. own_address: by which other ranks reach this one. Waits for all ranks."""
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._met(lambda: self._open(backend, store, own_address))

    def _open(self, backend: str, store: Any, own_address: str) -> None:
        limit = timedelta(seconds=self._timeout_s)
        self._group = _BACKENDS[backend](store, self.rank, self.size, limit, own_address)

    def add(self, tensor: Tensor) -> Tensor:
        self._met(lambda: self._group.allreduce([tensor], self._options("Allreduce")))
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        found = tensor.new_empty((self.size, *tensor.shape))
        self._met(lambda: self._group._allgather_base(found.flatten(0, 1), tensor, self._options("Allgather")))
        return found

    def share(self, tensor: Tensor) -> None:
        self._met(lambda: self._group.broadcast([tensor], self._options("Broadcast")))

    def _options(self, kind: str) -> Any:
        """On the current stream, not on one of the library's own. A broadcast is from rank 0."""
        options = getattr(c10d, f"{kind}Options")()
        options.asyncOp = False
        return options

    def _met(self, meet: Callable[[], Any]) -> None:
        try:
            work = meet()
            if work is not None:  # queued, and nothing to wait for
                work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise CollectiveFailed(
                f"a rank is gone, or did not come within {self._timeout_s:g} s ({reason})"
            ) from error


def host_store(timeout_s: float, host: str = LOCAL) -> Any:
    """Where ranks find each other; rank 0 holds it, at this address of its own and a port that is free."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        port, fd = listening.getsockname()[1], listening.detach()
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=fd)


def find_store(host: str, port: int, timeout_s: float) -> Any:
    """The same, for the other ranks."""
    return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, own_address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, own_address: str) -> Any:
    """NCCL finds its interfaces by itself."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


_BACKENDS = {"gloo": _gloo, "nccl": _nccl}
