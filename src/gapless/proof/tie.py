"""Whether two different tokens are a matter of rounding.

Float32 sums depend on their order, and the order on the shape of the batch. Where two tokens are equally likely to
within that, or a random draw falls on the border between two, either is right. The model says so itself: its logits,
computed anew from the whole history, are shaken a little, and if the sampler then picks the other token too, it is a
tie. Knows no schedule and no pipeline.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from gapless.attention.base import Rotation
from gapless.core.limits import Limits
from gapless.core.params import MAX_STOP_IDS
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.proof.schedule import Ask
from gapless.proof.stage import ModelStage
from gapless.runner.row_store import RowStore
from gapless.runner.sampler import sample

SHAKE = 2e-5  # of the logits' spread: some times what the order of sums changes
NUM_TRIALS = 64


@torch.inference_mode()
def is_tie(stage: ModelStage, ask: Ask, known: tuple[int, ...], other: int) -> bool:
    """Whether the sampler may as well pick `other` after these known tokens."""
    history = (*ask.prompt, *known)
    logits = next_logits(stage, history)
    noise = torch.randn((NUM_TRIALS, len(logits)), generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    shaken = logits + noise * (logits.std() * SHAKE)
    rows = torch.zeros(NUM_TRIALS, dtype=torch.int64)
    places = torch.full((NUM_TRIALS,), len(history))
    params = ask.params
    tokens = sample(
        shaken, rows, places, _row(ask), random=params.temperature > 0, filtered=True, min_tokens=params.min_tokens > 0
    )
    return bool((tokens == other).any())


def next_logits(stage: ModelStage, history: tuple[int, ...]) -> torch.Tensor:
    """Logits after a history, by dense attention: without blocks, batches or streams."""
    config = stage.config
    sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)

    def attend(layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        num_rotated = sum(sizes[:2])
        heads = torch.cat((rotation.apply(heads[:, :num_rotated]), heads[:, num_rotated:]), dim=1)
        q, k, v = (part.transpose(0, 1) for part in heads.split_with_sizes(sizes, dim=1))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)

    model = stage.dense_model()
    hidden = model.forward(torch.tensor(history), torch.arange(len(history)), attend)
    return model.logits(hidden[-1:])[0].float()


def _row(ask: Ask) -> RowStore:
    """One row that holds the request's sampling state."""
    limits = Limits(num_rows=1, num_blocks=1, block_size=1, max_batch_tokens=1, max_model_len=1)
    store = RowStore(CpuDevice(driver=InlineDriver()), limits)
    params = ask.params
    store.floats[0] = torch.tensor([params.temperature, params.top_p, params.min_p])
    store.top_k[0] = params.top_k
    store.seed[0] = ask.seed
    store.min_total[0] = len(ask.prompt) + params.min_tokens + 1
    store.stop_ids[0] = torch.tensor([*ask.stop_ids, *[-1] * (MAX_STOP_IDS - len(ask.stop_ids))])
    return store
