"""The GPU workloads on transformers' `generate_batch`, its continuous batching, with its own defaults.

Random weights from the same config. The model is freed before the next one is made.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PEER = "transformers generate_batch"


@dataclass(frozen=True, slots=True)
class PeerTask:
    """A job for a peer, and its time limit."""

    warm_up: list[list[int]]
    prompts: list[list[int]]
    max_tokens: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class PeerTime:
    """The time of a peer for a job."""

    seconds: float
    num_tokens: int
    start_s: float
    peak_gib: float
    attention: str  # its name for it


def is_installed() -> bool:
    return find_spec("transformers") is not None


def time_generate_batch(path: Path, tasks: Sequence[PeerTask]) -> Iterator[PeerTime | Exception]:
    """The time of each task, or its error."""
    import torch

    from gapless.device import cuda

    began = time.perf_counter()
    transformers: Any = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config = transformers.GenerationConfig()
    cuda.release_memory()
    start_s = time.perf_counter() - began
    for task in tasks:
        try:
            seconds, num_tokens, attention = _time(model, task)
            yield PeerTime(seconds, num_tokens, start_s, cuda.most_memory() / 2**30, attention)
        except Exception as error:  # any error of a peer is its result
            yield error
    del model
    gc.collect()
    cuda.release_memory()


def _time(model: Any, task: PeerTask) -> tuple[float, int, str]:
    """Seconds, tokens, and the attention it chose; its graphs are captured before."""
    transformers: Any = import_module("transformers")
    generation: Any = import_module("transformers.generation")
    hints: Any = import_module("transformers.generation.continuous_batching.utils").WorkloadHints
    manager_of = model.continuous_batching_context_manager(
        generation_config=transformers.GenerationConfig(
            max_new_tokens=task.max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=generation.ContinuousBatchingConfig(allow_block_sharing=False),
        workload_hints=hints(
            max_prompt_length=max(map(len, task.prompts)),
            max_generated_length=task.max_tokens,
            num_requests=len(task.prompts),
        ),
    )
    with manager_of as manager:
        try:
            _drain(manager, task.warm_up, 16, task.limit_s)
            began = time.perf_counter()
            num_tokens = _drain(manager, task.prompts, task.max_tokens, task.limit_s)
            return time.perf_counter() - began, num_tokens, str(model.config._attn_implementation)
        except BaseException:
            manager.stop(hard_stop=True)  # otherwise it would finish the remaining work, however long that takes
            raise


def _drain(manager: Any, prompts: list[list[int]], max_tokens: int, limit_s: float) -> int:
    """Submit the prompts and wait for all; return the generated tokens."""
    deadline = time.perf_counter() + limit_s
    manager.add_requests(inputs=prompts, max_new_tokens=max_tokens)
    found: list[int] = []
    while len(found) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            found.append(len(result.generated_tokens))
        elif result is None and not manager.is_running():
            raise RuntimeError("the generation thread ended")
        if len(found) < len(prompts) and time.perf_counter() > deadline:
            raise TimeoutError(
                f"stopped after {limit_s:g} s; {len(found)} of {len(prompts)} requests of {max_tokens} tokens were done"
            )
    return sum(found)
