"""Kernels compiled before they are needed, side by side: within `compiled_ahead` a launch compiles and does not run.

A rehearsal of the engine's steps inside it finds exactly the variants that the steps will launch, without a list kept
by hand. At the end of the block every kernel is compiled, loaded, and known to its function.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITFunction, get_cache_invalidating_env_vars, get_cache_key

from gapless.kernels.compilers import Compilers, Recipe

KernelProgress = Callable[[int, int], None]  # kernels that are done, kernels found so far
UNFILLED = (
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
)

LONGEST_NAME = 150  # of a file in Triton's cache
_one_at_a_time = threading.RLock()  # blocks replace Triton's functions, and must put them back in order


class KernelNotCompiled(RuntimeError):
    """A kernel that the compiler or the GPU refuses."""


class Variant:
    """A kernel that is still to be compiled, where its function keeps the compiled one, which takes its place.

    A launch that finds it there compiles it, and waits.
    """

    def __init__(self, function: Any, key: Any, device: int, parts: tuple[Any, ...]) -> None:
        self.function_name: str = function.fn.__name__
        self._function = function
        self._key = key
        self._cache, _, self._target, self._backend, _ = function.device_caches[device]
        self._parts = parts  # signature, constants, attributes, options
        self.compiled_elsewhere = False  # just now, by a different process
        self._cache[key] = self

    def recipe(self) -> Recipe:
        """How to compile it in a different process."""
        signature, constants, attributes, options = self._parts
        target = (self._target.backend, self._target.arch, self._target.warp_size)
        fn = self._function.fn
        return Recipe(fn.__module__, fn.__qualname__, signature, constants, attributes, target, dict(options.__dict__))

    def is_in_cache(self) -> bool:
        """Whether Triton's cache of compiled kernels has it."""
        source = self._source()
        key = get_cache_key(source, self._backend, self._parts[-1], get_cache_invalidating_env_vars())
        folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(folder.get_group(f"{source.name[:LONGEST_NAME]}.json"))

    def _source(self) -> Any:
        signature, constants, attributes, _ = self._parts
        return self._function.ASTSource(self._function, signature, constants, attributes)

    def result(self) -> Any:
        """The compiled kernel, loaded."""
        found = self._cache[self._key]
        if found is not self:
            return found
        source, options = self._source(), self._parts[-1]
        source.compiled_elsewhere = self.compiled_elsewhere  # so that who counts does not take it for an old one
        kernel = self._function.compile(source, target=self._target, options=options.__dict__)
        _ = kernel.run  # loads it, and builds the function that launches it
        self._cache[self._key] = kernel
        return kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.result(), name)


class Ahead:
    """The kernels of one rehearsal."""

    def __init__(self, compilers: Compilers, progress: KernelProgress | None = None) -> None:
        self.seconds = 0.0  # from the beginning of the block to its end
        self.thread = threading.get_ident()
        self._compilers = compilers
        self._pool = ThreadPoolExecutor(compilers.count, "gapless-compile", *_on_this_gpu())
        self._progress = progress
        self._found: dict[Variant, Future[None]] = {}
        self._num_done = 0
        self._lock = threading.Lock()  # of the number above, and of progress

    @property
    def names(self) -> list[str]:
        """Of the kernels found so far, one for each variant."""
        return [variant.function_name for variant in self._found]

    def add(self, variant: Variant) -> None:
        """Have it compiled, unless it is under way."""
        if variant not in self._found:
            self._found[variant] = self._pool.submit(self._compile, variant)

    def _compile(self, variant: Variant) -> None:
        if not variant.is_in_cache():
            variant.compiled_elsewhere = self._compilers.compile(variant.recipe())
        variant.result()  # finds it in the cache of compiled kernels; what could not be compiled there fails here
        with self._lock:
            self._num_done += 1
            if self._progress is not None:
                self._progress(self._num_done, len(self._found))

    def finish(self) -> None:
        """Wait for all of them. Raises KernelNotCompiled with the name of the first that failed."""
        failed = [(v, f.exception()) for v, f in self._found.items() if f.exception() is not None]
        if failed:
            variant, error = failed[0]
            others = f" (and {len(failed) - 1} more of {len(self._found)})" if len(failed) > 1 else ""
            raise KernelNotCompiled(f"kernel {variant.function_name} cannot be compiled{others}: {error}") from error

    def close(self) -> None:
        """Compile no more."""
        self._pool.shutdown(cancel_futures=True)


class _Zeroed(TorchFunctionMode):
    """Memory that kernels would have written holds zeros, so that indices read from it are valid ones.

    Sees calls from Python alone, which suffices: what torch allocates within an operation, it fills itself.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func in UNFILLED else found


@contextmanager
def compiled_ahead(compilers: Compilers, progress: KernelProgress | None = None) -> Iterator[Ahead]:
    """Within the block, a launch by this thread has its kernel compiled in the background instead of running it.

    Other work of torch runs as always, on zeros where a kernel would have written. At the end of the block all kernels
    are compiled and loaded. `progress` is called by several threads, one at a time. A block of a different thread waits
    until this one is over.
    """
    began = time.perf_counter()
    ahead = Ahead(compilers, progress)
    try:
        with _one_at_a_time, _launches_go_to(ahead), _Zeroed():
            yield ahead
        ahead.finish()
    finally:
        ahead.close()
        ahead.seconds = time.perf_counter() - began


@contextmanager
def hashed_meanwhile() -> Iterator[None]:
    """Beside the block, hash all of Triton, which is part of each kernel's key: 0.4 s of the first launch otherwise."""
    thread = threading.Thread(target=triton_key, name="gapless-hash", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def _launches_go_to(ahead: Ahead) -> Iterator[None]:
    """Launches of this thread; other threads launch as always."""
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def rehearse(function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != ahead.thread:
            return run(function, *args, **kwargs)
        found = run(function, *args, **kwargs | {"warmup": True})
        if isinstance(found, Variant):
            ahead.add(found)
        return found

    def put_off(function: Any, key: Any, signature: Any, device: int, constants: Any, *others: Any) -> Any:
        if threading.get_ident() != ahead.thread:
            return do_compile(function, key, signature, device, constants, *others)
        options, attributes, _ = others
        return Variant(function, key, device, (signature, constants, attributes, options))

    JITFunction.run, JITFunction._do_compile = rehearse, put_off
    try:
        yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile


def _on_this_gpu() -> tuple[Callable[[int], None], tuple[int]] | tuple[()]:
    """How a thread comes to work for the GPU that this one works for."""
    return (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else ()
