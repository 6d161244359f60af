"""Complete the prompts of a file with Ray Data and print the texts: python examples/ray_data.py [MAX_TOKENS [MODEL]]

Needs pip install 'gapless[ray]'. With a cluster, read and write Parquet on a shared file system instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray

from gapless.ray import Generator

max_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 32
model = sys.argv[2] if len(sys.argv) > 2 else "smollm2"

ray.init(
    "local", include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False
)  # or a cluster's address
ray.data.DataContext.get_current().enable_progress_bars = False
texts = ray.data.read_json(str(Path(__file__).parent / "prompts.jsonl")).map_batches(
    Generator,
    fn_constructor_kwargs={"model": model, "params": {"max_tokens": max_tokens, "temperature": 0}},
    batch_size=8,
    compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=4),
)
for row in texts.take_all():
    print(repr(row["text"] or row["error"]))
ray.shutdown()
