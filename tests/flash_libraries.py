"""Stand-ins for attention libraries: their documented calls in plain torch, strict about what the real ones refuse."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: torch.Tensor, begin: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All queries [n, heads, dim] over one row's pages; and which of them are its last tokens, the causal ones."""
    group = q.shape[1] // k.shape[2]
    keys, values = (pages.flatten(0, 1).repeat_interleave(group, dim=1).float() for pages in (k, v))
    token = torch.arange(len(q), device=q.device)
    place, last = torch.arange(len(keys), device=q.device), length - end + token
    seen = (place[None, :] <= last[:, None]) & (place < length)
    values = values.masked_fill((place >= length)[:, None, None], 0)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values), (begin <= token) & (token < end)


def _check(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> None:
    assert k.shape == v.shape
    assert k.dim() == 4
    assert k.dtype == v.dtype == q.dtype
    assert k.stride(-1) == v.stride(-1) == q.stride(-1) == 1
    assert table.dtype == lengths.dtype == torch.int32
    assert table.stride(-1) == 1
    assert lengths.is_contiguous()
    assert table.shape[0] == lengths.shape[0]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float,
    causal: bool,
    num_splits: int = 0,
) -> torch.Tensor:
    """FlashAttention-3: q [batch, seqlen, heads, dim], or [total, heads, dim] with cu_seqlens_q. Never waits."""
    assert causal
    _check(k_cache, v_cache, q, page_table, cache_seqlens)
    flat, begins = q, cu_seqlens_q
    if begins is None:
        flat = q.flatten(0, 1)
        begins = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    else:
        assert begins.dtype == torch.int32
        assert begins.is_contiguous()
        assert max_seqlen_q is not None
    assert len(begins) == len(page_table) + 1
    if not q.is_cuda:
        assert int(begins[-1]) == len(flat)
        assert int(begins.diff().max()) <= (max_seqlen_q or q.shape[1])
    out = torch.full_like(flat, torch.nan)
    for table, length, begin, end in zip(page_table, cache_seqlens, begins[:-1], begins[1:], strict=True):
        found, mine = _attend(flat * softmax_scale, k_cache[table.long()], v_cache[table.long()], length, begin, end)
        out = torch.where(mine[:, None, None], found.to(out.dtype), out)
    return out.view_as(q)


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    *,
    kv_layout: str = "HND",
) -> torch.Tensor:
    """FlashInfer: query [num_tokens, heads, dim], one token a request."""
    assert kv_layout == "NHD"
    assert block_tables.is_contiguous()  # the kernel is told no stride
    assert max_seq_len == block_tables.shape[1] * kv_cache[0].shape[1]
    assert workspace_buffer.dtype == torch.uint8
    _check(*kv_cache, query, block_tables, seq_lens)
    return flash_attn_with_kvcache(
        query.unsqueeze(1),
        *kv_cache,
        cache_seqlens=seq_lens,
        page_table=block_tables,
        softmax_scale=bmm1_scale,
        causal=True,
    ).squeeze(1)


def install(patch: pytest.MonkeyPatch, **calls: dict[str, Any]) -> None:
    """Put modules in place: name (dots as __) -> what they hold. What is not named is not installed."""
    for name in ("flash_attn_interface", "flashinfer", "flashinfer.decode"):
        patch.setitem(sys.modules, name, None)
    for name, members in calls.items():
        module = ModuleType(name.replace("__", "."))
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__dict__.update(members)
        patch.setitem(sys.modules, module.__name__, module)


FLASH3 = {"flash_attn_interface": {"flash_attn_with_kvcache": flash_attn_with_kvcache}}
FLASHINFER = {
    "flashinfer": {},
    "flashinfer__decode": {"trtllm_batch_decode_with_kv_cache": trtllm_batch_decode_with_kv_cache},
}
