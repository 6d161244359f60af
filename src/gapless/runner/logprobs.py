"""How likely tokens were: log-softmax of the model's own logits, in float32, before temperature and filters.

Pure functions on the device, without a wait. Knows no rows and no requests. What a score's numbers are, `score_width`
in core/plan.py says.
"""

from __future__ import annotations

import torch


def score(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Scores [n, score_width] int32 of tokens [n] int64 under logits [n, vocab]."""
    logprobs = logits.float().log_softmax(dim=1)  # a block a row on a GPU; logsumexp may split a lone row
    own = logits.gather(1, tokens[:, None])
    rank = (logits > own).sum(dim=1, keepdim=True) + 1
    top = logits.topk(num_top, dim=1).indices
    chosen = logprobs.gather(1, torch.cat((tokens[:, None], top), dim=1)).view(torch.int32)
    return torch.cat((chosen[:, :1], rank.int(), top.int(), chosen[:, 1:]), dim=1)
