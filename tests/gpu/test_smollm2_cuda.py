"""SmolLM2 on a real GPU: float32 equals transformers on every prompt of the parity suite, bfloat16 up to near-ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from test_parity import COUNT, PARAMS, Reference, ask, load_once, make, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
__all__ = ["load_once", "reference"]  # fixtures
NEAR = 0.1  # in log-probability
TOP = 5


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 2},
        {"depth": 3},
        {"depth": 2, "batch_invariant": True},
        {"depth": 3, "max_batch_tokens": 16, "max_num_rows": 16},
        {"depth": 2, "num_blocks": 40, "max_batch_tokens": 128},
        {"depth": "auto"},
    ],
    ids=str,
)
def test_float32_equals_transformers(reference: Reference, options: dict[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with make(device="cuda", **options) as llm:
        ask(llm, reference)
        ask(llm, reference, [31, 32, 33])  # their prefixes are in the cache now


@pytest.mark.parametrize("options", [{"depth": 2}, {"depth": 2, "batch_invariant": True}], ids=str)
def test_bfloat16_differs_at_near_ties_only(reference: Reference, options: dict[str, Any]) -> None:
    """Where a token differs, transformers in bfloat16 finds both about as likely."""
    model = reference.model.to("cuda", torch.bfloat16)
    try:
        with make(device="cuda", dtype="bfloat16", **options) as llm:
            found = llm.generate([list(question.tokens) for question in reference.questions], PARAMS)
        for question, completion in zip(reference.questions, found, strict=True):
            assert completion.error is None
            compare(model, question.tokens, completion.token_ids)
    finally:
        reference.model.to("cpu", torch.float32)


def compare(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """Every token we chose, given those before it, is among the likeliest of transformers and as good as its best.

    The last product is taken in float32: rounded to bfloat16, logits of 16 and more lie 0.125 apart.
    """
    ids = torch.tensor([[*prompt, *tokens]], device="cuda")
    with torch.inference_mode():
        hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1].float()
        scores = (hidden @ model.lm_head.weight.float().T).log_softmax(dim=1)
    chosen = scores.gather(1, torch.tensor(tokens, device="cuda")[:, None]).squeeze(1)
    gap = scores.amax(dim=1) - chosen
    rank = (scores > chosen[:, None]).sum(dim=1)
    assert len(tokens) <= COUNT
    assert gap.max() < NEAR, f"token {int(gap.argmax())}: {gap.max():.3f} less likely than the best"
    assert rank.max() < TOP


def test_float16_runs(reference: Reference) -> None:
    with make(device="cuda", dtype="float16", depth=2) as llm:
        found = llm.generate([list(question.tokens) for question in reference.questions], PARAMS)
    same = sum(item.token_ids == answer for item, answer in zip(found, reference.answers, strict=True))
    assert same > len(found) // 2  # the rest are near-ties
