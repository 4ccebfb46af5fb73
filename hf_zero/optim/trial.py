"""A trial of an unknown optimizer on small tensors: does its update of an element depend on more than that element?

Nothing about a class says whether it may see flat shards. A norm or a projection of each tensor (GaLore) gives other
results there, and a sum over all tensors (Prodigy) or a count of them (GrokAdamW) on any part of the model.

    in its own process     [first], [second]                       two matrices
    on flat shards         [end of first, all of second]           a vector, as a rank has it
    on whole tensors       [second]                                a matrix, as a rank has it
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.optim.traits import remade

_SHAPES = ((6, 8), (4, 8))
_NUM_CUT = 29  # elements of the first matrix that another rank has
_NUM_STEPS = 4  # some rules act when gradients grow
_RATE = 1e-2  # a warm-up has often set the rate of the first step to 0
_TOLERANCE = 1e-4  # of the largest update; rounding is far below, and norms change updates by percents


class Needs(Enum):
    """What an optimizer must see to compute the update of an element as in one process."""

    ELEMENT = "the element"
    TENSOR = "the whole tensor"
    MODEL = "all tensors"
    UNKNOWN = "unknown"


def needs_of(optimizer: torch.optim.Optimizer) -> Needs:
    """Find out what `optimizer` needs, with new objects of its class; UNKNOWN if these cannot be made, or differ from
    each other. No collective: ranks with the same packages get the same result."""
    with torch.random.fork_rng([]):
        found = [_needs(optimizer, group) for group in optimizer.param_groups if group["params"]]
    return next((each for each in (Needs.MODEL, Needs.TENSOR, Needs.ELEMENT) if each in found), Needs.UNKNOWN)


def warning_about(optimizer: torch.optim.Optimizer) -> str | None:
    """The warning if `optimizer` computes something else on flat shards than in one process."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        return None  # those that need more than elements are known by name
    needs = needs_of(optimizer)
    if needs is Needs.TENSOR:
        why, fix = "the whole tensor", '"hf_zero": {"optimizer_sees": "whole_tensors"}'
    elif needs is Needs.MODEL:
        why, fix = "other tensors, which another rank may have", "zero_optimization.stage 0"
    else:
        return None
    return (
        f"{kind.__module__}.{kind.__name__}: its update of an element depends on {why} (tried with small tensors), and "
        f"at this stage it sees flat shards, vectors with parts of several tensors. {fix} computes what one process "
        'does; "optimizer_sees": "flat_shards" keeps these results, without this warning'
    )


def _needs(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Needs:
    device = group["params"][0].device
    if device.type == "cpu":
        return _needs_on(device, optimizer, group)
    with torch.random.fork_rng([device], device_type=device.type):
        return _needs_on(device, optimizer, group)


def _needs_on(device: torch.device, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Needs:
    first, second = (_values(torch.Size(shape), seed, device) for seed, shape in enumerate(_SHAPES))
    try:
        expected = _updates(optimizer, group, [first, second])
        if not _are_same(_updates(optimizer, group, [first, second]), expected):
            return Needs.UNKNOWN  # it draws random numbers
    except Exception:  # its constructor has other arguments, or its step needs more than gradients
        return Needs.UNKNOWN
    shard = torch.cat([first.flatten()[_NUM_CUT:], second.flatten()])
    as_shard = torch.cat([expected[0].flatten()[_NUM_CUT:], expected[1].flatten()])
    for needs, tensor, update in ((Needs.ELEMENT, shard, as_shard), (Needs.TENSOR, second, expected[1])):
        try:
            if _are_same(_updates(optimizer, group, [tensor]), [update]):
                return needs
        except Exception:  # a vector has no singular values
            continue
    return Needs.MODEL


def _values(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Values that differ between the start and the end of a tensor, as those of two ranks would."""
    return torch.arange(1, shape.numel() + 1, device=device, dtype=torch.float32).mul(0.07).add(seed).sin().view(shape)


def _updates(optimizer: torch.optim.Optimizer, group: dict[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What steps of a new optimizer with the options of `group` change."""
    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
    options = copy.deepcopy(options) | ({"lr": _RATE} if "lr" in options else {})
    with torch.compiler.set_stance("force_eager"):  # compiling would take longer than the trial
        trial = remade(optimizer, [{**options, "params": parameters}])
        getattr(trial, "train", nullcontext)()
        for step in range(1, _NUM_STEPS + 1):
            for parameter, start in zip(parameters, tensors, strict=True):
                # That of an element depends on its own value only; some are large, and grow faster than others.
                parameter.grad = start * step ** (2 + 2 * start) * torch.where(start > 0.9, 8.0, 1.0)
            trial.step()
    return [parameter.detach() - start for parameter, start in zip(parameters, tensors, strict=True)]


def _are_same(updates: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    scale = max(float(update.abs().max()) for update in expected)
    return all(
        bool(((update - other).abs() <= _TOLERANCE * scale).all())
        for update, other in zip(updates, expected, strict=True)
    )
