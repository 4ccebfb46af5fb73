"""DeepSpeed's additional optimizer names at every stage: views of its tensors, and shortcuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_zero.api import parameter_access
from hf_zero.comm.process_group import get_world_group
from hf_zero.instead import OPTIMIZER
from hf_zero.surface import Surface

# Views. One vector per piece that this rank updates (a bucket or a sub-group of it); DeepSpeed has one per group.


def _masters(optimizer: Any) -> list[Tensor]:
    """This rank's fp32 masters, 1-D; offloaded masters show NaN."""
    return [shard.master for shard in optimizer.sub_groups]


def _weights(optimizer: Any) -> list[Tensor]:
    """This rank's part of the model's weights, 1-D; the same tensors as the masters if nothing is rounded."""
    return [shard.master if shard.lp_param is None else shard.lp_param for shard in optimizer.sub_groups]


def _parameters_by_group(optimizer: Any) -> list[list[nn.Parameter]]:
    """The model's own parameters, by param group."""
    groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for parameter, spec in zip(optimizer.store.parameters, optimizer.store.layout.specs, strict=True):
        groups[spec.group].append(parameter)
    return groups


def _gradients(optimizer: Any) -> dict[int, list[Tensor]]:
    """Param group -> this rank's available reduced gradients (1-D, sums over ranks) between backward and step."""
    reduced = optimizer.fragments.gradients()
    gradients: dict[int, list[Tensor]] = {index: [] for index in range(len(optimizer.param_groups))}
    for shard in optimizer.sub_groups:
        with reduced(shard, False) as gradient:
            if gradient is not None:
                gradients[shard.group].append(gradient)
    return gradients


def _offloads(optimizer: Any) -> bool:
    return bool(not optimizer.updater.stager.always_at_hand)


# Rates and scales


def _get_lr(optimizer: Any) -> float | None:
    """Learning rate of the first param group; None if the optimizer computes it."""
    rate = optimizer.param_groups[0]["lr"]
    return None if rate is None else float(rate)


def _set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _override_loss_scale(optimizer: Any, loss_scale: float) -> None:
    """Set the loss scale of the next backward; a dynamic scale continues from it."""
    optimizer.loss_scale = loss_scale


# Access to one parameter. All of these are collective, like the functions they call


def _full_values(optimizer: Any, param: nn.Parameter, optim_state_key: str | None = None) -> Tensor | None:
    """The whole fp32 weight, or optimizer state."""
    if optim_state_key is None:
        return parameter_access.safe_get_full_fp32_param(param)
    return parameter_access.safe_get_full_optimizer_state(param, optim_state_key)


def _set_full_values(optimizer: Any, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
    if optim_state_key is None:
        parameter_access.safe_set_full_fp32_param(param, value)
    else:
        parameter_access.safe_set_full_optimizer_state(param, value, optim_state_key)


def _local_values(optimizer: Any, param: nn.Parameter, optim_state_key: str | None = None) -> Tensor | None:
    """This rank's chunk of the fp32 weight, or optimizer state; stage 3 only."""
    if optim_state_key is None:
        return parameter_access.safe_get_local_fp32_param(param)
    return parameter_access.safe_get_local_optimizer_state(param, optim_state_key)


def _set_local_values(optimizer: Any, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
    if optim_state_key is None:
        parameter_access.safe_set_local_fp32_param(param, value)
    else:
        parameter_access.safe_set_local_optimizer_state(param, value, optim_state_key)


# Offloading states


def _offload_states(
    optimizer: Any, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
) -> None:
    """engine.offload_states."""
    optimizer.engine.offload_states(include, device, pin_memory, non_blocking)


def _reload_states(optimizer: Any, non_blocking: bool = False) -> None:
    """engine.reload_states."""
    optimizer.engine.reload_states(non_blocking)


def _refresh_masters(optimizer: Any) -> None:
    """Update masters from edited weights, as a step does anyway."""
    optimizer.engine.gradients.settle()
    optimizer.store.sync_masters()


_BY_GROUP = "bit16_groups bf16_groups fp16_groups trainable_param_groups round_robin_bit16_groups"
VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_BY_GROUP.split(), _parameters_by_group),
    **dict.fromkeys("fp32_partitioned_groups_flat single_partition_of_fp32_groups".split(), _masters),
    **dict.fromkeys("fp32_groups_flat_partition fp32_groups_flat".split(), _masters),
    **dict.fromkeys("fp16_partitioned_groups_flat bf16_partitioned_groups fp16_groups_flat".split(), _weights),
    "_global_grad_norm": lambda optimizer: optimizer.grad_norm,
    "averaged_gradients": _gradients,
    "clip_grad": lambda optimizer: optimizer.rules.gradients.clip_norm,
    "contiguous_gradients": lambda optimizer: True,
    "cpu_offload": _offloads,
    "custom_loss_scaler": lambda optimizer: False,
    "device": lambda optimizer: optimizer.engine.device,
    "dp_process_group": lambda optimizer: get_world_group(),
    "dtype": lambda optimizer: optimizer.store.parameters[0].dtype,
    "dynamic_loss_scale": lambda optimizer: optimizer.loss_scaler.dynamic,
    "elastic_checkpoint": lambda optimizer: False,
    "external_loss_scale": lambda optimizer: None,
    "fp16_partitioned_groups_flat_numel": lambda optimizer: [weight.numel() for weight in _weights(optimizer)],
    "gradient_accumulation_steps": lambda optimizer: optimizer.engine.gradient_accumulation_steps(),
    "gradient_predivide_factor": lambda optimizer: optimizer.rules.gradients.predivide,
    "has_moe_layers": lambda optimizer: False,
    "is_gradient_accumulation_boundary": lambda optimizer: optimizer.engine.is_gradient_accumulation_boundary(),
    "model_parallel_group": lambda optimizer: None,
    "model_parallel_rank": lambda optimizer: 0,
    "model_parallel_world_size": lambda optimizer: 1,
    "module": lambda optimizer: optimizer.engine.module,
    "mpu": lambda optimizer: optimizer.engine.mpu,
    "offload_optimizer": _offloads,
    "param_names": lambda optimizer: optimizer.engine.param_names,
    "partition_count": lambda optimizer: [optimizer.sharding.world] * len(optimizer.param_groups),
    "partition_gradients": lambda optimizer: optimizer.sharding.stage >= 2,
    "postscale_gradients": lambda optimizer: optimizer.rules.gradients.predivide == 1.0,
    "real_dp_process_group": lambda optimizer: [get_world_group()] * len(optimizer.param_groups),
    "reduce_scatter": lambda optimizer: optimizer.sharding.stage > 0,
    "sequence_parallel_size": lambda optimizer: optimizer.engine.groups.sample.size,
    "zero_stage_string": lambda optimizer: f"ZeRO-{optimizer.sharding.stage}",
}
METHODS: dict[str, Callable[..., Any]] = {
    "empty_partition_cache": lambda optimizer: optimizer.engine.empty_partition_cache(),
    "get_bit16_param_group": lambda optimizer, group_no: _parameters_by_group(optimizer)[group_no],
    "get_fp32_grad_for_param": lambda optimizer, param: parameter_access.safe_get_full_grad(param),
    "get_full_hp_param": _full_values,
    "get_local_fp32_grad_for_param": lambda optimizer, param: parameter_access.safe_get_local_grad(param),
    "get_local_fp32_param": _local_values,
    "get_lr": _get_lr,
    "offload_states": _offload_states,
    "override_loss_scale": _override_loss_scale,
    "refresh_fp32_params": _refresh_masters,
    "reload_states": _reload_states,
    "set_fp32_grad_for_param": lambda optimizer, value, param: parameter_access.safe_set_full_grad(param, value),
    "set_full_hp_param": _set_full_values,
    "set_gradient_accumulation_boundary": lambda optimizer, is_boundary: (
        optimizer.engine.set_gradient_accumulation_boundary(is_boundary)
    ),
    "set_local_grad_for_param": lambda optimizer, value, param: parameter_access.safe_set_local_grad(param, value),
    "set_local_hp_param": _set_local_values,
    "set_lr": _set_lr,
    "update_fp32_grad_for_param_vectorized": lambda optimizer, update_func, param_list: (
        parameter_access.safe_update_full_grad_vectorized(list(param_list), update_func)
    ),
}

SURFACE = Surface("optimizer", VALUES, METHODS, OPTIMIZER)
