"""Where hf_zero keeps what DeepSpeed's modules offer: module -> name -> dotted home. Nothing here is imported yet.

Names that are not here but in DeepSpeed's modules can be imported and refuse to be used: see unsupported.py.
"""

from __future__ import annotations

Homes = dict[str, str]
_COMPAT = "hf_zero.integration.compat"


def _from(home: str, names: str, **renamed: str) -> Homes:
    """`names` as they are called at home; `renamed`: DeepSpeed's name -> ours."""
    return {name: f"{home}.{name}" for name in names.split()} | {new: f"{home}.{old}" for new, old in renamed.items()}


_ENGINE = _from("hf_zero.api.engine", "", DeepSpeedEngine="ZeroEngine")
_LOGGING = _from("hf_zero.log", "log_dist logger")
_INIT = _from("hf_zero.api.zero_init", "Init")
_GATHER = _from("hf_zero.api.gathered_parameters", "GatheredParameters")
_STATUS = _from("hf_zero.params.sharded_parameter", "ZeroParamStatus ZeroParamType")
_EXTERNAL = _from("hf_zero.api.parameter_offload", "register_external_parameter unregister_external_parameter")
_GENERATION = _from("hf_zero.api.gathered_parameters", "unwrap_model_for_generation")
_OFFLOAD_HANDLE = _from(f"{_COMPAT}.kinds", "DeepSpeedZeRoOffload")
_ZERO = _INIT | _GATHER | _STATUS | _EXTERNAL | _GENERATION | _OFFLOAD_HANDLE
_ACCELERATOR = _from(f"{_COMPAT}.accelerator", "get_accelerator set_accelerator is_current_accelerator_supported")
_LEAVES = _from(
    "hf_zero.params.leaf_modules",
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module",
)
_FRAGMENTS = _from(
    "hf_zero.api.parameter_access",
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized",
) | _from("hf_zero.checkpoint.deepspeed.classes", "fragment_address")
_LOADERS = _from(f"{_COMPAT}.utils", "RepeatingLoader")
_CONFIG = _from(f"{_COMPAT}.config_objects", "DeepSpeedConfig") | _from("hf_zero.config.errors", "DeepSpeedConfigError")
_PRECISION = _from(
    "hf_zero.config.objects", "DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config get_float16_config"
)
_ZERO_CONFIG = _from("hf_zero.config.objects", "DeepSpeedZeroConfig get_zero_config")
_ZERO_STAGE = _from("hf_zero.checkpoint.deepspeed.classes", "ZeroStageEnum")
_OFFLOAD_ENUMS = _from("hf_zero.api.offload_states", "OffloadDeviceEnum OffloadStateTypeEnum")
_NVTX = _from(f"{_COMPAT}.utils", "instrument_w_nvtx")
_GROUP_NAMES = (
    "_clone_world_group _create_expert_and_data_parallel _get_broadcast_src_rank _get_data_parallel_group "
    "_get_data_parallel_group_ranks _get_data_parallel_rank _get_data_parallel_world_size "
    "_get_expert_data_parallel_group _get_expert_data_parallel_group_dict _get_expert_data_parallel_rank "
    "_get_expert_data_parallel_world_size _get_expert_model_parallel_world_size _get_expert_parallel_group "
    "_get_expert_parallel_group_dict _get_expert_parallel_rank _get_expert_parallel_world_size _get_max_expert_size "
    "_get_model_parallel_world_size _get_sequence_data_parallel_group _get_sequence_data_parallel_rank "
    "_get_sequence_data_parallel_world_size _get_sequence_parallel_group _get_sequence_parallel_rank "
    "_get_sequence_parallel_world_size _get_zero_param_intra_parallel_group "
    "_get_zero_param_intra_parallel_group_world_size _get_zero_param_intra_parallel_rank_in_mygroup "
    "_init_tp_mesh_device _zero_param_parallel_is_initialized get_data_parallel_group get_data_parallel_rank "
    "get_data_parallel_world_size get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size "
    "get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank "
    "get_tensor_model_parallel_world_size initialize"
)
_COMM = _from(
    "hf_zero.comm",
    "barrier destroy_process_group get_local_rank get_rank get_world_size init_distributed is_initialized",
) | _from(
    "hf_zero.comm.mirror",
    "P2POp ProcessGroup ReduceOp all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce "
    "all_reduce_coalesced all_to_all all_to_all_single allgather_fn batch_isend_irecv broadcast broadcast_object_list "
    "gather get_all_ranks_from_group get_global_rank get_world_group has_all_gather_into_tensor "
    "has_all_reduce_coalesced has_coalescing_manager has_reduce_scatter_tensor inference_all_reduce "
    "initialize_mesh_device irecv is_available isend monitored_barrier mpi_discovery new_group recv reduce "
    "reduce_scatter reduce_scatter_fn reduce_scatter_tensor scatter send",
)
_COMM |= _from(f"{_COMPAT}.logs", "log_summary")
_BUILDERS = _from(
    f"{_COMPAT}.op_builders",
    "ALL_OPS AsyncIOBuilder CCLCommBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder DeepCompileBuilder "
    "EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder FusedLionBuilder GDSBuilder "
    "InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder NotImplementedBuilder OpBuilder PinMemoryBuilder "
    "QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder ShareMemCommBuilder "
    "SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder UtilsBuilder",
)
_VERSIONS = f"{_COMPAT}.versions"
_CHECKPOINT_KEYS = _from(
    "hf_zero.checkpoint.deepspeed.keys",
    "AUTOEP_LAYERS_KEY AUTOEP_LAYERS_KEY_LEGACY AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY "
    "AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT BUFFER_NAMES DS_VERSION FP32_FLAT_GROUPS FROZEN_PARAM_FRAGMENTS "
    "FROZEN_PARAM_SHAPES OPTIMIZER_STATE_DICT PARAM_SHAPES PARTITION_COUNT ZERO_STAGE",
    PARAM_ALIGNMENT_PADDINGS="ALIGNMENT_PADDINGS",
    SINGLE_PARTITION_OF_FP32_GROUPS="FP32_PARTITIONS",
)
_RECOMPUTE = _from(
    f"{_COMPAT}.activation_checkpointing",
    "CheckpointFunction CudaRNGStatesTracker checkpoint configure get_cuda_rng_tracker is_configured "
    "model_parallel_cuda_manual_seed non_reentrant_checkpoint partition_activations_in_checkpoint reset set_num_layers",
)
_EXPERTS = _from(
    f"{_COMPAT}.moe",
    "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
    "split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer "
    "split_params_into_shared_and_expert_params",
)

HOMES: dict[str, Homes] = {
    "": {
        **_ENGINE,
        **_from("hf_zero.api.entry", "initialize"),
        **_from("hf_zero.comm", "init_distributed"),
        **_from(f"{_COMPAT}.arguments", "add_config_arguments add_tuning_arguments"),
        **_from(f"{_COMPAT}.utils", "OnDevice set_optimizer_flags"),
        **_from(f"{_COMPAT}.kinds", "DeepSpeedOptimizer"),
        **_from("hf_zero.api.loader", "", DeepSpeedDataLoader="DataLoader"),
        **_from(
            _VERSIONS,
            "git_branch git_hash version",
            __git_hash__="git_hash",
            __git_branch__="git_branch",
            __version_major__="version_major",
            __version_minor__="version_minor",
            __version_patch__="version_patch",
        ),
        **_CONFIG,
        **_LOGGING,
        "get_accelerator": _ACCELERATOR["get_accelerator"],
    },
    "accelerator": {**_ACCELERATOR, **_from(f"{_COMPAT}.accelerator", "DeepSpeedAccelerator")},
    "accelerator.abstract_accelerator": _from(f"{_COMPAT}.accelerator", "DeepSpeedAccelerator"),
    "accelerator.cpu_accelerator": _from(f"{_COMPAT}.accelerator", "CPU_Accelerator"),
    "accelerator.cuda_accelerator": _from(f"{_COMPAT}.accelerator", "CUDA_Accelerator"),
    "accelerator.hpu_accelerator": _from(f"{_COMPAT}.accelerator", "HPU_Accelerator"),
    "accelerator.npu_accelerator": _from(f"{_COMPAT}.accelerator", "NPU_Accelerator"),
    "accelerator.real_accelerator": _ACCELERATOR,
    "accelerator.xpu_accelerator": _from(f"{_COMPAT}.accelerator", "XPU_Accelerator"),
    "checkpoint.constants": _CHECKPOINT_KEYS,
    "checkpoint.ds_to_universal": _from("hf_zero.ds_to_universal", "main parse_arguments"),
    "checkpoint.utils": _from(f"{_COMPAT}.utils", "clone_tensors_for_torch_save"),
    "comm": _COMM,
    "comm.comm": _COMM,
    "comm.reduce_op": _from("hf_zero.comm.mirror", "ReduceOp"),
    "env_report": _from(f"{_COMPAT}.env_report", "cli_main main"),
    "git_version_info": _from(
        _VERSIONS, "accelerator_name compatible_ops git_branch git_hash installed_ops torch_info version"
    ),
    "git_version_info_installed": _from(
        _VERSIONS, "accelerator_name git_branch git_hash installed_ops torch_info version"
    ),
    "launcher.runner": {
        **_from(f"{_COMPAT}.arguments", "DEEPSPEED_ENVIRONMENT_NAME"),
        **_from(
            "hf_zero.launch.deepspeed_names",
            "DLTS_HOSTFILE EXPORT_ENVS encode_world_info fetch_hostfile main parse_args parse_inclusion_exclusion "
            "parse_resource_filter",
        ),
    },
    "moe.utils": _EXPERTS,
    "ops": _from(f"{_COMPAT}.op_builders", "", __compatible_ops__="NO_OPERATORS"),
    "ops.adagrad": _from("hf_zero.optim", "DeepSpeedCPUAdagrad"),
    "ops.adagrad.cpu_adagrad": _from("hf_zero.optim", "DeepSpeedCPUAdagrad"),
    "ops.adam": _from("hf_zero.optim", "DeepSpeedCPUAdam FusedAdam"),
    "ops.adam.cpu_adam": _from("hf_zero.optim", "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _from("hf_zero.optim", "FusedAdam"),
    "ops.lamb": _from("hf_zero.optim", "FusedLamb"),
    "ops.lamb.fused_lamb": _from("hf_zero.optim", "FusedLamb"),
    "ops.lion": _from("hf_zero.optim", "DeepSpeedCPULion FusedLion"),
    "ops.lion.cpu_lion": _from("hf_zero.optim", "DeepSpeedCPULion"),
    "ops.lion.fused_lion": _from("hf_zero.optim", "FusedLion"),
    "runtime.activation_checkpointing.checkpointing": _RECOMPUTE,
    "runtime.base_optimizer": _from(f"{_COMPAT}.kinds", "DeepSpeedOptimizer ZeROOptimizer"),
    "runtime.bf16_optimizer": _from(f"{_COMPAT}.kinds", "BF16_Optimizer"),
    "runtime.checkpoint_engine": _from(f"{_COMPAT}.checkpoint_files", "CheckpointEngine TorchCheckpointEngine"),
    "runtime.checkpoint_engine.checkpoint_engine": _from(f"{_COMPAT}.checkpoint_files", "CheckpointEngine"),
    "runtime.checkpoint_engine.torch_checkpoint_engine": _from(f"{_COMPAT}.checkpoint_files", "TorchCheckpointEngine"),
    "runtime.compiler": _from(f"{_COMPAT}.utils", "is_compile_supported is_compiling", disable="disable_compile"),
    "runtime.config": {**_CONFIG, **_PRECISION, **_ZERO_CONFIG},
    "runtime.dataloader": {**_LOADERS, **_from("hf_zero.api.loader", "", DeepSpeedDataLoader="DataLoader")},
    "runtime.engine": _ENGINE,
    "runtime.fp16.fused_optimizer": _from(f"{_COMPAT}.kinds", "FP16_Optimizer"),
    "runtime.fp16.loss_scaler": _from("hf_zero.checkpoint.deepspeed.classes", "DynamicLossScaler LossScaler"),
    "runtime.fp16.unfused_optimizer": _from(f"{_COMPAT}.kinds", "FP16_UnfusedOptimizer"),
    "runtime.lr_schedules": {
        **_from("hf_zero.schedules", "VALID_LR_SCHEDULES LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR"),
        **_from(f"{_COMPAT}.arguments", "add_tuning_arguments get_config_from_args get_lr_from_config parse_arguments"),
    },
    "runtime.precision_config": _PRECISION,
    "runtime.torch_autocast": _from(f"{_COMPAT}.utils", "autocast_if_enabled"),
    "runtime.utils": {
        **_from(
            f"{_COMPAT}.utils",
            "DummyOptim autocast_if_enabled clip_grad_norm_ copy_to_device empty_cache ensure_directory_exists "
            "get_global_norm get_ma_status get_only_unique_item move_to_device noop_context noop_decorator "
            "partition_uniform set_random_seed has_inf_or_nan",
        ),
        **_from(_VERSIONS, "required_torch_version"),
        **_from(f"{_COMPAT}.logs", "see_memory_usage"),
    },
    "runtime.zero": _ZERO,
    "runtime.zero.config": {**_ZERO_STAGE, **_ZERO_CONFIG, **_OFFLOAD_ENUMS},
    "runtime.zero.linear": _from(f"{_COMPAT}.utils", "LinearModuleForZeroStage3"),
    "runtime.zero.muon.muon_optimizer": _from("hf_zero.optim.muon", "", MuonWithAuxAdam="Muon"),
    "runtime.zero.offload_config": _OFFLOAD_ENUMS,
    "runtime.zero.parameter_offload": _OFFLOAD_HANDLE,
    "runtime.zero.partition_parameters": {
        **_INIT,
        **_GATHER,
        **_STATUS,
        **_EXTERNAL,
        **_from(
            f"{_COMPAT}.kinds",
            "",
            _orig_torch_arange="torch_arange",
            zero_wrapper_for_fp_tensor_constructor="unchanged_constructor",
        ),
        "get_accelerator": _ACCELERATOR["get_accelerator"],
    },
    "runtime.zero.stage3": {**_from(f"{_COMPAT}.kinds", "DeepSpeedZeroOptimizer_Stage3"), **_GENERATION},
    "runtime.zero.stage_1_and_2": _from(f"{_COMPAT}.kinds", "DeepSpeedZeroOptimizer"),
    "runtime.zero.utils": _from(f"{_COMPAT}.kinds", "is_zero_param is_zero_supported_optimizer"),
    "utils": {
        **_FRAGMENTS,
        **_LEAVES,
        **_LOADERS,
        **_LOGGING,
        **_NVTX,
        **_from("hf_zero.comm", "is_initialized"),
        **_from(f"{_COMPAT}.groups", _GROUP_NAMES),
        **_from(f"{_COMPAT}.logs", "log_dist_once set_log_level_from_string"),
        **_from(f"{_COMPAT}.utils", "OnDevice recursive_getattr recursive_setattr"),
    },
    "utils.init_on_device": _from(f"{_COMPAT}.utils", "OnDevice"),
    "utils.logging": {
        **_LOGGING,
        **_from(
            f"{_COMPAT}.logs",
            "LoggerFactory get_current_level get_log_level_from_string log_dist_once log_levels print_configuration "
            "print_dist print_json_dist set_log_level_from_string should_log_le warning_once",
        ),
    },
    "utils.module_utils": _from(f"{_COMPAT}.utils", "recursive_getattr recursive_setattr"),
    "utils.nvtx": _NVTX,
    "utils.tensor_fragment": _FRAGMENTS,
    "utils.timer": _from(
        "hf_zero.api.timers",
        "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER BACKWARD_MICRO_TIMER "
        "BACKWARD_REDUCE_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER NoopTimer "
        "STEP_GLOBAL_TIMER STEP_MICRO_TIMER SynchronizedWallClockTimer TIME_EPSILON ThroughputTimer trim_mean",
    ),
    "utils.torch": _from(_VERSIONS, "required_torch_version"),
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": {
        **_from(
            "hf_zero.checkpoint.fp32",
            "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
            "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
        ),
        **_from(
            f"{_COMPAT}.checkpoint_files",
            "ZERO_STAGE get_checkpoint_files get_model_state_file get_model_state_files get_optim_files",
        ),
    },
}

# Modules that are others of the package, or of ours, under a second name.
SAME_MODULE = {
    "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "dist": "deepspeed.comm",
    "utils.groups": "hf_zero.integration.compat.groups",
    "zero": "deepspeed.runtime.zero",
}


def homes_of(module: str) -> Homes:
    """The names of ours in DeepSpeed's `module` (without `deepspeed.`)."""
    if module == "ops.op_builder" or module.startswith("ops.op_builder."):
        return _BUILDERS
    return HOMES.get(module, {})
