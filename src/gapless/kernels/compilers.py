"""Processes that compile kernels into Triton's cache, so that many can be compiled at once.

A fifth of a compilation is Python, which threads of one process do in turn. The processes know nothing of a GPU: they
get the name of a kernel, the types and constants of its arguments, and the target. One process imports Triton and forks
into the others before it does anything else. A process ends when its caller closes the socket, or dies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

START = "import sys; sys.path[:] = {path!r}; from gapless.kernels.compilers import serve; serve({fds!r})"
LENGTH_BYTES = 8
FEW = 2  # kernels that the caller had better compile itself: the processes take seconds to start
COMPILED, NOT_COMPILED = b"c", b"n"
TRITON_SOURCE = ("triton.compiler", "ASTSource")
GLUON_SOURCE = ("triton.experimental.gluon._runtime", "GluonASTSource")


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that it takes to compile one variant of a kernel. Can be pickled."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: tuple[str, Any, int]
    options: dict[str, Any]

    def compile(self) -> bool:
        """Leave it in the cache; False: it was there already."""
        import triton
        from triton.backends.compiler import GPUTarget

        was_there: list[bool] = []
        triton.knobs.compilation.listener = lambda **told: was_there.append(told["cache_hit"])
        kernel = getattr(import_module(self.module), self.name)
        place, kind = GLUON_SOURCE if kernel.is_gluon() else TRITON_SOURCE
        source = getattr(import_module(place), kind)(kernel, self.signature, self.constants, self.attributes)
        triton.compile(source, target=GPUTarget(*self.target), options=self.options)
        return was_there == [False]


class Compilers:
    """Processes that compile. They start when the first kernel is wanted, or earlier, and in the background."""

    def __init__(self, count: int | None = None, few: int = FEW) -> None:
        """few: kernels that are left to the caller as long as nothing else starts the processes."""
        self.count = count or len(os.sched_getaffinity(0))
        self._few = few
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._all: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of the start and of the few

    def start_if_cold(self) -> None:
        """Start them now if Triton's cache is empty, so that they are there when they are needed."""
        from triton import knobs

        folder = knobs.cache.dir
        if not os.path.isdir(folder) or not os.listdir(folder):
            self.start()

    def start(self) -> None:
        """Start them, unless they have been."""
        with self._lock:
            if self._process is None:
                self._start()

    def _start(self) -> None:
        from triton import knobs

        pairs = [socket.socketpair() for _ in range(self.count)]
        fds = [theirs.fileno() for _, theirs in pairs]
        environment = os.environ | {"TRITON_CACHE_DIR": knobs.cache.dir, "CUDA_VISIBLE_DEVICES": ""}
        code = START.format(path=sys.path, fds=fds)
        nothing = subprocess.DEVNULL  # the caller meets every error itself
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            pass_fds=fds,
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,  # an interrupt is for the caller, who closes the sockets
        )
        self._all = [ours for ours, _ in pairs]
        for ours, theirs in pairs:
            theirs.close()
            self._free.put(ours)

    def compile(self, recipe: Recipe) -> bool:
        """Have it compiled, and wait. False: it was there already, is one of few, or failed: the caller tries it."""
        with self._lock:
            if self._process is None and self._few > 0:
                self._few -= 1
                return False
        try:
            self.start()
        except OSError:  # no processes or sockets to be had
            return False
        ours = self._free.get()
        try:
            task = pickle.dumps(recipe)
            ours.sendall(len(task).to_bytes(LENGTH_BYTES, "big") + task)
            return ours.recv(1) == COMPILED
        except (OSError, pickle.PicklingError, AttributeError, TypeError):  # it died, or the recipe cannot be sent
            return False
        finally:
            self._free.put(ours)

    def close(self) -> None:
        """End the processes."""
        for ours in self._all:
            ours.close()
        if self._process is not None:
            self._process.wait()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(fds: Sequence[int]) -> None:
    """The first process: import, fork, wait for the others."""
    import torch  # noqa: F401
    from triton.runtime.cache import triton_key

    from gapless.kernels.keys import settle_keys

    settle_keys()
    triton_key()  # a hash of all of Triton, which is part of each kernel's key
    for mine in fds:
        if os.fork() == 0:
            for other in fds:
                if other != mine:
                    os.close(other)
            _work(socket.socket(fileno=mine))
            os._exit(0)
    for fd in fds:
        os.close(fd)
    with contextlib.suppress(ChildProcessError, KeyboardInterrupt):
        while True:
            os.wait()


def _work(ours: socket.socket) -> None:
    for recipe in _recipes(ours):
        try:
            compiled = recipe.compile()
        except BaseException:  # a compiler may raise anything; the caller will meet it too
            compiled = False
        ours.sendall(COMPILED if compiled else NOT_COMPILED)


def _recipes(ours: socket.socket) -> Iterator[Recipe]:
    with ours.makefile("rb") as stream, contextlib.suppress(OSError, KeyboardInterrupt):
        while len(head := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
            yield pickle.loads(stream.read(int.from_bytes(head, "big")))
