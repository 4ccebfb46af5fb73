"""`deepspeed.moe.utils`: parameters marked as experts (`allreduce = False`), sorted into groups of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def is_moe_param(param: Any) -> bool:
    """Whether its layer says that other ranks hold other experts."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether there are DeepSpeed's expert layers, how many experts): hf_zero has no such layers."""
    return False, 0


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """(those of all ranks, those of experts)."""
    shared: list[Any] = []
    experts: list[Any] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_grads_into_shared_and_expert_params(group: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """(gradients of those of all ranks, gradients of experts), where there are gradients."""
    shared, experts = split_params_into_shared_and_expert_params(param for param in group if param.grad is not None)
    return [param.grad for param in shared], [param.grad for param in experts]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: int | float = 178956971
) -> list[dict[str, Any]]:
    """The groups, followed by one for the experts of each (`moe` true, at most `max_group_size` elements in each)."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    split: list[dict[str, Any]] = []
    for group in groups:
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        by_name: dict[str, list[Any]] = {}
        for param in experts:
            by_name.setdefault(getattr(param, "group_name", "experts"), []).append(param)
        options = {key: value for key, value in group.items() if key not in ("params", "name")}
        for name, members in by_name.items():
            for part in _of_size(members, max_group_size):
                split.append({**options, "name": name, "moe": True, "params": part})
    return [*groups, *split]


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> list[Any]:
    """`model_parameters` with the experts in groups of their own; unchanged where there are none."""
    entries = list(model_parameters)
    if not entries or not isinstance(entries[0], dict):
        entries = [{"params": entries, "name": "parameters"}]
    if not any(is_moe_param(param) for group in entries for param in group["params"]):
        return list(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer(entries)


def _of_size(members: Sequence[Any], most: int | float) -> list[list[Any]]:
    parts: list[list[Any]] = [[]]
    size = 0
    for param in members:
        if parts[-1] and size + param.numel() > most:
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += param.numel()
    return parts
