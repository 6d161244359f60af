"""LLM with tensor parallel ranks: everything that a request may ask for, and what becomes of it when a rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.core.processor import RowFacts
from gapless.errors import ConfigError, EngineClosed
from gapless.pipeline.ranked import RankedExecutor
from gapless.proof.tiny import FAMILIES
from rank_pids import child_pids
from tiny import CPU, write_tiny

OPTIONS: dict[str, Any] = CPU | {"num_threads": 1, "native": False, "num_blocks": 256, "depth": 2}
PROMPTS = ["hello", "how are you today, my friend? And how are your friends?", "xyz"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, repetition_penalty=1.3)


class Raise:
    """A logits processor, known by its effect."""

    name, needs_newest = "raise", False

    def applies(self, params: SamplingParams) -> bool:
        return params.seed == 99

    def __call__(self, logits: torch.Tensor, rows: Sequence[RowFacts]) -> torch.Tensor:
        logits[:, 42] += 1e4
        return logits


def followers(llm: LLM) -> list[int]:
    executor = llm.engine._parts.executor
    assert isinstance(executor, RankedExecutor)
    return child_pids(executor._team)


def eventually(is_so: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def is_gone(pid: int) -> bool:
    """Dead, though perhaps not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """The same model on one rank and on two. GPT-OSS has sinks, windows and experts."""
    path = write_tiny(tmp_path_factory.mktemp("model"), **FAMILIES[request.param])
    one, two = (LLM(path, **OPTIONS, tensor_parallel=count, logits_processors=[Raise()]) for count in (1, 2))
    yield one, two
    one.close()
    two.close()


def test_completions_are_those_of_one_rank(pair: tuple[LLM, LLM]) -> None:
    one, two = (llm.generate(PROMPTS * 2, [GREEDY] * 3 + [DRAWN] * 3) for llm in pair)
    for ours, theirs in zip(two, one, strict=True):
        assert ours.token_ids == theirs.token_ids
        scores = [[score.logprob for score in done.logprobs or ()] for done in (ours, theirs)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_second_halves(pair: tuple[LLM, LLM]) -> None:
    """Masks and logits processors are rank 0's affair, and their tokens everybody's."""
    shape = SamplingParams(max_tokens=12, temperature=1.0, seed=1, structured={"choice": ["yes", "no, never"]})
    processed = SamplingParams(max_tokens=3, temperature=1.0, seed=99, ignore_eos=True)
    one, two = (llm.generate(PROMPTS * 2, [shape] * 3 + [processed] * 3) for llm in pair)
    assert [done.token_ids for done in two] == [done.token_ids for done in one]
    assert {done.text for done in two[:3]} <= {"yes", "no, never"}
    assert [done.token_ids for done in two[3:]] == [(42,) * 3] * 3


def test_the_ledger_says_that_steps_are_not_native(tmp_path: Path) -> None:
    """Also: a rank that dies while nothing runs ends the engine, and names itself."""
    options = OPTIONS | {"native": True}
    with LLM(write_tiny(tmp_path), **options, tensor_parallel=2) as llm:
        llm.generate(PROMPTS, GREEDY)
        assert llm.engine.monitor.ledger()["no native call: tensor parallel ranks run in torch"] > 0
        (pid,) = followers(llm)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: llm.engine._closing)
        with pytest.raises(EngineClosed) as closed:
            llm.generate(PROMPTS, GREEDY)
        assert "rank 1 was killed by SIGKILL" in str(closed.value.__cause__)
        assert is_gone(pid)


REFUSED = {
    "sizes": ({"tensor_parallel": 3}, "tensor_parallel 3: LlamaForCausalLM: 4 attention heads cannot be divided"),
    "invariant": ({"tensor_parallel": 2, "batch_invariant": True}, "batch_invariant: sums over tensor parallel ranks"),
    "quantized": ({"tensor_parallel": 2, "quantization": "fp8"}, "quantization fp8: parts of a weight would get"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_process_starts(case: str, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, reason = REFUSED[case]
    monkeypatch.setattr("gapless.ranks.local.spawn", None)
    with pytest.raises(ConfigError, match=f"^{reason}"):
        LLM(tiny_dir, **CPU, **options)


@pytest.mark.slow
def test_a_rank_that_stands_still(tmp_path: Path) -> None:
    """It is alive and says nothing, so the time limit of the others ends the group."""
    with LLM(write_tiny(tmp_path), **OPTIONS, tensor_parallel=4, rank_timeout=8.0) as llm:
        llm.generate(PROMPTS, GREEDY)
        os.kill(followers(llm)[1], signal.SIGSTOP)
        began = time.monotonic()
        errors = [done.error or "" for done in llm.generate(PROMPTS, GREEDY)]
        assert all("a rank is gone, or did not come within 8 s" in error for error in errors), errors
        assert time.monotonic() - began < 30
        assert eventually(lambda: all(is_gone(pid) for pid in followers(llm)))


ORPHANS = """
import sys, time
from gapless import LLM
from test_llm_ranks import OPTIONS, followers
llm = LLM(sys.argv[1], **OPTIONS, tensor_parallel=4)
print(*followers(llm), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_no_rank_outlives_the_first(tmp_path: Path) -> None:
    path = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", ORPHANS, str(write_tiny(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        process.kill()
    assert eventually(lambda: all(is_gone(pid) for pid in pids))
