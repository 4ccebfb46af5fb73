"""What to use instead of attributes that DeepSpeed's engine and optimizers have and hf_zero's lack.

They only explain an AttributeError. In each table, a row has the names that share an answer.
"""

from __future__ import annotations

from collections.abc import Mapping


def explained(error: AttributeError, name: str, owner: str, instead: Mapping[str, str]) -> AttributeError:
    """`error`, or for a name of DeepSpeed's `owner` one that says what to use instead."""
    for names, answer in instead.items():
        if name in names.split():
            text = f"{owner}.{name} is not supported by hf_zero: {answer} (docs/api.md)"
            return AttributeError(text, name=name)
    return error


_ENGINE_REDUCTION = "engine.backward() reduces gradients by itself, bucket by bucket; inside no_sync() it does not"
_ENGINE_EXPERTS = "expert_parallel in the config spreads transformers' packed experts over ranks; there are no others"
_OPTIMIZER_REDUCTION = (
    "gradients are reduced in engine.backward(); utils.safe_get_full_grad and safe_set_full_grad reach them"
)

ENGINE = {
    "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain "
    "buffered_allreduce_fallback sparse_all_gather sparse_allreduce sparse_allreduce_bucket "
    "sparse_allreduce_no_retain": _ENGINE_REDUCTION,
    "autotuning_model_info autotuning_model_info_path autotuning_profile_model_info": (
        "autotuning tries stages and batch sizes, and makes no profile of the model (docs/planning.md)"
    ),
    "clip_fp32_gradients": "engine.step() clips by the key gradient_clipping",
    "compile_autosp compile_autotp compile_zero_optimization_stage get_autosp_backend get_autotp_backend "
    "get_compile_time get_deepcompile_backend get_deepspeed_compile_backend register_compile_pass "
    "uses_parallelization_pass_only": "engine.compile() runs the model under torch.compile",
    "cpuadam_cores_perc swap_tensor_config": "zero_offload_optimizer() and aio_config() say how states are offloaded",
    "flops flops_profiler": "deepspeed.profiling.flops_profiler has FlopsProfiler and get_model_profile",
    "get_optimizer_configuration": "optimizer_name() and optimizer_params() say it",
    "all_to_all_group gate_modules load_moe_state_dict local_all_to_all_group": _ENGINE_EXPERTS,
    "tensor_parallel_config": "autotp_size() says how many ranks hold parts of the same matrices",
    "torch_autocast_lower_precision_safe_modules torch_autocast_z0_gradscaler": "torch_autocast_enabled() and "
    "torch_autocast_dtype() say how forward runs; loss_scale() is the scale",
    "engine_timers engine_timers_cache fwd_duration print_forward_breakdown timers": (
        "engine.get_wall_clock_timers() has the times of the last update, with the key wall_clock_breakdown"
    ),
    "checkpoint_engine": "save_checkpoint and load_checkpoint read and write files themselves",
    "loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size": "a checkpoint loads at any number of ranks",
    "monitor summary_events": "deepspeed.monitor.monitor.MonitorMaster takes events of a program's own",
    "optimized_linear_base_weight_sharding optimized_linear_lora_enabled": "LoRA comes from PEFT",
    "first_dataloader_check flatten losses module_forward_post_hook module_forward_pre_hook scale_wrt_gas unflatten "
    "update_interval warn_unscaled_loss": "it is an internal of DeepSpeed's engine; hf_zero's differs",
}

OPTIMIZER = {
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
    "dump_post_step_gradients dump_pre_step_gradients": _OPTIMIZER_REDUCTION,
    "configure_autoep_folding_tp_gradient_reduction ep_process_group expert_dp_process_group expert_gradients "
    "get_ep_ranks is_moe_group is_moe_param_group autoep_folding_spec autoep_folding_tp_group "
    "non_expert_gradients": "experts over ranks (expert_parallel) are updated as all other parameters are",
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
    "using_pipeline using_real_optimizer verbose": "it is an internal of DeepSpeed's optimizer; hf_zero's differs",
}
