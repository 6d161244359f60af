"""Gapless in pipelines of Ray Data: `ds.map_batches(gapless.ray.Generator, ...)` (docs/ray.md).

Only the public name; the work is in `gapless.distributed`. `import ray` means Ray's own package everywhere, since all
imports here are absolute.
"""

from gapless.distributed.generator import Generator

__all__ = ["Generator"]
