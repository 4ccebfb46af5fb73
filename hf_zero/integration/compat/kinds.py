"""DeepSpeed's names around zero.Init, of experts, and of operator builders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from hf_zero.api.gathered_parameters import ParameterOffload
from hf_zero.integration.names import refusal

DeepSpeedZeRoOffload = ParameterOffload


def is_zero_param(parameter: Any) -> bool:
    """Whether stage 3 has sharded this parameter."""
    return hasattr(parameter, "ds_id")


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer works at stage 1 and above, on shards or on gathered tensors."""
    from hf_zero.config import ConfigError
    from hf_zero.optim.registry import refuse_unfit
    from hf_zero.optim.traits import traits_of

    try:
        refuse_unfit(optimizer, traits_of(optimizer), 1)
    except ConfigError:
        return False
    return True


# Callers of zero.Init replace these temporarily; hf_zero's Init does not wrap constructors.
torch_arange = torch.arange
RELEASED_SHAPE = [0]
"""The shape of a released parameter's `data` in DeepSpeed. Here `shape` is always that of the whole parameter."""


def unchanged_constructor(function: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Callable[..., Any]:
    """Return the constructor unchanged, because constructors keep their dtype and device inside zero.Init."""
    return function


# `deepspeed.moe.utils`: parameters marked as experts (`allreduce = False`), moved into separate groups.


def is_moe_param(param: Any) -> bool:
    """Whether the parameter is marked as an expert."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether there are DeepSpeed's expert layers, how many experts): hf_zero has no such layers."""
    return False, 0


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """(shared parameters, expert parameters)."""
    shared: list[Any] = []
    experts: list[Any] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_grads_into_shared_and_expert_params(group: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """(gradients of shared parameters, gradients of experts), if there are gradients."""
    shared, experts = split_params_into_shared_and_expert_params(param for param in group if param.grad is not None)
    return [param.grad for param in shared], [param.grad for param in experts]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: int | float = 178956971
) -> list[dict[str, Any]]:
    """The groups, followed by groups for the experts of each (`moe` true, at most `max_group_size` elements)."""
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
    """`model_parameters` with experts in separate groups; unchanged if there are none."""
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


# DeepSpeed's builders of compiled operators. hf_zero has no compiled operators, and mostly does not need them.


# Class -> the operator's name in `__compatible_ops__` and `installed_ops`.
OPERATORS = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "NotImplementedBuilder": "deepspeed_not_implemented",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}
NO_OPERATORS = dict.fromkeys(sorted(OPERATORS.values()), False)
"""`deepspeed.git_version_info.installed_ops`: the compiled operators."""
_BY_ANOTHER_WAY = {
    *("async_io", "pin_memory", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"),
    *("quantizer", "random_ltd"),
}
COMPATIBLE = {name: name in _BY_ANOTHER_WAY for name in NO_OPERATORS}
"""`deepspeed.ops.__compatible_ops__`: programs and tests skip features whose operator is false here, so it is true if
the feature works without an operator, although a builder has nothing to load."""


class OpBuilder:
    """A builder that builds nothing, because optimizers and offload run on PyTorch and Triton."""

    NAME = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operator itself can be loaded: never. `__compatible_ops__` lists what works without it."""
        return False

    def load(self, verbose: bool = False) -> NoReturn:
        raise NotImplementedError(refusal(f"ops.op_builder.{type(self).__name__}"))

    jit_load = builder = load


def builder_named(name: str) -> type[OpBuilder]:
    """The builder class of this name; for an unknown name one without operator, as in DeepSpeed."""
    return _builders.get(name, _builders["NotImplementedBuilder"])


_builders: dict[str, type[OpBuilder]] = {
    name: type(name, (OpBuilder,), {"NAME": operator}) for name, operator in OPERATORS.items()
}
ALL_OPS = {kind.NAME: kind() for kind in _builders.values()}
"""Builder objects by name."""

globals().update(_builders)  # each is imported by its name
