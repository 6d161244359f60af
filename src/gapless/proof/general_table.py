"""What comes of every decoder of the installed transformers on the general path, as a table in docs/models.md.

Each without a family is made tiny and random, saved, and generates tokens for prompts of unequal length at depth 2.
They must be transformers' own. `python -m gapless.proof.general_table FILE` writes the table into a page, between two
marks.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gapless.core.params import SamplingParams
from gapless.errors import ModelError
from gapless.llm import LLM
from gapless.models.registry import FAMILIES

BEGIN, END = "<!-- made by gapless.proof.general_table -->", "<!-- end of the general path -->"
RUNS, WRONG, LARGE = "runs", "wrong tokens", "not tried: no tiny config"
LENGTHS, NUM_STEPS, CLOSE = (40, 3, 17), 32, 1e-4
MAX_PARAMETERS = 50_000_000  # a config without the keys below stays as large as its default
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "sliding_window": 24,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 80,
    "rotary_dim": 8,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 128,
    "ffn_dim": 80,
    "word_embed_proj_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_k": 2,
    "moe_topk": 2,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
_LATENT |= {"head_dim": 8, "num_key_value_heads": 4}
_HEAD = {"head_dim": 16}
_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "axk1"), _LATENT),
    **dict.fromkeys(("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _HEAD),
}


def outcome(model_type: str, architecture: str) -> str:
    """RUNS, WRONG, LARGE, or why it is refused."""
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    raw = _SIZES | {"architectures": [architecture], "model_type": model_type} | _CHANGES.get(model_type, {})
    with tempfile.TemporaryDirectory() as folder:
        try:
            hf = transformers.AutoConfig.for_model(**raw)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind.from_config(hf).parameters())
            if size > MAX_PARAMETERS:
                return LARGE
            _save(kind.from_config(hf, dtype=torch.float32), folder)
        except Exception:  # whatever a config's own checks raise: these sizes are not for it
            return LARGE
        try:
            rows = _generate(Path(folder))
        except ModelError as error:
            return str(error).partition(" is not supported: ")[2] or str(error)
        reference = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return RUNS if all(_is_greedy(reference, *row) for row in rows) else WRONG


def _save(model: Any, folder: str) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)


def _generate(folder: Path) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Prompts and their tokens."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (length,), generator=draw).tolist() for length in LENGTHS]
    params = SamplingParams(max_tokens=NUM_STEPS, temperature=0, ignore_eos=True)
    with LLM(folder, device="cpu", dtype="float32", depth=2, max_batch_tokens=16, max_model_len=80) as llm:
        return [(done.prompt_token_ids, done.token_ids) for done in llm.generate(prompts, params)]


@torch.inference_mode()
def _is_greedy(reference: Any, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each token is the likeliest after those before it, or as likely but for rounding."""
    logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((chosen >= logits.amax(1) - CLOSE).all())


def outcomes() -> dict[str, str]:
    """By architecture, of all that transformers lists."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    ours, found = {family.architecture for family in FAMILIES}, dict[str, str]()
    for model_type, entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        architecture = entry if isinstance(entry, str) else entry[0]
        if architecture not in ours and found.get(architecture, LARGE) == LARGE:
            found[architecture] = outcome(model_type, architecture)
    return found


def table(found: dict[str, str]) -> str:
    """Markdown, a row for each outcome."""
    reasons = sorted(set(found.values()), key=lambda reason: (reason != RUNS, reason == LARGE, reason))
    rows = [("on the general path", "architectures"), ("---", "---")]
    for reason in reasons:
        names = sorted(name for name, other in found.items() if other == reason)
        what = reason if reason in (RUNS, WRONG, LARGE) else f"refused: {reason}"
        rows.append((f"{what} ({len(names)})", ", ".join(f"`{name}`" for name in names)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page_with(page: str, text: str) -> str:
    """The page, with what stands between its marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page_with(path.read_text(), table(outcomes())))
