"""A peer's side of the GPU workloads: a script for any Python that has the peer, run by its path, without Gapless.

Lines of JSON come in on standard input: first the peer and its model, then a job in each line. Each is answered by one
line on standard output, after a mark. A job is run twice, and both times are returned. Output of libraries goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TextIO

MARK = "@peer "  # begins every answer: whatever else is on standard output is noise
NUM_RUNS = 2

JobRun = Callable[[], int]  # runs a job and returns the number of new tokens


class Vllm:
    """vLLM with its defaults and no prefix cache. Requests get no seeds of their own, which would slow it down."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._vllm: Any = import_module("vllm")
        self.version = str(self._vllm.__version__)
        self.note = ""
        self._llm = self._vllm.LLM(
            model=start["model"],
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=start["max_model_len"],
            max_num_seqs=start["max_num_rows"],
            enable_prefix_caching=False,
        )

    @contextmanager
    def ready_for(self, job: dict[str, Any]) -> Iterator[JobRun]:
        common = {"ignore_eos": True, "detokenize": False, **job["sampling"]}
        params = [self._vllm.SamplingParams(max_tokens=count, **common) for count in job["counts"]]
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]

        def run() -> int:
            found = self._llm.generate(prompts, params, use_tqdm=False)
            return sum(len(item.outputs[0].token_ids) for item in found)

        yield run


class Transformers:
    """transformers' continuous batching with its defaults. A manager is made for each job, before the clock starts."""

    def __init__(self, start: dict[str, Any]) -> None:
        import torch

        self._transformers: Any = import_module("transformers")
        self.version = str(self._transformers.__version__)
        config = self._transformers.AutoConfig.from_pretrained(start["model"])
        with torch.device(start["device"]):
            model = self._transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._model = model.eval()
        self._model.generation_config = self._transformers.GenerationConfig()
        self.note = ""

    @contextmanager
    def ready_for(self, job: dict[str, Any]) -> Iterator[JobRun]:
        with self._manager(job) as manager:
            try:
                yield lambda: drain(manager, job["prompts"], job["counts"])
                self.note = f"attention: {self._model.config._attn_implementation}"
            except BaseException:
                manager.stop(hard_stop=True)  # otherwise it would finish the remaining work, however long that takes
                raise

    def _manager(self, job: dict[str, Any]) -> Any:
        generation: Any = import_module("transformers.generation")
        hints: Any = import_module("transformers.generation.continuous_batching.utils").WorkloadHints
        sampling = {**job["sampling"], "do_sample": True} if job["sampling"]["temperature"] else {"do_sample": False}
        num_rows, num_requests, most = job["max_num_rows"], len(job["prompts"]), max(job["counts"])
        few_rows = {"max_requests_per_batch": num_rows} if num_rows < num_requests else {}
        return self._model.continuous_batching_context_manager(
            generation_config=self._transformers.GenerationConfig(
                max_new_tokens=most, eos_token_id=-1, pad_token_id=0, **sampling
            ),
            continuous_batching_config=generation.ContinuousBatchingConfig(allow_block_sharing=False, **few_rows),
            workload_hints=hints(
                max_prompt_length=max(map(len, job["prompts"])), max_generated_length=most, num_requests=num_requests
            ),
        )


def drain(manager: Any, prompts: list[list[int]], counts: list[int]) -> int:
    """Submit the prompts and wait for all; return the generated tokens."""
    if len(set(counts)) == 1:
        manager.add_requests(inputs=prompts, max_new_tokens=counts[0])
    else:
        for prompt, count in zip(prompts, counts, strict=True):
            manager.add_request(prompt, max_new_tokens=count)
    found: list[int] = []
    while len(found) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            found.append(len(result.generated_tokens))
        elif result is None and not manager.is_running():
            raise RuntimeError("the generation thread ended")
    return sum(found)


PEERS: dict[str, type[Vllm] | type[Transformers]] = {"vllm": Vllm, "transformers": Transformers}


def run_job(peer: Vllm | Transformers, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job twice. Raises RuntimeError unless all tokens came."""
    seconds = []
    with peer.ready_for(job) as run:
        for _ in range(NUM_RUNS):
            began = time.perf_counter()
            num_tokens = run()
            seconds.append(time.perf_counter() - began)
            if num_tokens != sum(job["counts"]):
                raise RuntimeError(f"{num_tokens} tokens came out instead of {sum(job['counts'])}")
    return {"seconds": seconds, "note": peer.note}


def main() -> int:
    """Serve until standard input ends."""
    answers = _keep_stdout()
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]  # only our names
    start = json.loads(sys.stdin.readline())
    try:
        peer = PEERS[start["peer"]](start)
    except Exception as error:
        _fail(answers, error)
        return 1
    _send(answers, {"version": peer.version})
    for line in sys.stdin:
        try:
            _send(answers, run_job(peer, json.loads(line)))
        except Exception as error:
            _fail(answers, error)
    return 0


def _keep_stdout() -> TextIO:
    """Standard output for us alone; file descriptor 1 becomes a second standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w")


def _fail(answers: TextIO, error: Exception) -> None:
    traceback.print_exc()
    lines = str(error).strip().splitlines()
    _send(answers, {"error": f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"})


def _send(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(MARK + json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
