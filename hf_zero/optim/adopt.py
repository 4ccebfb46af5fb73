"""Makes an optimizer hold masters instead of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.offload.sub_group import SubGroup


def adopt_masters(
    optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], groups: Sequence[dict[str, Any]]
) -> None:
    """Make `optimizer` hold the tensors of `sub_groups`; its groups stay the same objects.

    Raises:
        RuntimeError: when the optimizer has been used.
    """
    masters: list[list[nn.Parameter]] = [[] for _ in groups]
    for sub_group in sub_groups:
        masters[sub_group.group].extend(tensor.parameter for tensor in sub_group.tensors)
    adopt(optimizer, masters, groups)


def adopt(
    optimizer: torch.optim.Optimizer, masters: Sequence[Sequence[nn.Parameter]], groups: Sequence[dict[str, Any]]
) -> None:
    """Make `optimizer` hold `masters`, listed by group."""
    made_state_at_init = _refuse_used(optimizer)
    optimizer.state.clear()
    for group, mine in zip(groups, masters, strict=True):
        group["params"] = list(mine)
    optimizer.param_groups[:] = groups
    if made_state_at_init:
        # Adagrad and its like fill `state` in the constructor: let it do so again, for the masters.
        fresh = type(optimizer)([dict(group) for group in groups], **optimizer.defaults)
        optimizer.state.update(fresh.state)


def _refuse_used(optimizer: torch.optim.Optimizer) -> bool:
    """Raise when the optimizer has stepped; otherwise say whether it holds state all the same."""
    states = [state for state in optimizer.state.values() if state]
    if any(float(state.get("step", 1)) > 0 for state in states):
        raise RuntimeError(
            f"{type(optimizer).__name__} has already stepped, and its state describes the model's own parameters. "
            "Give initialize() an optimizer that has not been used yet."
        )
    return bool(states)
