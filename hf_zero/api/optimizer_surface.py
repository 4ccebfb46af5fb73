"""DeepSpeed's further names on an engine's optimizer, whatever its stage: views of what it holds, and shortcuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from hf_zero.api import parameter_access
from hf_zero.comm.process_group import get_world_group
from hf_zero.surface import Surface

# Views. One vector per piece that this rank updates (a bucket or a sub-group of it); DeepSpeed has one per group.


def _masters(optimizer: Any) -> list[Tensor]:
    """This rank's fp32 masters, 1-D; what offload keeps elsewhere shows NaN in its place."""
    return [shard.master for shard in optimizer.sub_groups]


def _weights(optimizer: Any) -> list[Tensor]:
    """This rank's part of the model's weights, 1-D, beside the masters; they are one where nothing is rounded."""
    return [shard.master if shard.lp_param is None else shard.lp_param for shard in optimizer.sub_groups]


def _parameters_by_group(optimizer: Any) -> list[list[nn.Parameter]]:
    """The model's own parameters, by param group."""
    groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for parameter, spec in zip(optimizer.store.parameters, optimizer.store.layout.specs, strict=True):
        groups[spec.group].append(parameter)
    return groups


def _gradients(optimizer: Any) -> dict[int, list[Tensor]]:
    """Param group -> this rank's reduced gradients (1-D, sums over ranks), between backward and step, where at hand."""
    optimizer.fragments.finish_reductions()
    found: dict[int, list[Tensor]] = {index: [] for index in range(len(optimizer.param_groups))}
    for shard in optimizer.sub_groups:
        with ExitStack() as opened:
            gradient = opened.enter_context(optimizer.fragments.values.gradient(shard))
            if gradient is not None:
                found[shard.group].append(gradient)
    return found


def _offloads(optimizer: Any) -> bool:
    return bool(not optimizer.updater.stager.always_at_hand)


# Rates and scales


def _get_lr(optimizer: Any) -> float | None:
    """Of the first param group; None where the optimizer makes its own."""
    rate = optimizer.param_groups[0]["lr"]
    return None if rate is None else float(rate)


def _set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _override_loss_scale(optimizer: Any, loss_scale: float) -> None:
    """Let the next backward use this scale; one that follows overflows goes on from it."""
    optimizer.loss_scale = loss_scale


# One parameter; all of these are collective, as the functions they call


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
    """This rank's chunk of the same; stage 3 only."""
    if optim_state_key is None:
        return parameter_access.safe_get_local_fp32_param(param)
    return parameter_access.safe_get_local_optimizer_state(param, optim_state_key)


def _set_local_values(optimizer: Any, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
    if optim_state_key is None:
        parameter_access.safe_set_local_fp32_param(param, value)
    else:
        parameter_access.safe_set_local_optimizer_state(param, value, optim_state_key)


def _full_gradient(optimizer: Any, param: nn.Parameter) -> Tensor | None:
    return parameter_access.safe_get_full_grad(param)


def _set_full_gradient(optimizer: Any, value: Tensor, param: nn.Parameter) -> None:
    parameter_access.safe_set_full_grad(param, value)


def _local_gradient(optimizer: Any, param: nn.Parameter) -> Tensor | None:
    return parameter_access.safe_get_local_grad(param)


def _set_local_gradient(optimizer: Any, value: Tensor, param: nn.Parameter) -> None:
    parameter_access.safe_set_local_grad(param, value)


def _update_gradients(optimizer: Any, update_func: Callable[..., Any], params: Iterable[nn.Parameter]) -> None:
    parameter_access.safe_update_full_grad_vectorized(list(params), update_func)


# Away and back


def _offload_states(
    optimizer: Any, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
) -> None:
    """engine.offload_states."""
    optimizer.engine.offload_states(include, device, pin_memory, non_blocking)


def _reload_states(optimizer: Any, non_blocking: bool = False) -> None:
    """engine.reload_states."""
    optimizer.engine.reload_states(non_blocking)


def _refresh_masters(optimizer: Any) -> None:
    """Masters from weights that were written to: what a step does first anyway."""
    optimizer.engine.gradients.settle()
    optimizer.store.sync_masters()


def _set_boundary(optimizer: Any, is_boundary: bool) -> None:
    optimizer.engine.set_gradient_accumulation_boundary(is_boundary)


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
    "get_fp32_grad_for_param": _full_gradient,
    "get_full_hp_param": _full_values,
    "get_local_fp32_grad_for_param": _local_gradient,
    "get_local_fp32_param": _local_values,
    "get_lr": _get_lr,
    "offload_states": _offload_states,
    "override_loss_scale": _override_loss_scale,
    "refresh_fp32_params": _refresh_masters,
    "reload_states": _reload_states,
    "set_fp32_grad_for_param": _set_full_gradient,
    "set_full_hp_param": _set_full_values,
    "set_gradient_accumulation_boundary": _set_boundary,
    "set_local_grad_for_param": _set_local_gradient,
    "set_local_hp_param": _set_local_values,
    "set_lr": _set_lr,
    "update_fp32_grad_for_param_vectorized": _update_gradients,
}

_INSIDE = "it is the inside of DeepSpeed's optimizer; hf_zero's is another one"
_REDUCTION = "gradients are reduced in engine.backward(); utils.safe_get_full_grad and safe_set_full_grad reach them"
_EXPERTS = "experts over ranks (expert_parallel) are updated as all other parameters are"
REFUSED = {
    "backward step_fused_adam step_fused_lamb": "engine.backward(loss) and engine.step()",
    "destroy": "engine.destroy() lets go of everything",
    "needs_scaler scale_if_loss": "engine.scale(loss).backward(), where a loss scale is in use",
    "enter_backward exit_backward queue_post_backward_callback reenter_backward_if_needed "
    "register_grad_acc_post_hook run_grad_acc_post_hooks should_refresh_expected_hook_count "
    "unregister_grad_acc_post_hooks update_hook_state_and_maybe_run_epilogue": (
        "torch's parameter.register_post_accumulate_grad_hook, for hooks of a program's own"
    ),
    "bf16_master_weights_and_gradients bf16_optimizer_states fp16_master_weights_and_gradients "
    "get_param_comm_dtype": "the engine's methods of these names, and engine.communication_data_type",
    "report_ipg_memory_usage": "runtime.utils.see_memory_usage",
    "load_hp_checkpoint_state load_hp_checkpoint_state_from_checkpoint_dir "
    "load_hp_checkpoint_state_from_checkpoint_dir_stage3 "
    "load_module_checkpoint_state_from_checkpoint_dir_stage3 get_lean_optimizer_state checkpoint_event_epilogue "
    "checkpoint_event_prologue": "engine.save_checkpoint and engine.load_checkpoint",
    "check_overflow has_overflow has_overflow_partitioned_grads_serial has_overflow_serial check_grad_overflow "
    "inf_or_nan_tracker local_overflow overflow_checker update_offload_overflow_tracker "
    "update_offload_overflow_tracker_for_param_grad": "`overflow` says whether the last step was skipped",
    "clip_grad_norm get_grad_norm_direct norm_for_param_grads norm_type scaled_global_norm set_norm_for_param_grad "
    "set_norm_for_param_grad_in_gpu unscale_and_clip_grads complete_grad_norm_calculation_for_cpu_offload "
    "get_grads_for_norm compute_grad_norm flatten_grad_norm_mask_list": "engine.get_global_grad_norm(); step() clips",
    "accumulate_hp_grads_and_remove_lp accumulated_grads_in_cpu all_grad_tensors allreduce_and_copy "
    "allreduce_and_copy_with_multiple_ranks allreduce_and_scatter allreduce_bucket allreduce_no_retain "
    "async_accumulate_grad_in_cpu_via_gpu async_inplace_copy_grad_to_fp32_buffer_from_gpu average_tensor "
    "buffered_reduce_fallback clear_grad_attribute clear_hp_grads clear_lp_grads copy_grads_in_partition "
    "create_grad_acc_hooks create_gradient_handling_hooks create_reduce_and_remove_grad_hooks "
    "fill_grad_accum_attribute finalize_gradient_accumulation_boundary fp32_groups_actual_gradients_flat "
    "fp32_groups_gradient_dict fp32_groups_gradient_flat_partition fp32_groups_gradients "
    "fp32_groups_gradients_flat fp32_groups_has_gradients free_grad_in_param_list get_all_grad_tensors "
    "get_fp32_grad_partitions get_grad_position get_gradient_for_reduction get_grads_for_reduction "
    "get_grads_to_reduce get_param_gradient_attribute gradient_reduction_w_predivide "
    "grad_partitions_flat_buffer immediate_grad_update independent_gradient_partition_epilogue "
    "initialize_gradient_partition initialize_gradient_partitioning_data_structures "
    "overlapping_partition_gradients_reduce_epilogue partition_grads previous_reduced_grads process_gradients "
    "reduce_gradients reduce_independent_p_g_buckets_and_remove_grads reduce_ipg_grads "
    "reduce_ready_partitions_and_remove_grads remaining_grads_in_partition reset_partition_gradient_structures "
    "set_none_gradients_to_zero total_grads_in_partition update_hp_grads zero_reduced_gradients "
    "dump_post_step_gradients dump_pre_step_gradients": _REDUCTION,
    "configure_autoep_folding_tp_gradient_reduction ep_process_group expert_dp_process_group expert_gradients "
    "get_ep_ranks is_moe_group is_moe_param_group autoep_folding_spec autoep_folding_tp_group "
    "non_expert_gradients": _EXPERTS,
    "create_zenflow_hooks zenflow": "zenflow is not supported: offload_optimizer without it",
    "muon_beta muon_momentum_buffer_partitioned_groups_flat muon_ns_method save_muon_momentum_buffer_in_memory "
    "sub_groups_using_muon use_muon": "Muon's states: utils.safe_get_full_optimizer_state(parameter, key)",
    "all2all_process_group invalidate_secondary_tensor quantize_nontrainable_params zero_hpz_partition_size "
    "zero_quantized_nontrainable_weights": "the keys of ZeRO++ in ds.json (docs/hybrid_and_zeropp.md)",
    "get_hp_param_device backup_optimizer deepspeed_adam_offload get_flat_partition "
    "hp_params_pin_buffers lp_grad_partitions_flat_pin_buffers lp_param_buffer lp_param_contiguous_pin_buffer "
    "lp_params_pin_buffers max_params_in_cpu next_swappable_fp32_partitioned_groups offload_gradient_dict "
    "offload_optimizer_fast_init offload_optimizer_pin_memory offload_param offload_param_pin_memory "
    "offloaded_states optimizer_swapper param_buffer_of_bit16_for_cpu_offload_groups "
    "param_groups_fp16_flat_cpu_memory params_in_nvme_and_cpu partial_offload reset_cpu_buffers reset_swap_buffers "
    "cpu_offload_pin_memory initialize_ds_offload subgroup_to_device swap_optimizer "
    "temp_grad_buffer_for_cpu_offload temp_grad_buffer_for_gpu_offload": (
        "engine.zero_offload_optimizer() and zero_offload_param() say what is offloaded, and offload_states() does it"
    ),
    "allgather_bucket_size all_reduce_print bit16_groups_flat bf16_groups_flat backward_epilogue "
    "backward_prologue callback_queued clear_backward_seen_flag communication_data_type debug_fp16_grads deepspeed "
    "dp_rank enable_sanity_checks extra_large_param_to_reduce first_offset first_param_index_in_partition flatten "
    "flatten_and_print flatten_dense_tensors_aligned fp16_partitioned_groups fp16_partitioned_groups_flat_id "
    "fp32_groups fused_adam_legacy fused_lamb_legacy get_data_parallel_partitions get_first_param_index "
    "get_groups_without_padding get_param_id get_partition_info grad_acc_dtype grad_partition_insertion_offset "
    "grad_position grad_start_offset gradient_accumulation_dtype gradient_average grads_in_partition "
    "grads_in_partition_offset group_paddings groups_lacking_loss_scale groups_padding has_executed_step "
    "ignore_unused_parameters initialize_optimizer_states ipg_buckets is_grad_computed "
    "is_param_in_current_partition is_partition_reduced leaf_parameters loss_scale_config low_precision_dtype "
    "low_precision_master_weights_and_grads master_weights_and_grads_dtype max_param_reduce_events micro_step_id "
    "n_caching_allocator_flushes nccl_start_alignment_factor overlap_comm parallel_partitioned_bit16_groups "
    "param_dict param_id param_reduce_events param_to_partition_ids parameter_alignment params_already_reduced "
    "params_in_partition params_not_in_partition partition_size persistent_parameters prefetch_elements "
    "print_rank_0 ready_for_gradients reduce_and_partition_stream reduce_bucket_size reduction_stream "
    "round_robin_bit16_indices round_robin_bit16_meta round_robin_bit16_offsets round_robin_bit16_padding "
    "round_robin_gradients sequential_execution set_grad_positions setup_buckets sub_group_partition_counts "
    "sub_group_process_groups sub_group_size sub_group_to_group_id sub_groups_lacking_loss_scale "
    "timers torch_autocast_gradscaler unflatten "
    "update_lp_params use_grad_accum_attribute use_multi_rank_bucket_allreduce use_separate_grad_accum "
    "using_pipeline using_real_optimizer verbose": _INSIDE,
}
SURFACE = Surface("optimizer", VALUES, METHODS, REFUSED)
