"""DeepSpeed's optimizers: `ZeroOptimizer` with all other names of theirs, in DeepSpeed's classes by stage and dtype.

Views have one vector per piece that this rank updates (a bucket or a sub-group of it); DeepSpeed has one per group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.api import parameter_access
from hf_zero.comm.process_group import get_world_group
from hf_zero.integration.engine.instead import OPTIMIZER, explained
from hf_zero.integration.engine.view import View
from hf_zero.step.optimizer import ZeroOptimizer
from hf_zero.step.sharded_step import ShardedStep


class DeepSpeedOptimizer(ZeroOptimizer):
    """Every optimizer that `deepspeed.initialize` returns; this class itself at stage 0 with fp32 weights."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        """
        Raises:
            NotImplementedError: without the parts of an engine, as if it were DeepSpeed's class.
        """
        if not parts or not isinstance(parts[0], ShardedStep):
            raise NotImplementedError(
                f"{type(self).__name__}(...): deepspeed.initialize(model=, optimizer=, config=) makes the optimizer of "
                "an engine; this class is there to ask isinstance about"
            )
        super().__init__(*parts, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise explained(error, name, "optimizer", OPTIMIZER) from None

    @property
    def _shown_class(self) -> type:
        is_whole = "sharding" in self.__dict__ and self.sharding.stage == 0
        return type(self.optimizer) if is_whole else type(self)

    # isinstance() also checks __class__. At stage 0 it reports the class that the config or the caller named, because
    # programs ask for that, as they can with DeepSpeed: nothing is sharded, and its engine then has their object.
    __class__ = _shown_class

    # Rates and scales

    def get_lr(self) -> float | None:
        """Learning rate of the first param group; None if the optimizer computes it."""
        rate = self.param_groups[0]["lr"]
        return None if rate is None else float(rate)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every param group. A schedule overwrites it in the next update."""
        for group in self.param_groups:
            group["lr"] = lr

    def override_loss_scale(self, loss_scale: float) -> None:
        """Set the loss scale of the next backward; a dynamic scale continues from it."""
        self.loss_scale = loss_scale

    @View
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    @View
    def custom_loss_scaler(self) -> bool:
        return False

    @View
    def external_loss_scale(self) -> None:
        return None

    @View
    def clip_grad(self) -> float:
        return self.rules.gradients.clip_norm

    @View
    def _global_grad_norm(self) -> float | None:
        return self.grad_norm

    # Accumulation

    @View
    def gradient_accumulation_steps(self) -> int:
        steps: int = self.engine.gradient_accumulation_steps()
        return steps

    @View
    def is_gradient_accumulation_boundary(self) -> bool:
        return bool(self.engine.is_gradient_accumulation_boundary())

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary)

    # Views of parameters, masters, weights and gradients

    def _parameters_by_group(self) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = [[] for _ in self.param_groups]
        for parameter, spec in zip(self.store.parameters, self.store.layout.specs, strict=True):
            groups[spec.group].append(parameter)
        return groups

    def _masters(self) -> list[Tensor]:
        self.updater.stager.finish_update()
        return [shard.master for shard in self.sub_groups]

    def _weights(self) -> list[Tensor]:
        self.updater.stager.finish_update()
        return [shard.master if shard.lp_param is None else shard.lp_param for shard in self.sub_groups]

    @View
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The model's own parameters, by param group."""
        return self._parameters_by_group()

    bf16_groups = fp16_groups = trainable_param_groups = round_robin_bit16_groups = bit16_groups

    def get_bit16_param_group(self, group_no: int) -> list[nn.Parameter]:
        return self._parameters_by_group()[group_no]

    @View
    def fp32_groups_flat(self) -> list[Tensor]:
        """This rank's fp32 masters, 1-D; offloaded masters show NaN."""
        return self._masters()

    fp32_partitioned_groups_flat = single_partition_of_fp32_groups = fp32_groups_flat_partition = fp32_groups_flat

    @View
    def fp16_groups_flat(self) -> list[Tensor]:
        """This rank's part of the model's weights, 1-D; the same tensors as the masters if nothing is rounded."""
        return self._weights()

    fp16_partitioned_groups_flat = bf16_partitioned_groups = fp16_groups_flat

    @View
    def fp16_partitioned_groups_flat_numel(self) -> list[int]:
        return [weight.numel() for weight in self._weights()]

    @View
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """Param group -> this rank's reduced gradients (1-D, sums over ranks), where backward has made some."""
        reduced = self.fragments.gradients()
        gradients: dict[int, list[Tensor]] = {index: [] for index in range(len(self.param_groups))}
        for shard in self.sub_groups:
            with reduced(shard, False) as gradient:
                if gradient is not None:
                    gradients[shard.group].append(gradient)
        return gradients

    @View
    def param_names(self) -> dict[nn.Parameter, str]:
        names: dict[nn.Parameter, str] = self.engine.param_names
        return names

    @View
    def module(self) -> nn.Module:
        module: nn.Module = self.engine.module
        return module

    @View
    def device(self) -> torch.device:
        device: torch.device = self.engine.device
        return device

    @View
    def dtype(self) -> torch.dtype:
        return self.store.parameters[0].dtype

    # Access to one parameter. All of these are collective, like the functions they call

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> Tensor | None:
        """The whole fp32 weight, or optimizer state."""
        if optim_state_key is None:
            return parameter_access.safe_get_full_fp32_param(param)
        return parameter_access.safe_get_full_optimizer_state(param, optim_state_key)

    def set_full_hp_param(self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            parameter_access.safe_set_full_fp32_param(param, value)
        else:
            parameter_access.safe_set_full_optimizer_state(param, value, optim_state_key)

    def get_local_fp32_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> Tensor | None:
        """This rank's chunk of the fp32 weight, or optimizer state; stage 3 only."""
        if optim_state_key is None:
            return parameter_access.safe_get_local_fp32_param(param)
        return parameter_access.safe_get_local_optimizer_state(param, optim_state_key)

    def set_local_hp_param(self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            parameter_access.safe_set_local_fp32_param(param, value)
        else:
            parameter_access.safe_set_local_optimizer_state(param, value, optim_state_key)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        return parameter_access.safe_get_full_grad(param)

    def set_fp32_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        parameter_access.safe_set_full_grad(param, value)

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        return parameter_access.safe_get_local_grad(param)

    def set_local_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        parameter_access.safe_set_local_grad(param, value)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[Tensor, nn.Parameter], Tensor], param_list: Iterable[nn.Parameter]
    ) -> None:
        parameter_access.safe_update_full_grad_vectorized(list(param_list), update_func)

    # Places

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """`DeepSpeedEngine.offload_states`."""
        self.engine.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """`DeepSpeedEngine.reload_states`."""
        self.engine.reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        self.engine.empty_partition_cache()

    def refresh_fp32_params(self) -> None:
        """Update masters from edited weights, as a step does anyway."""
        self.engine.gradients.wait_for_outcome()
        self.store.sync_masters()

    @View
    def cpu_offload(self) -> bool:
        return self.engine.settings.resolved.zero.offload_optimizer is not None

    @View
    def offload_optimizer(self) -> bool:
        return self.engine.settings.resolved.zero.offload_optimizer is not None

    # How states are sharded and gradients reduced

    @View
    def zero_stage_string(self) -> str:
        return f"ZeRO-{self.sharding.stage}"

    @View
    def partition_count(self) -> list[int]:
        return [self.sharding.world] * len(self.param_groups)

    @View
    def partition_gradients(self) -> bool:
        return self.sharding.stage >= 2

    @View
    def reduce_scatter(self) -> bool:
        return self.sharding.stage > 0

    @View
    def contiguous_gradients(self) -> bool:
        return True

    @View
    def elastic_checkpoint(self) -> bool:
        return False

    @View
    def has_moe_layers(self) -> bool:
        return False

    @View
    def gradient_predivide_factor(self) -> float:
        return self.rules.gradients.predivide

    @View
    def postscale_gradients(self) -> bool:
        return self.rules.gradients.predivide == 1.0

    @View
    def dp_process_group(self) -> Any:
        return get_world_group()

    @View
    def real_dp_process_group(self) -> list[Any]:
        return [get_world_group()] * len(self.param_groups)

    @View
    def mpu(self) -> Any:
        return self.engine.mpu

    @View
    def model_parallel_group(self) -> None:
        return None

    @View
    def model_parallel_rank(self) -> int:
        return 0

    @View
    def model_parallel_world_size(self) -> int:
        return 1

    @View
    def sequence_parallel_size(self) -> int:
        size: int = self.engine.groups.sample.size
        return size


class ZeROOptimizer(DeepSpeedOptimizer):
    """Optimizers of stages 1 to 3, and of stage 0 with bf16 weights."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Optimizers of stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Optimizers of stage 3."""


class BF16_Optimizer(ZeROOptimizer):
    """Optimizers of stage 0 with bf16 weights."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """Optimizers of stage 0 with fp16 weights."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """DeepSpeed's optimizer for LAMB at stage 0; never the class of hf_zero's optimizer."""


_BY_DTYPE: dict[torch.dtype, type[DeepSpeedOptimizer]] = {
    torch.bfloat16: BF16_Optimizer,
    torch.float16: FP16_Optimizer,
}
_BY_STAGE: dict[int, type[DeepSpeedOptimizer]] = {
    1: DeepSpeedZeroOptimizer,
    2: DeepSpeedZeroOptimizer,
    3: DeepSpeedZeroOptimizer_Stage3,
}


def optimizer_class(stage: int, dtype: torch.dtype) -> type[DeepSpeedOptimizer]:
    """The class in which DeepSpeed has optimizers of this stage, for weights of `dtype`."""
    return _BY_STAGE.get(stage) or _BY_DTYPE.get(dtype, DeepSpeedOptimizer)
