"""`gapless compile`: fills Triton's cache with the kernels that an engine of these options needs on this GPU.

Builds the engine as always, with random weights, and closes it. No weight files are read, so a config.json is enough.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from gapless.config import GPU, EngineOptions, set_kernel_cache
from gapless.errors import ConfigError
from gapless.models.source import resolve as resolve_source
from gapless.pipeline.engine import Engine, resolve
from gapless.progress import progress_bar
from gapless.report import readable_bytes


def compile_kernels(cache: str | None, options: EngineOptions) -> int:
    """Print how many kernels were compiled, how long that took, and where they are."""
    options = dataclasses.replace(options, load_format="dummy")
    source = resolve_source(options.model, with_weights=False)
    if resolve(options, source).device_name != GPU:
        raise ConfigError("compile needs the NVIDIA GPU that will run the kernels; torch finds none here")
    folder = cache_folder(cache)
    began = time.perf_counter()
    with progress_bar("compiling") as bar:
        engine = Engine(options, source, bar.to)
    took = time.perf_counter() - began
    kernels = engine.monitor.kernels()
    engine.close()
    print(f"{kernels.get('compiled', 0)} kernels compiled, {kernels.get('found in the cache', 0)} were in the cache")
    print(f"engine built in {took:.1f} s; {engine.monitor.capture_cost()}")
    print(f"cache: {folder}, {readable_bytes(size_of(folder))}")
    return 0


def cache_folder(cache: str | None) -> Path:
    """Triton's cache: the one that is asked for, from now on, or the one it has. Raises ConfigError."""
    if cache is not None:
        try:
            Path(cache).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cache {cache}: cannot be made: {error.strerror}") from None
        if not os.access(cache, os.W_OK | os.X_OK):
            raise ConfigError(f"cache {cache}: cannot be written")
        set_kernel_cache(str(Path(cache).absolute()))
    from triton import knobs

    return Path(knobs.cache.dir)


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
