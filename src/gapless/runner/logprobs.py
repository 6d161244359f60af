"""How likely tokens were: log-softmax of the model's own logits, in float32, before temperature and filters.

Pure functions on the device, without a wait. Knows no rows and no requests. What a score's numbers are, `score_width`
in core/plan.py says.
"""

from __future__ import annotations

import torch

from gapless.core.params import MAX_LOGPROBS


def score(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Scores [n, score_width] int32 of tokens [n] int64 under logits [n, vocab]."""
    logprobs = logits.float().log_softmax(dim=1)  # a block a row on a GPU; logsumexp may split a lone row
    own = logits.gather(1, tokens[:, None])
    rank = (logits > own).sum(dim=1, keepdim=True) + 1
    top = logits.topk(num_top, dim=1).indices
    chosen = logprobs.gather(1, torch.cat((tokens[:, None], top), dim=1)).view(torch.int32)
    return torch.cat((chosen[:, :1], rank.int(), top.int(), chosen[:, 1:]), dim=1)


def score_samples(
    logits: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, num_top: torch.Tensor, out: torch.Tensor
) -> None:
    """The same for steps whose sizes are data: row i's score goes to the place places[i] in `out`, none for -1."""
    most = min(MAX_LOGPROBS, logits.shape[1])
    found = score(logits, tokens.clamp(min=0), most)
    column = torch.arange(2 + 2 * most, device=logits.device)
    is_id, is_logprob = (column >= 2) & (column < 2 + most), column >= 2 + most
    wanted = ~is_id & ~is_logprob | is_id & (column < 2 + num_top) | is_logprob & (column < 2 + most + num_top)
    at = places.long()[:, None] * (2 + 2 * num_top) + torch.where(is_logprob, column - most + num_top, column)
    keep = wanted[None, :] & (places >= 0)[:, None]
    out[at[keep]] = found[keep]
