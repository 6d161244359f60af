"""Kernels compiled before they are needed, side by side: within `compiled_ahead` a launch compiles and does not run.

A rehearsal of the engine's steps inside it finds exactly the variants that the steps will launch, without a list kept
by hand. Threads compile: most of a compilation runs outside the interpreter lock, in Triton's passes, in ptxas and in
the C compiler. At the end of the block every kernel is compiled, loaded, and known to its function.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

KernelProgress = Callable[[int, int], None]  # kernels that are done, kernels found so far
UNFILLED = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")


class KernelNotCompiled(RuntimeError):
    """A kernel that the compiler or the GPU refuses."""


class Ahead:
    """The kernels of one rehearsal. Stands where Triton asks for its asynchronous mode, and has that one's `submit`."""

    def __init__(self, pool: ThreadPoolExecutor, progress: KernelProgress | None = None) -> None:
        self.names: list[str] = []  # of the kernels found so far, one for each variant
        self.seconds = 0.0  # from the beginning of the block to its end
        self._pool = pool
        self._progress = progress
        self._found: dict[str, Future[Any]] = {}  # by Triton's key of the variant
        self._pending: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {}  # what `settle` calls
        self._launched = ""  # the kernel whose launch is being looked at
        self._num_done = 0
        self._lock = threading.Lock()  # of the number above, and of progress

    def launch(self, run: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of a launch: find the variant, and have it compiled."""
        self._launched = kernel.fn.__name__
        return run(kernel, *args, **kwargs | {"warmup": True})

    def submit(
        self,
        key: str,
        compile_fn: Callable[[], Any],
        finalize_fn: Callable[[Any], None],
        cleanup_fn: Callable[[Any], None] | None = None,
    ) -> Any:
        """Called by Triton for a variant that its function does not know yet.

        Newer versions come with a fourth argument. They tell the function of what is returned here as soon as it is
        returned, so the kernel can take its place only later, in `settle`.
        """
        if key not in self._found:
            known_at_once = finalize_fn if cleanup_fn is None else _keep
            self.names.append(self._launched)
            self._found[key] = self._pool.submit(self._compile, compile_fn, known_at_once)
            if cleanup_fn is not None:
                self._pending[key] = (finalize_fn, cleanup_fn)
        return self._found[key]

    def _compile(self, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        kernel = compile_fn()
        _ = kernel.run  # loads it, and builds the function that launches it
        finalize_fn(kernel)
        with self._lock:
            self._num_done += 1
            if self._progress is not None:
                self._progress(self._num_done, len(self._found))
        return kernel

    def finish(self) -> None:
        """Wait for all of them. Raises KernelNotCompiled with the name of the first that failed."""
        futures = self._found.values()
        failed = [(n, f.exception()) for n, f in zip(self.names, futures, strict=True) if f.exception() is not None]
        if failed:
            name, error = failed[0]
            others = f" (and {len(failed) - 1} more of {len(self.names)})" if len(failed) > 1 else ""
            raise KernelNotCompiled(f"kernel {name} cannot be compiled{others}: {error}") from error

    def settle(self) -> None:
        """Once nothing is compiled any more: the functions get their kernels, and forget those that failed."""
        for key, (finalize, cleanup) in self._pending.items():
            future = self._found[key]
            if future.cancelled() or future.exception() is not None:
                cleanup(future)
            else:
                finalize(future.result())


def _keep(kernel: Any) -> None:
    """Nothing yet."""


class _Zeroed(TorchDispatchMode):
    """Memory that kernels would have written holds zeros, so that indices read from it are valid ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func.name().partition(".")[0] in UNFILLED else found


@contextmanager
def compiled_ahead(progress: KernelProgress | None = None, num_workers: int | None = None) -> Iterator[Ahead]:
    """Within the block, a launch by this thread compiles its kernel in the background instead of running it.

    Other work of torch runs as always, on zeros where a kernel would have written. At the end of the block all kernels
    are compiled and loaded. `progress` is called by the threads that compile.
    """
    began = time.perf_counter()
    pool = ThreadPoolExecutor(num_workers or len(os.sched_getaffinity(0)), "gapless-compile", *_on_this_gpu())
    ahead = Ahead(pool, progress)
    try:
        with _launches_go_to(ahead), _Zeroed():
            yield ahead
        ahead.finish()
    finally:
        pool.shutdown(cancel_futures=True)
        ahead.settle()
        ahead.seconds = time.perf_counter() - began


@contextmanager
def _launches_go_to(ahead: Ahead) -> Iterator[None]:
    """Launches of this thread; other threads launch as always."""
    run = JITFunction.run

    def looked_at(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if _async_compile.active_mode.get() is ahead:
            return ahead.launch(run, kernel, args, kwargs)
        return run(kernel, *args, **kwargs)

    before = _async_compile.active_mode.set(ahead)
    JITFunction.run = looked_at
    try:
        yield
    finally:
        JITFunction.run = run
        _async_compile.active_mode.reset(before)


def _on_this_gpu() -> tuple[Callable[[int], None], tuple[int]] | tuple[()]:
    """How a thread comes to work for the GPU that this one works for."""
    return (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else ()
