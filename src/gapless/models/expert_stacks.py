"""The weights of all experts of a layer as GPU kernels read them: gate and up, and down, each as one stack.

Makes them one expert at a time: all of a layer, twice, would be gigabytes. Numbers of 4 bits stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gapless.kernels.expert_products import ExpertStack, pack_narrow
from gapless.models.layers import ExpertWeight, ExpertWeights
from gapless.models.mxfp4_scheme import Mxfp4Scheme
from gapless.models.spec import MlpSpec
from gapless.models.weight import Weight, stacked


def is_narrow(weights: ExpertWeights) -> bool:
    """Whether they are numbers of 4 bits."""
    return all(
        weight.scheme.name == Mxfp4Scheme.name for expert in weights.experts for weight in (expert.gate.up, expert.down)
    )


def stack_experts(spec: MlpSpec, weights: ExpertWeights, fold: Callable[[Tensor], Tensor]) -> ExpertStack:
    """fold: what is done to gate and up, unless they are numbers of 4 bits."""
    assert spec.experts is not None
    make = _narrow_stacks if is_narrow(weights) else _whole_stacks
    stack = ExpertStack(
        *make(weights, fold),
        both_bias=None,
        down_bias=None,
        router_bias=weights.router_bias,
        num_chosen=spec.experts.num_chosen,
        is_normalized=spec.experts.is_normalized,
        is_clamped=spec.activation == "clamped",
        num_shared=spec.num_shared,
    )
    if not spec.bias:
        return stack
    both_bias, down_bias = zip(*(_biases(expert) for expert in weights.experts), strict=True)
    return replace(stack, both_bias=torch.stack(both_bias), down_bias=torch.stack(down_bias))


def _biases(expert: ExpertWeight) -> tuple[Tensor, Tensor]:
    gate = expert.gate
    assert gate.gate_bias is not None
    assert gate.up_bias is not None
    assert expert.down_bias is not None
    return torch.cat((gate.gate_bias, gate.up_bias)), expert.down_bias


def _whole_stacks(weights: ExpertWeights, fold: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    first = weights.experts[0].down.dense()
    count, (hidden, size) = len(weights.experts), first.shape
    both, down = first.new_empty(count, 2 * size, hidden), first.new_empty(count, hidden, size)
    for number, expert in enumerate(weights.experts):
        assert expert.gate.gate is not None
        both[number, :size], both[number, size:] = fold(expert.gate.gate.dense()), fold(expert.gate.up.dense())
        down[number] = expert.down.dense()
    return both, down


def _narrow_stacks(weights: ExpertWeights, fold: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes of gate and up and of down, then the scales of both."""
    found = []
    for expert in weights.experts:
        assert expert.gate.gate is not None
        found.append((*_packed(stacked((expert.gate.gate, expert.gate.up))), *_packed(expert.down)))
    both, both_scales, down, down_scales = (torch.stack(parts) for parts in zip(*found, strict=True))
    return both, down, both_scales, down_scales


def _packed(weight: Weight) -> tuple[Tensor, Tensor]:
    assert weight.scales is not None
    return pack_narrow(weight.data, weight.scales)
