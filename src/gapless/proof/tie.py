"""Whether rounding explains two different tokens.

Float32 sums depend on their order, and the order on the shape of the batch. If two tokens are equally likely within
that error, or a random draw falls on the border between two, either is right. The model itself decides: its logits are
computed again from the whole history and perturbed a little. If the sampler then also picks the second token, it is a
tie. Knows no schedule and no pipeline.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from gapless.attention.base import Rotation
from gapless.core.limits import Limits
from gapless.core.request import Request, RowTable, int_array
from gapless.device.cpu import CpuDevice, InlineDriver
from gapless.guides.masks import fill_mask
from gapless.proof.schedule import Ask
from gapless.proof.stage import ModelStage
from gapless.runner.processors import SampledRows
from gapless.runner.row_store import RowState, RowStore
from gapless.runner.sampler import sample

SHAKE = 2e-5  # of the logits' spread: some times what the order of sums changes
NUM_TRIALS = 64


@torch.inference_mode()
def is_tie(stage: ModelStage, ask: Ask, known: tuple[int, ...], other: int) -> bool:
    """Whether the sampler could equally pick `other` after these known tokens."""
    history = (*ask.prompt, *known)
    logits = next_logits(stage, history)
    noise = torch.randn((NUM_TRIALS, len(logits)), generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    shaken = logits + noise * (logits.std() * SHAKE)
    rows = torch.zeros(NUM_TRIALS, dtype=torch.int64)
    places = torch.full((NUM_TRIALS,), len(history))
    guide = ask.guide(len(logits))
    limit = len(history) + 1
    request = Request(ask.id, int_array(ask.prompt), ask.params, ask.seed, ask.stop_ids, limit, guide=guide)
    request.tokens = int_array(history)
    table = RowTable(1, limit, block_size=1)
    table.seat(request)
    needs = int(table.needs[0])
    state = _row_state(table, len(logits))
    if guide is not None:
        guide.advance(int_array(known))
        fill_mask(guide, state.masks[0].numpy())
    sampled = SampledRows(rows, places, state)
    tokens = sample(shaken, sampled, needs)
    return bool((tokens == other).any())


def _row_state(table: RowTable, vocab_size: int) -> RowState:
    """The state of the one row of a table, as a device has it."""
    limits = Limits(num_rows=1, num_blocks=1, block_size=1, max_batch_tokens=1, max_model_len=1)
    store = RowStore(CpuDevice(driver=InlineDriver()), limits, vocab_size)
    baggage = table.baggage([0])
    store.seats[0] = torch.from_numpy(table.seat_words([0])[0])
    store.take_in(*(torch.from_numpy(part) for part in (baggage.count_rows, baggage.counts, baggage.biases)))
    return store.state


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
