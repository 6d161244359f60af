"""Engines in C++ behind Python: llama.cpp, through two packages, and OpenVINO GenAI.

The loaders import the engines by name: none of them needs to be installed or to have types.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np

from gapless.bench.job import ContestTask, LoadedEngine, Output, Simple

LLAMA_ALIGN = 256  # it rounds each sequence's share of the context up to this


def load_xllamacpp(task: ContestTask) -> LoadedEngine:
    """llama.cpp's server, without HTTP: it batches parallel requests. Returns text, and counts of tokens."""
    xllamacpp: Any = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = task.path
    params.n_parallel = task.batch
    params.n_ctx = task.batch * _aligned(task.job.length)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.job.threads
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)

    def complete(prompt: list[int]) -> int:
        answers: list[dict[str, Any]] = []
        body = {"prompt": prompt, "max_tokens": task.job.max_tokens, "temperature": 0, "ignore_eos": True}
        server.handle_completions({**body, "cache_prompt": False}, answers.append)
        return int(answers[-1]["usage"]["completion_tokens"])

    def run() -> Output:
        with ThreadPoolExecutor(task.batch) as clients:
            return Output(list(clients.map(complete, task.job.prompts)), tokens=None)

    return Simple(task.weights, run)


def load_llama_cpp(task: ContestTask) -> LoadedEngine:
    """llama.cpp through llama-cpp-python's C interface; its high-level class runs one request at a time."""
    return LlamaLoop(task)


class LlamaLoop:
    """A plain batched greedy loop over llama_decode."""

    def __init__(self, task: ContestTask) -> None:
        llama: Any = import_module("llama_cpp")
        self.weights = task.weights
        self._task = task
        self._llama = llama
        num_tokens = task.batch * len(task.job.prompts[0])
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(task.path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = task.batch * _aligned(task.job.length)
        params.n_seq_max = task.batch
        params.n_batch = max(params.n_batch, num_tokens)
        params.n_threads = params.n_threads_batch = task.job.threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {task.path}")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(num_tokens, 0, 1)

    def run(self) -> Output:
        return Output.of([row for wave in self._task.waves() for row in self._generate(wave)])

    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        llama = self._llama
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)
        latest = self._decode(prompts, 0)
        tokens = [[token] for token in latest]
        for position in range(len(prompts[0]), self._task.job.length - 1):
            latest = self._decode([[token] for token in latest], position)
            for row, token in zip(tokens, latest, strict=True):
                row.append(token)
        return tokens

    def _decode(self, pieces: Sequence[Sequence[int]], position: int) -> list[int]:
        """Feed each sequence its next tokens, which begin at `position`; return the likeliest token after each."""
        ends = []
        count = 0
        for sequence, piece in enumerate(pieces):
            for offset, token in enumerate(piece):
                self._put(count, token, position + offset, sequence, offset == len(piece) - 1)
                count += 1
            ends.append(count - 1)
        self._batch.n_tokens = count
        if self._llama.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [self._likeliest(end) for end in ends]

    def _put(self, index: int, token: int, position: int, sequence: int, wanted: bool) -> None:
        batch = self._batch
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = wanted

    def _likeliest(self, index: int) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def load_openvino(task: ContestTask) -> LoadedEngine:
    """OpenVINO GenAI's continuous batching, from a GGUF file."""
    openvino: Any = import_module("openvino")
    genai: Any = import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_NUM_THREADS": task.job.threads}
    pipeline = genai.ContinuousBatchingPipeline(task.path, scheduler, "CPU", options)
    config = genai.GenerationConfig(max_new_tokens=task.job.max_tokens, ignore_eos=True, do_sample=False)

    def run() -> Output:
        tokens = []
        for wave in task.waves():  # its max_num_seqs does not bound a batch
            prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in wave]
            tokens += [list(item.m_generation_ids[0]) for item in pipeline.generate(prompts, [config] * len(wave))]
        return Output.of(tokens)

    return Simple(task.weights, run)


def _aligned(length: int) -> int:
    return -(-length // LLAMA_ALIGN) * LLAMA_ALIGN
