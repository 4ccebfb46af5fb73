"""One row per name that well-known programs import from deepspeed, with its verdict.

W: works. T: a thin equivalent. E: can be imported, and raises on use, naming the replacement. L: belongs to an
unsupported part of DeepSpeed, and currently behaves like E.
"""

from __future__ import annotations

TABLE = """
W utils.logging: logger log_dist print_dist warning_once
W runtime.base_optimizer: DeepSpeedOptimizer ZeROOptimizer
W runtime.zero.stage_1_and_2: DeepSpeedZeroOptimizer
W runtime.zero.stage3: DeepSpeedZeroOptimizer_Stage3
T runtime.bf16_optimizer: BF16_Optimizer
T runtime.fp16.fused_optimizer: FP16_Optimizer
W checkpointing: configure checkpoint is_configured reset get_cuda_rng_tracker
W runtime.activation_checkpointing.checkpointing: configure checkpoint is_configured reset get_cuda_rng_tracker
W runtime.sequence_parallel.ulysses_sp: UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter
W runtime.sequence_parallel.ulysses_sp: TiledMLP TiledFusedLogitsLoss SequenceTiledCompute sequence_tiled_compute
W utils.groups: _get_data_parallel_group _get_data_parallel_world_size _get_data_parallel_rank
W utils.groups: _get_sequence_parallel_group _get_sequence_parallel_world_size _get_sequence_parallel_rank
W utils.groups: _get_sequence_data_parallel_group _get_sequence_data_parallel_world_size
W utils.groups: _get_model_parallel_world_size get_tensor_model_parallel_world_size get_tensor_model_parallel_rank
W utils.groups: _get_expert_parallel_world_size _get_expert_parallel_group_dict _get_max_expert_size
W utils.groups: _create_expert_and_data_parallel _clone_world_group _get_broadcast_src_rank
W sequence.layer: DistributedAttention
W : tp_model_init
L module_inject.layers: GatherReplacedLayerParams
E module_inject.auto_tp: AutoTP
E module_inject: replace_transformer_layer
E : init_inference
E inference.engine: InferenceEngine
W runtime.utils: move_to_device set_random_seed get_global_norm clip_grad_norm_ DummyOptim required_torch_version
W runtime.utils: see_memory_usage
W runtime.torch_autocast: autocast_if_enabled
W runtime.engine: DeepSpeedEngine
T runtime.checkpoint_engine: TorchCheckpointEngine
T runtime.checkpoint_engine.torch_checkpoint_engine: TorchCheckpointEngine
E checkpoint: DeepSpeedCheckpoint
W utils.zero_to_fp32: get_optim_files get_model_state_file ZERO_STAGE
W utils.zero_to_fp32: get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint
W utils.timer: SynchronizedWallClockTimer ThroughputTimer
W profiling.flops_profiler: FlopsProfiler get_model_profile
W profiling.flops_profiler.profiler: FlopsProfiler
W : version __version__ __version_major__ __version_minor__ __version_patch__ __git_hash__ __git_branch__
W git_version_info: version git_hash git_branch installed_ops
W elasticity: compute_elastic_config elasticity_enabled
W launcher.runner: main parse_args fetch_hostfile parse_inclusion_exclusion EXPORT_ENVS DLTS_HOSTFILE
W comm: mpi_discovery all_reduce barrier get_rank init_distributed
W comm.comm: all_reduce barrier get_rank is_initialized
W dist: get_rank
W accelerator: get_accelerator
W accelerator.abstract_accelerator: DeepSpeedAccelerator
T : DeepSpeedConfig DeepSpeedConfigError
T runtime.config: DeepSpeedConfig DeepSpeedConfigError
T runtime.zero.config: DeepSpeedZeroConfig
T runtime.constants: TRAIN_BATCH_SIZE OPTIMIZER GRADIENT_CLIPPING ROUTE_TRAIN
T runtime.zero.utils: is_zero_param
W runtime.zero: Init GatheredParameters
W zero: Init GatheredParameters register_external_parameter
W runtime.zero.partition_parameters: Init GatheredParameters ZeroParamStatus
W runtime.zero.stage_1_and_2: estimate_zero2_model_states_mem_needs_all_live
W runtime.zero.stage_1_and_2: estimate_zero2_model_states_mem_needs_all_cold
W runtime.zero.stage3: estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold
W zero: TiledLinear
W runtime.zero.tiling: TiledLinear TiledLinearReturnBias
T runtime.zero.linear: LinearModuleForZeroStage3
T runtime.zero.parameter_offload: DeepSpeedZeRoOffload
W runtime.dataloader: RepeatingLoader DeepSpeedDataLoader
W ops.adam.cpu_adam: DeepSpeedCPUAdam
W ops.adam.fused_adam: FusedAdam
W ops.adam: DeepSpeedCPUAdam FusedAdam
W ops.lion: DeepSpeedCPULion FusedLion
W ops.lamb: FusedLamb
W ops.adagrad: DeepSpeedCPUAdagrad
W utils.init_on_device: OnDevice
W utils.z3_leaf_module: set_z3_leaf_modules z3_leaf_module
W utils.nvtx: instrument_w_nvtx
W utils: is_initialized safe_get_full_grad RepeatingLoader OnDevice logger
W runtime.compiler: is_compile_supported
W monitor.monitor: MonitorMaster
W env_report: main
T runtime.zero.muon.muon_optimizer: MuonWithAuxAdam
T : set_optimizer_flags
W runtime.data_pipeline.curriculum_scheduler: CurriculumScheduler
W moe.utils: split_params_into_different_moe_groups_for_optimizer is_moe_param
E moe.layer: MoE
E pipe: PipelineModule LayerSpec TiedLayerSpec
E runtime.pipe.topology: ProcessTopology PipeModelDataParallelTopology
E runtime.pipe.engine: PipelineEngine
E runtime.hybrid_engine: DeepSpeedHybridEngine
W compression.compress: init_compression redundancy_clean
W compression.scheduler: compression_scheduler
W ops.sparse_attention: SparseSelfAttention
E ops.transformer: DeepSpeedTransformerLayer DeepSpeedTransformerConfig
E ops.op_builder: CPUAdamBuilder UtilsBuilder AsyncIOBuilder
W ops: __compatible_ops__
E linear: OptimizedLinear LoRAConfig QuantizationConfig init_lora
E inference.v2: build_hf_engine
E ops.fp_quantizer: FP_Quantize
E runtime.zenflow.zenflow_stage_1_and_2: ZenFlowZeroOptimizer
"""

MODULES = (
    "io",
    "nvme",
    "ops.aio",
    "ops.muon",
    "module_inject",
    "module_inject.tp_shard",
    "checkpoint.ds_to_universal",
    "runtime.rollout",
    "runtime.superoffload",
    "runtime.zenflow",
    "compile",
)


def rows() -> list[tuple[str, str, str]]:
    """(verdict, module without `deepspeed.`, name)."""
    found = []
    for line in TABLE.strip().splitlines():
        head, _, names = line.partition(":")
        verdict, _, module = head.partition(" ")
        found += [(verdict, module.strip(), name) for name in names.split()]
    return found
