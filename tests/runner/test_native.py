"""Native steps: their logits against plain torch, and the promise that batch, chunks and threads change no bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from family_cases import CASES, save_hf
from gapless import LLM, SamplingParams
from gapless.attention.base import Rotation
from gapless.core.limits import Limits
from gapless.core.plan import Chunk, Plan
from gapless.core.request import int_array
from gapless.core.row_fields import SEAT_WORDS, need
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.errors import ConfigError
from gapless.models.config import ModelConfig
from gapless.models.loader import load_config, load_model, open_weights
from gapless.models.source import resolve
from gapless.native import library
from gapless.runner import native_runner
from gapless.runner.kits import cpu
from gapless.runner.kv_store import KVStore
from gapless.runner.native_model import NativeModel
from gapless.runner.native_runner import NativeRunner
from gapless.runner.processors import MASKED, SampledRows, mask
from gapless.runner.row_store import seat_columns
from tiny import CPU, PROMPTS, VOCAB_SIZE, write_tiny

pytestmark = pytest.mark.skipif(library.why_unavailable() is not None, reason=str(library.why_unavailable()))

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24}
EXPERTS: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5}
EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "tie_word_embeddings": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied": {"tie_word_embeddings": True},
    "mqa": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "all biases": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {"hidden_size": 35, "head_dim": 10, "intermediate_size": 51, "vocab_size": 61},
    "odd sizes, tied": {"hidden_size": 35, "head_dim": 22, "intermediate_size": 51, "tie_word_embeddings": True},
    "large heads": {"head_dim": 144},
    "llama3 rope": {
        "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 32, "rope_theta": 5000.0}
    },
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "many heads": {"num_attention_heads": 50, "num_key_value_heads": 1, "head_dim": 16},
    "experts": EXPERTS,
    "experts, shares of all": EXPERTS | {"norm_topk_prob": False},
}
TOKENS = np.random.default_rng(3).integers(0, 61, 100).astype(np.int32)


@dataclass
class Feed:
    """Known tokens of one row for one step."""

    row: int
    start: int
    tokens: Sequence[int]


class Bench:
    """A runner alone: feeds chunks, gives back the logits of each chunk's last token."""

    def __init__(self, model: NativeModel, block_size: int = 16, num_rows: int = 40) -> None:
        device = CpuDevice(driver=InlineDriver())
        config = model.config
        blocks = 128 // block_size
        self.limits = Limits(num_rows, num_rows * blocks, block_size, max_batch_tokens=400, max_model_len=128)
        self.kv = KVStore(
            device,
            places=range(config.num_layers),
            num_blocks=self.limits.num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            heads_first=True,
        )
        self.runner = NativeRunner(device, self.limits, model, self.kv)
        order = np.random.default_rng(1).permutation(self.limits.num_blocks)
        self._blocks = order.reshape(num_rows, blocks).astype(np.int32)

    def step(self, *feeds: Feed, decodes: Sequence[int] = ()) -> torch.Tensor:
        chunks = tuple(Chunk(f.row, 1, f.start, int_array(f.tokens), True) for f in feeds)
        rows = [*decodes, *(f.row for f in feeds)]
        table = [(row, i, int(b)) for row in (f.row for f in feeds) for i, b in enumerate(self._blocks[row])]
        plan = Plan(
            step=1,
            decode_rows=int_array(decodes),
            chunks=chunks,
            new_blocks=np.array(table, np.int32).reshape(-1, 3),
            sample_rows=int_array(rows),
            sample_epochs=np.ones(len(rows), np.int64),
            max_decode_length=0,
            needs=need("temperature"),  # so that logits come back
            seat_rows=int_array([f.row for f in feeds]),
            seats=np.zeros((len(feeds), SEAT_WORDS), np.int32),
        )
        packed = torch.zeros(20_000, dtype=torch.int32)  # more than a scheduler's plan: whole tables at once
        filled = self.runner.fill(plan, packed.numpy())
        self.tokens = torch.zeros(self.limits.num_rows, dtype=torch.int32)
        self.runner.step(filled, packed, self.tokens)
        return self.runner.logits[: len(rows)].clone()


def load_native(directory: Path, dtype: torch.dtype = torch.float32) -> NativeModel:
    source = resolve(directory)
    return cpu.load_native(source, load_config(source), dtype=dtype, device=torch.device("cpu"))


def dense_logits(directory: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of every position, by the torch model."""
    source = resolve(directory)
    config = load_config(source)
    model = load_model(source, config, dtype=dtype, device=torch.device("cpu"))
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), _dense(config))
        return model.logits(hidden).float()


def _dense(config: ModelConfig) -> Any:
    def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        sizes = (config.num_heads, config.num_kv_heads)
        q, k = rotation.apply(heads[:, : sum(sizes)]).split_with_sizes(sizes, dim=1)
        q, k, v = (x.transpose(0, 1) for x in (q, k, heads[:, sum(sizes) :]))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)

    return attend


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("block_size", [16, 4])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_torch(tmp_path: Path, changes: dict[str, Any], block_size: int) -> None:
    write_tiny(tmp_path, **changes)
    bench, tokens = Bench(load_native(tmp_path), block_size), TOKENS.tolist()
    expected = dense_logits(tmp_path, tokens)
    start = 0
    for end in (1, 2, 19, 20, 83, 100):
        found = bench.step(Feed(3, start, tokens[start:end]))[0]
        torch.testing.assert_close(found, expected[end - 1], atol=1e-4, rtol=1e-4)
        start = end


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    write_tiny(tmp_path, hidden_size=64, head_dim=16)
    expected = dense_logits(tmp_path, TOKENS)[-1]
    found = Bench(load_native(tmp_path, torch.bfloat16)).step(Feed(0, 0, TOKENS))[0]
    torch_error = (dense_logits(tmp_path, TOKENS, torch.bfloat16)[-1] - expected).abs().mean()
    assert (found - expected).abs().mean() < 1.2 * torch_error


LENT = ("gqa", "odd sizes, tied", "all biases", "experts")
COLUMNS = ("gpt2", "gpt2 wide", "gpt oss")  # files have [in, out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", [*LENT, *COLUMNS])
def test_no_bit_depends_on_whether_weights_are_packed_yet(
    tmp_path: Path, variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant in COLUMNS:
        save_hf(tmp_path, **CASES[variant])
    else:
        write_tiny(tmp_path, **VARIANTS[variant])
    weights = tmp_path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(weights).items()}, weights)
    source = resolve(tmp_path)
    read = open_weights(source, load_config(source), dtype=dtype, device=torch.device("cpu"))  # copies
    expected = Bench(NativeModel(load_config(source), read)).step(Feed(0, 0, TOKENS))[0]
    pack = library.load_library().gapless_pack_lent
    monkeypatch.setattr(library.load_library(), "gapless_pack_lent", lambda model: 0)
    model = load_native(tmp_path, dtype)
    bench = Bench(model)
    assert model.num_unpacked >= 4 * model.config.num_layers
    for num_tokens in (100, 1, 20):
        found = bench.step(Feed(num_tokens % 7, 0, TOKENS[:num_tokens]))[0]
        if num_tokens == 100:
            assert torch.equal(found, expected)
    assert bench.runner.ledger[native_runner.UNPACKED] == 3
    monkeypatch.undo()
    assert pack(model.handle) == 0
    until = time.monotonic() + 20
    while model.num_unpacked and time.monotonic() < until:
        assert torch.equal(bench.step(Feed(0, 0, TOKENS))[0], expected)
    assert model.num_unpacked == 0
    assert torch.equal(bench.step(Feed(0, 0, TOKENS))[0], expected)
    counted = bench.runner.ledger[native_runner.UNPACKED]
    bench.step(Feed(0, 0, TOKENS))
    assert bench.runner.ledger[native_runner.UNPACKED] == counted


def test_a_model_may_go_while_it_is_packed(tmp_path: Path) -> None:
    write_tiny(tmp_path, vocab_size=20_000, hidden_size=256, head_dim=64)
    for _ in range(3):
        model = load_native(tmp_path)
        del model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("block_size", "changes"), [(16, {}), (4, {}), (16, EXPERTS)], ids=["16", "4", "experts"])
def test_no_bit_depends_on_batch_chunks_or_threads(
    tmp_path: Path, dtype: torch.dtype, block_size: int, changes: dict[str, Any], threads: int
) -> None:
    write_tiny(tmp_path, hidden_size=64, head_dim=16, intermediate_size=112, num_hidden_layers=3, **changes)
    model = load_native(tmp_path, dtype)
    torch.set_num_threads(1)
    alone = Bench(model, block_size).step(Feed(0, 0, TOKENS))[0]
    torch.set_num_threads(threads)
    in_pieces = Bench(model, block_size)
    start = 0
    for end in (1, 8, 9, 40, 41, 64, 99, 100):
        found = in_pieces.step(Feed(5, start, TOKENS[start:end]))[0]
        start = end
    assert torch.equal(found, alone)
    for num_others in (1, 4, 11, 15, 27, 39):
        crowd = Bench(model, block_size)
        others = [Feed(row, 0, TOKENS[: row % 5 + 1]) for row in range(1, num_others + 1)]
        crowd.step(Feed(0, 0, TOKENS[:-1]), *others)
        crowd.runner.rows.last_token[0] = int(TOKENS[-1])
        found = crowd.step(decodes=range(num_others + 1))[0]
        assert torch.equal(found, alone), num_others


@pytest.mark.parametrize("block_size", [16, 4])
def test_what_lies_past_a_row_never_reaches_a_result(tiny_dir: Path, block_size: int) -> None:
    model = load_native(tiny_dir)
    clean, stale = Bench(model, block_size), Bench(model, block_size)
    stale.kv.buffer.tensor.fill_(torch.nan)
    for bench in (clean, stale):
        bench.step(Feed(0, 0, TOKENS[:19]), Feed(1, 0, TOKENS[:70]))
        bench.found = bench.step(Feed(0, 19, TOKENS[19:23]), decodes=[1])
    assert torch.equal(clean.found, stale.found)
    assert clean.found.isfinite().all()


def test_the_best_token_is_chosen_inside(tiny_dir: Path, threads: int) -> None:
    """With logits the sampler chooses, without them the call itself: both see the same rows afterwards."""
    prompts = [[(7 * i + j) % VOCAB_SIZE for j in range(i + 1)] for i in range(20)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(tiny_dir, **CPU, num_threads=threads) as llm:
        inside = [c.token_ids for c in llm.generate(prompts, params)]
    mixed = [SamplingParams(max_tokens=12, temperature=float(i == 19), ignore_eos=True) for i in range(20)]
    with LLM(tiny_dir, **CPU, num_threads=threads) as llm:
        outside = [c.token_ids for c in llm.generate(prompts, mixed)]
    assert inside[:19] == outside[:19]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_logits_that_are_no_numbers_fail_their_request_alone(
    tiny_dir: Path, is_native: bool, temperature: float, depth: int
) -> None:
    """From position 30 on there is no rotation: of the native choice and of the sampler's, with scores and without."""
    params = SamplingParams(
        max_tokens=12, temperature=temperature, ignore_eos=True, seed=5, logprobs=2 if temperature else None
    )
    prompts = ["x" * 24, "short", "y" * 40]
    with LLM(tiny_dir, **CPU, native=is_native, depth=depth) as llm:
        whole = llm.generate(prompts, params)
        runner: Any = llm.engine._parts.built.runner
        with torch.inference_mode():
            (runner._model.rotary[0] if is_native else runner._step.model.rotary[0].table)[30:] = torch.nan
        late, unharmed, early = llm.generate(prompts, params)
    assert unharmed.token_ids == whole[1].token_ids
    assert (late.finish_reason, early.finish_reason) == ("error", "error")
    assert late.token_ids == whole[0].token_ids[:7]  # of positions 24 to 30; the token at 30 is fed and gives nothing
    assert early.token_ids == ()
    assert "the logits at position 31 are not finite" in str(late.error)
    assert "the logits at position 40 are not finite" in str(early.error)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_torch_steps_give_the_same_tokens(tiny_dir: Path, temperature: float) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=5, top_k=20)
    found = []
    for is_native in (True, False):
        with LLM(tiny_dir, **CPU, native=is_native, check=True, interleave=3) as llm:
            found.append([c.token_ids for c in llm.generate(PROMPTS, params)])
            assert llm.engine.resolved.native is is_native
            assert not any("native" in reason for reason in llm.engine.monitor.ledger())
    assert found[0] == found[1]


def test_bad_plans_are_refused(tiny_dir: Path) -> None:
    bench = Bench(load_native(tiny_dir))
    with pytest.raises(RuntimeError, match="a token id outside the vocabulary"):
        bench.step(Feed(0, 0, [5, VOCAB_SIZE]))
    with pytest.raises(RuntimeError, match="a position beyond the rope table"):
        bench.step(Feed(0, 127, [5, 5]))
    with pytest.raises(RuntimeError, match="more tokens or samples"):
        bench.step(*(Feed(row, 0, TOKENS) for row in range(5)))
    with pytest.raises(RuntimeError, match="more tokens or samples"):
        bench.step(decodes=[0] * 41)


def test_a_step_of_nothing(tiny_dir: Path, threads: int) -> None:
    bench = Bench(load_native(tiny_dir))
    assert len(bench.step()) == 0
    assert len(bench.step(Feed(0, 0, TOKENS))) == 1


WITHOUT_THREADS = """
import resource, sys, torch
from pathlib import Path
from test_native import TOKENS, Bench, Feed, load_native

model = load_native(Path(sys.argv[1]))
torch.set_num_threads(8)
expected = Bench(model).step(Feed(0, 0, TOKENS))
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 5 * 2**30,) * 2)
assert torch.equal(Bench(model).step(Feed(0, 0, TOKENS)), expected)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a limit on address space")
def test_a_system_that_gives_no_more_threads(tiny_dir: Path) -> None:
    """Stacks of 4 GiB and room for 5: of seven helpers one can be started."""
    stack = ["prlimit", f"--stack={4 * 2**30}:"] if shutil.which("prlimit") else pytest.skip("needs prlimit")
    paths = os.pathsep.join(str(path) for path in (Path(__file__).parent, *sys.path))
    command = [*stack, sys.executable, "-c", WITHOUT_THREADS, str(tiny_dir)]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_float16_runs_in_torch_and_says_so(tiny_dir: Path) -> None:
    with LLM(tiny_dir, device="cpu", dtype="float16") as llm:
        llm.generate(["abc"], SamplingParams(max_tokens=3, ignore_eos=True))
        assert llm.engine.monitor.ledger()["no native call: float16 weights"] == 3


def test_without_a_compiler_steps_run_in_torch_and_say_so(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gapless.cli import main

    monkeypatch.setattr(library, "why_unavailable", lambda: "no C++ compiler")
    with LLM(tiny_dir, **CPU) as llm:
        llm.generate(["abc"], SamplingParams(max_tokens=3, ignore_eos=True))
        assert llm.engine.monitor.ledger()["no native call: no C++ compiler"] == 3
    assert main(["info", "--model", str(tiny_dir), "--device", "cpu"]) == 0
    assert "torch, for want of a native one: no C++ compiler" in capsys.readouterr().out


def test_batch_invariance_on_a_cpu_is_the_native_steps(dummy_dir: Path) -> None:
    with pytest.raises(ConfigError, match="native"):
        LLM(dummy_dir, **CPU, batch_invariant=True, native=False)


@pytest.mark.parametrize("is_native", [True, False])
def test_a_plan_can_copy_blocks(tiny_dir: Path, is_native: bool) -> None:
    """A request goes on in copies of its blocks: every table entry is a new block, and the old ones are poison."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LLM(tiny_dir, **CPU, native=is_native, depth=1, num_blocks=64, prefix_cache=False) as llm:
        expected = llm.generate(["x" * 24], params)[0].token_ids
        runner, promise = llm.engine._parts.built.runner, llm.engine._scheduler._promise
        step, layers = runner.step, llm.engine._parts.built.kv.places

        def moving(*args: Any) -> Plan:
            plan = promise(*args)
            if plan.step % 5 or len(plan.new_blocks) or not plan.num_decodes:
                return plan
            rows, row = llm.engine._scheduler.rows, int(plan.decode_rows[0])
            old = rows.blocks[row, : rows.num_blocks[row], 0].copy()
            new = (old + 32) % 64
            rows.blocks[row, : len(new), 0] = new
            table = [(row, index, block) for index, block in enumerate(new.tolist())]
            return replace(plan, new_blocks=np.array(table, np.int32), block_copies=np.stack((old, new), 1))

        def poisoning(filled: Any, *rest: Any) -> None:
            step(filled, *rest)
            for layer in layers if len(filled.plan.block_copies) else ():
                layer[filled.plan.block_copies[:, 0].tolist()] = torch.nan

        llm.engine._scheduler._promise = moving  # type: ignore[method-assign]
        runner.step = poisoning  # type: ignore[method-assign]
        llm.engine._scheduler.tables.release = lambda row: None  # type: ignore[method-assign]
        assert llm.generate(["x" * 24], params)[0].token_ids == expected


def test_sinks_with_a_window_and_a_cap(dummy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No family without experts has sinks, so a Llama gets them."""

    def load(source: Any) -> Any:
        config = load_config(source)
        attention = replace(config.layers[0].attention, sinks=True, window=9, soft_cap=0.4)
        return replace(config, layers=tuple(replace(layer, attention=attention) for layer in config.layers))

    monkeypatch.setattr("gapless.runner.resolve.load_config", load)
    monkeypatch.setattr("gapless.models.weights._DUMMY_SCALE", 0.5)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    prompts, found = [list(range(3, 43)), [7, 8]], []
    for is_native in (True, False):
        options = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "max_batch_tokens": 16}
        with LLM(dummy_dir, **options, native=is_native) as llm:
            assert llm.engine.resolved.native is is_native
            found.append(llm.generate(prompts, params))
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        pairs = zip(
            (*ours.prompt_logprobs[1:], *ours.logprobs),
            (*theirs.prompt_logprobs[1:], *theirs.logprobs),
            strict=True,
        )
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


def test_masks_are_applied_as_the_sampler_defines_them(tmp_path: Path) -> None:
    """Rows without a mask keep their logits, whatever their words say; odd sizes have a part of a word."""
    write_tiny(tmp_path, vocab_size=61)
    bench = Bench(load_native(tmp_path), num_rows=6)
    runner, rows = bench.runner, torch.tensor([4, 1, 3])
    runner.rows.masks[:] = torch.randint(-(2**31), 2**31 - 1, runner.rows.masks.shape, dtype=torch.int32)
    runner.rows.masks[4, 0], runner.rows.masks[1] = 0, -1
    seat_columns(runner.rows.seats)["masked"][:] = torch.tensor([0, 1, 0, 0, 1, 1, 0])
    before = torch.randn(3, 61)
    fields = SampledRows(rows, rows, runner.rows.state).fields(MASKED)
    runner.logits[:3] = before
    runner._mask(rows)
    torch.testing.assert_close(runner.logits[:3], mask(before, fields), rtol=0, atol=0)
    assert runner.logits[0].isinf().any()
    torch.testing.assert_close(runner.logits[1:3], before[1:], rtol=0, atol=0)
