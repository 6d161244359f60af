"""SmolLM2 on a real GPU: float32 equals transformers on every prompt of the parity suite, bfloat16 up to near-ties."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Rounded:
    """transformers in bfloat16, what it answers, and in float32 as the judge of what was close in truth."""

    judge: Any
    model: Any
    answers: list[list[int]]

    def scores(self, tokens: list[int]) -> list[torch.Tensor]:
        """Log-probabilities of the next token, by the judge and by the model.

        The last product is taken in float32 in any case: rounded to bfloat16, logits of 16 and more lie 0.125 apart.
        """
        found = []
        with torch.inference_mode():
            for model in (self.judge, self.model):
                hidden = model.model(torch.tensor([tokens], device="cuda")).last_hidden_state[0, -1].float()
                found.append((hidden @ model.lm_head.weight.float().T).log_softmax(dim=0))
        return found


@pytest.fixture(scope="module")
def rounded(reference: Reference) -> Rounded:
    judge = copy.deepcopy(reference.model).to("cuda")
    model = copy.deepcopy(reference.model).to("cuda", torch.bfloat16)
    answers = []
    for question in reference.questions:
        ids = torch.tensor([question.tokens], device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False)
        answers.append(out[0, len(question.tokens) :].tolist())
    return Rounded(judge, model, answers)


@pytest.mark.parametrize("options", [{"depth": 2}, {"depth": 2, "batch_invariant": True}], ids=str)
def test_bfloat16_differs_at_near_ties_only(reference: Reference, rounded: Rounded, options: dict[str, Any]) -> None:
    """Where tokens part for the first time, the likeliest tokens are nearly the same, and the two choices a near-tie.

    Either engine is off by as much as NEAR itself; so a near-tie is what transformers calls so in float32 or in
    bfloat16, of our choice, or what we call so, of its choice.
    """
    with make(device="cuda", dtype="bfloat16", **options) as llm:
        prompts = [list(question.tokens) for question in reference.questions]
        found = llm.generate(prompts, replace(PARAMS, logprobs=TOP))
    far, num_parted = [], 0
    for prompt, completion, theirs in zip(prompts, found, rounded.answers, strict=True):
        assert completion.error is None
        assert completion.logprobs is not None
        pairs = enumerate(zip(completion.token_ids, theirs, strict=False))
        parting = next((i for i, (ours, other) in pairs if ours != other), None)
        if parting is None:
            continue
        num_parted += 1
        ours = completion.logprobs[parting]
        scores = rounded.scores([*prompt, *theirs[:parting]])
        common = max(len(dict(ours.top).keys() & set(view.topk(TOP).indices.tolist())) for view in scores)
        gaps = [float(view.max() - view[ours.token]) for view in scores]
        gaps.append(ours.logprob - dict(ours.top).get(theirs[parting], -math.inf))
        print(f"token {parting}: {common} of {TOP} in common, gaps {', '.join(f'{gap:.3f}' for gap in gaps)}")
        if common < TOP - 1 or min(gaps) >= NEAR:
            far.append((parting, common, gaps))
    print(f"{num_parted} of {len(prompts)} parted")
    assert not far


def test_float16_runs(reference: Reference) -> None:
    with make(device="cuda", dtype="float16", depth=2) as llm:
        found = llm.generate([list(question.tokens) for question in reference.questions], PARAMS)
    same = sum(item.token_ids == answer for item, answer in zip(found, reference.answers, strict=True))
    assert same > len(found) // 2  # the rest are near-ties
