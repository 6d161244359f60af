"""Engines on torch: Gapless, transformers and vLLM. How each is loaded, and how it runs a round.

The loaders import the engines by name: none of them needs to be installed or to have types.
"""

from __future__ import annotations

import math
import os
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from gapless.bench.job import LONG_DTYPES, SHORT_DTYPES, ContestTask, LoadedEngine, Output, Overlap, Simple


class Gapless:
    """Our engine. Reports how host and device overlapped."""

    def __init__(self, task: ContestTask) -> None:
        from gapless import LLM, SamplingParams

        self._prompts = task.job.prompts
        self._llm = LLM(
            task.job.model,
            dtype=LONG_DTYPES.get(task.weights, task.weights),
            depth=int(task.contender.mode) if task.contender.mode.isdigit() else task.contender.mode,
            num_threads=task.job.threads,
            max_num_rows=task.batch,
            max_model_len=task.job.length,
            prefix_cache=False,
            trace=bool(task.trace),
        )
        self._task = task
        self._params = SamplingParams(max_tokens=task.job.max_tokens, temperature=0, ignore_eos=True)

    @property
    def weights(self) -> str:
        weights = self._llm.engine.resolved.weights
        return SHORT_DTYPES.get(weights, weights)

    def run(self) -> Output:
        monitor = self._llm.engine.monitor
        before, host_s, idle = monitor.stats(), loop_cpu_s(), monitor.idle_by_cause()
        done = self._llm.generate(list(self._prompts), self._params)
        spent, host_s = monitor.stats() - before, loop_cpu_s() - host_s
        if self._task.trace:
            label = f"{self._task.contender.label}, batch {self._task.batch}"
            monitor.timeline(label, before).trimmed().save(Path(self._task.trace))
        overlap = Overlap(
            depth=monitor.depth,
            num_steps=spent.num_steps,
            num_wasted=spent.num_overrun,
            device_share=spent.busy_s / spent.time_s,
            host_share=host_s / spent.time_s if not math.isnan(host_s) else None,
            idle_s={cause: s - idle[cause] for cause, s in monitor.idle_by_cause().items() if s > idle[cause]},
        )
        return Output.of([list(item.token_ids) for item in done], overlap)


def loop_cpu_s() -> float:
    """Processor time of the engine's loop so far; NaN where the system does not tell."""
    found = [thread.ident for thread in threading.enumerate() if thread.name == "gapless-loop"]
    if len(found) != 1 or found[0] is None or not hasattr(time, "pthread_getcpuclockid"):
        return math.nan
    return time.clock_gettime(time.pthread_getcpuclockid(found[0]))


def _load_transformers(task: ContestTask) -> Any:
    import torch

    transformers: Any = import_module("transformers")
    torch.set_num_threads(task.job.threads)
    dtype = getattr(torch, LONG_DTYPES[task.weights])
    folder, _, file = task.path.rpartition("/")
    if file.endswith(".gguf"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(task.path, dtype=dtype)
    model.generation_config = transformers.GenerationConfig()  # the model's own would stop at its end-of-sequence token
    return model.eval()


def load_generate(task: ContestTask) -> LoadedEngine:
    """transformers `generate`: one batch after another."""
    import torch

    transformers: Any = import_module("transformers")
    model = _load_transformers(task)
    num = task.job.max_tokens
    config = transformers.GenerationConfig(max_new_tokens=num, min_new_tokens=num, do_sample=False, pad_token_id=0)

    def run() -> Output:
        tokens = []
        for wave in task.waves():
            found = model.generate(torch.tensor(wave), generation_config=config)
            tokens += found[:, len(wave[0]) :].tolist()
        return Output.of(tokens)

    return Simple(task.weights, run)


def load_generate_batch(task: ContestTask) -> LoadedEngine:
    """transformers `generate_batch`: its continuous batching, with the manager kept over the rounds."""
    transformers: Any = import_module("transformers")
    generation: Any = import_module("transformers.generation")
    model = _load_transformers(task)
    config = transformers.GenerationConfig(
        max_new_tokens=task.job.max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    block_size = 256  # its default
    batching = generation.ContinuousBatchingConfig(
        block_size=block_size,
        num_blocks=task.batch * (task.job.length // block_size + 2),  # by default 90% of the free memory,
        max_batch_tokens=max(512, task.batch),  # and these with it
        max_requests_per_batch=task.batch,
        allow_block_sharing=False,
    )

    def run() -> Output:
        found = model.generate_batch(
            task.job.prompts, generation_config=config, continuous_batching_config=batching, persistent_manager=True
        )
        return Output.of([list(item.generated_tokens) for item in found.values()])

    return Simple(task.weights, run)


def load_vllm(task: ContestTask) -> LoadedEngine:
    """vLLM for CPUs, in this process, so that its memory is counted and it ends with the process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    vllm: Any = import_module("vllm")
    llm = vllm.LLM(
        task.path,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_num_seqs=task.batch,
        max_model_len=task.job.length,
        enable_prefix_caching=False,
        enforce_eager=task.contender.mode == "eager",
    )
    params = vllm.SamplingParams(max_tokens=task.job.max_tokens, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in task.job.prompts]

    def run() -> Output:
        found = llm.generate(prompts, params, use_tqdm=False)
        return Output.of([list(item.outputs[0].token_ids) for item in found])

    return Simple(task.weights, run)
