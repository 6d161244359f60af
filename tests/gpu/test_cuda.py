"""The engine on a real GPU. Run with `pytest -m gpu tests/gpu` on a machine that has one."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from gapless import LLM, SamplingParams
from gapless.device.late import PREFIX

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
VOCAB = 1000


def make_model(**sizes: Any) -> Any:
    """A random Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, max_position_embeddings=2048, **sizes))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are far apart."""
    model = make_model(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=512,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(1, VOCAB) for _ in range(draw.choice([1, 3, 17, 64, 130, 300]))] for _ in range(24)]


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda().eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 2},
        {"depth": 3, "max_batch_tokens": 64, "max_num_rows": 16},
        {"depth": 2, "num_blocks": 60, "max_num_rows": 16},
        {"depth": 2, "check": True},
    ],
    ids=str,
)
def test_float32_tokens_equal_transformers(
    model_dir: Path, prompts: list[list[int]], expected: list[tuple[int, ...]], options: dict[str, int]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with LLM(model_dir, dtype="float32", device="cuda", **options) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
        if "num_blocks" in options:
            assert llm.stats().num_preemptions > 0
    assert [completion.token_ids for completion in found] == expected


def test_no_hidden_synchronization(model_dir: Path, prompts: list[list[int]]) -> None:
    """Prefill, decode, sampling, rows that come and go: nothing but the wait for an event holds the host back."""
    params = [
        SamplingParams(
            max_tokens=20 + i,
            temperature=i % 2,
            top_k=5 * (i % 3),
            min_tokens=i % 4,
            ignore_eos=True,
            logprobs=[None, 0, 5, None][i % 4],
            prompt_logprobs=[None, None, 2, None, 0][i % 5],
        )
        for i in range(len(prompts))
    ]
    with LLM(model_dir, dtype="bfloat16", device="cuda", depth=2, max_num_rows=16) as llm:
        llm.generate(prompts, params)  # compiles kernels, which may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = llm.generate(prompts, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [completion.error for completion in found] == [None] * len(prompts)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_timeline_is_in_order_and_explained(model_dir: Path, prompts: list[list[int]], depth: int) -> None:
    """On the host's clock: queued before it begins, over before it is seen, and gaps have causes."""
    slack_s = 50e-6
    with LLM(model_dir, dtype="bfloat16", device="cuda", depth=depth, trace=True) as llm:
        params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        llm.generate(prompts, params)
        before = llm.stats()
        llm.generate(prompts, params)
        found, spent = llm.engine.monitor.timeline(before=before), llm.stats() - before
    s = found.steps
    parts = (s.h2d_begin, s.h2d_end, s.compute_begin, s.compute_end, s.d2h_begin, s.d2h_end)
    for earlier, later in itertools.pairwise(parts):
        assert ((earlier <= later + 1e-9) | np.isnan(earlier)).all()  # not every step has a copy in
    assert (s.compute_begin[1:] >= s.compute_end[:-1] - slack_s).all()
    assert (s.d2h_end <= s.collected + slack_s).all()
    assert 0 < found.busy_s <= spent.time_s
    explained = sum(seconds for cause, seconds in found.idle_by_cause.items() if cause != "unknown")
    assert explained >= 0.95 * found.idle_s


def any_params(count: int) -> list[SamplingParams]:
    """Every way to ask for tokens, in turn."""
    return [
        SamplingParams(
            max_tokens=4 + i % 21,
            temperature=0.5 * (i % 3),
            top_k=i % 7,
            top_p=1 - 0.1 * (i % 4),
            min_tokens=i % 5,
            ignore_eos=i % 2 == 0,
            logprobs=[None, 0, 5, None, 20][i % 5],
            prompt_logprobs=[None, None, None, 2][i % 4],
        )
        for i in range(count)
    ]


def test_every_step_comes_from_a_graph(model_dir: Path, prompts: list[list[int]]) -> None:
    with LLM(model_dir, dtype="bfloat16", device="cuda", depth=2) as llm:
        found = llm.generate(prompts, any_params(len(prompts)))
        assert llm.stats().num_steps > 20
        assert [reason for reason in llm.engine.monitor.ledger() if reason.startswith("no graph")] == []
    assert [completion.error for completion in found] == [None] * len(prompts)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=str)
def test_nothing_is_done_for_the_first_time_after_ready(model_dir: Path, options: dict[str, Any]) -> None:
    """Hundreds of shapes, all features on: no kernel is compiled or loaded, no memory taken, no product met anew."""
    draw = random.Random(7)
    with LLM(
        model_dir, dtype="bfloat16", device="cuda", depth=2, max_num_rows=48, max_batch_tokens=1500, **options
    ) as llm:
        for _ in range(40):
            count = draw.choice([1, 2, 5, 17, 48, 70])
            longest = draw.choice([3, 40, 300, 1500])
            prompts = [[draw.randrange(1, VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]
            llm.generate(prompts, draw.sample(any_params(200), count))
        assert llm.stats().num_steps > 300
        assert {key: count for key, count in llm.engine.monitor.ledger().items() if key.startswith(PREFIX)} == {}


def test_batch_invariant_tokens_depend_on_nothing_but_the_request(model_dir: Path) -> None:
    """Bit for bit: 256 requests of random lengths, at depth 1, 2 and 3, in other batches, chunks and orders, alone."""
    draw = random.Random(7)
    prompts = [[draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 200))] for _ in range(256)]
    params = [
        SamplingParams(max_tokens=draw.randrange(1, 60), temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(256)
    ]
    first: list[tuple[int, ...]] | None = None
    for options in (
        {"depth": 1},
        {"depth": 2},
        {"depth": 3},
        {"depth": 2, "max_num_rows": 13, "max_batch_tokens": 77},
        {"depth": 3, "num_blocks": 100, "max_num_rows": 40},
    ):
        order = list(range(256))
        if options != {"depth": 1}:
            random.Random(str(options)).shuffle(order)
        with LLM(model_dir, dtype="bfloat16", device="cuda", batch_invariant=True, **options) as llm:
            found = dict(zip(order, llm.generate([prompts[i] for i in order], [params[i] for i in order]), strict=True))
            if "num_blocks" in options:
                assert llm.stats().num_preemptions > 0
        tokens = [found[i].token_ids for i in range(256)]
        first = first or tokens
        different = [i for i in range(256) if tokens[i] != first[i]]
        assert not different, f"{options}: {len(different)} of 256 differ, first {different[0]}"
    with LLM(model_dir, dtype="bfloat16", device="cuda", batch_invariant=True, depth=2) as llm:
        for i in range(0, 256, 16):
            assert llm.generate([prompts[i]], [params[i]])[0].token_ids == first[i]


def test_stream_sanitizer_finds_nothing(model_dir: Path) -> None:
    """PyTorch's own detector of unordered accesses from several streams, over a whole job."""
    code = (
        "import sys; from gapless import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], dtype='bfloat16', device='cuda', depth=2, max_num_rows=8) as llm:\n"
        "    prompts = [[1 + i] * (5 + 9 * i) for i in range(20)]\n"
        "    found = llm.generate(prompts, SamplingParams(max_tokens=20, temperature=0.5, ignore_eos=True))\n"
        "    assert all(item.error is None for item in found), found[0].error\n"
        "    print('finished', len(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model_dir)],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "finished 20" in done.stdout
    assert "possible data race" not in (done.stdout + done.stderr), done.stderr[-3000:]


@pytest.mark.parametrize("options", [{"depth": 2}, {"depth": 3, "max_batch_tokens": 64, "max_num_rows": 16}], ids=str)
def test_log_probabilities_are_those_of_transformers(
    model_dir: Path, prompts: list[list[int]], options: dict[str, int]
) -> None:
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=5, prompt_logprobs=20)
    with LLM(model_dir, dtype="float32", device="cuda", **options) as llm:
        found = llm.generate(prompts, params)
        assert [reason for reason in llm.engine.monitor.ledger() if reason.startswith("no graph")] == []
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda().eval()
    for done in found:
        tokens = [*done.prompt_token_ids, *done.token_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens], device="cuda")).logits[0].cpu().numpy()
        given = [*(done.prompt_logprobs or ()), *(done.logprobs or ())]
        for place in range(1, len(tokens)):
            num_top = 20 if place < len(done.prompt_token_ids) else 5
            oracles.check_logprob(given[place], tokens[place], logits[place - 1], num_top, atol=0.02)


@pytest.mark.parametrize("num_rows", [1, 7, 32, 50, 100, 200])
def test_bfloat16_products_of_any_batch_size(tmp_path: Path, num_rows: int) -> None:
    """Each size has kernels of its own: the model is wide enough for all of them. Tokens' scores are transformers'."""
    model = make_model(
        hidden_size=1024,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        initializer_range=0.06,
    )
    model.save_pretrained(tmp_path)
    model.cuda().eval()
    draw = random.Random(num_rows)
    prompts = [[draw.randrange(1, VOCAB) for _ in range(8)] for _ in range(num_rows)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
    with LLM(tmp_path, dtype="bfloat16", device="cuda", depth=2, max_num_rows=num_rows) as llm:
        scored = llm.generate(prompts, params)
        from_graphs = llm.generate(prompts, dataclasses.replace(params, logprobs=None))
    for done in (*scored, *from_graphs):
        tokens = [*done.prompt_token_ids, *done.token_ids]
        with torch.inference_mode():
            right = model(torch.tensor([tokens], device="cuda")).logits[0].log_softmax(dim=-1)
        for place in range(len(done.prompt_token_ids), len(tokens)):
            assert float(right[place - 1].max() - right[place - 1, tokens[place]]) < 0.15
        for place, score in enumerate(done.logprobs or (), start=len(done.prompt_token_ids)):
            assert abs(score.logprob - float(right[place - 1, tokens[place]])) < 0.15
    assert all(len(done.logprobs or ()) == 6 for done in scored)
