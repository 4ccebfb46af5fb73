"""DeepSpeed's additional engine names: queries about config, ranks and files, and small conveniences.

A layer over `ZeroEngine` that only `initialize` uses: the engine trains without it (tests/api/test_without_names.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hf_zero.api.engine_gradients import EngineGradients
from hf_zero.api.gathered_parameters import load_module_state_dict
from hf_zero.api.inputs import training_loader
from hf_zero.comm import get_local_rank
from hf_zero.comm.process_group import get_world_group
from hf_zero.config.objects import ConfigView
from hf_zero.device.kinds import BACKENDS
from hf_zero.instead import ENGINE
from hf_zero.params.consolidation import consolidated_state_dict, with_extra_states
from hf_zero.precision import DTYPES
from hf_zero.sequence.groups import process_group_of
from hf_zero.step.assemble import Assembly
from hf_zero.step.optimizer import ZeroOptimizer
from hf_zero.surface import Surface

# Methods that return the value of a key: name -> path in the config object.
_KEYS = {
    **{
        name: name
        for name in (
            "aio_config checkpoint_tag_validation_enabled checkpoint_tag_validation_fail dataloader_drop_last "
            "dump_state gradient_predivide_factor load_universal_checkpoint log_level managed_gradient_accumulation "
            "memory_breakdown optimizer_name optimizer_params scheduler_name scheduler_params torch_autocast_enabled "
            "use_node_local_storage wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
        ).split()
    },
    "bf16_master_weights_and_gradients": "bfloat16_config.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bfloat16_config.bf16_optimizer_states",
    "checkpoint_serialization_enabled": "checkpoint_config.checkpoint_serialization",
    "dynamic_loss_scale_args": "float16_config.dynamic_loss_scale_args",
    **{
        f"flops_profiler_{name}": f"flops_profiler_config.{name}"
        for name in "detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules".split()
    },
    "fp16_auto_cast": "float16_config.auto_cast",
    "fp16_master_weights_and_gradients": "float16_config.fp16_master_weights_and_grads",
    "initial_dynamic_scale": "float16_config.initial_dynamic_scale",
    "is_sanity_checks_enabled": "zero_config.enable_sanity_checks",
}
# Keys of zero_optimization. The methods' prefix is `zero_`, where the key has that, `stage3_`, `use_` or nothing.
_ZERO_KEYS = (
    "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients elastic_checkpoint "
    "ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings offload_optimizer "
    "offload_param overlap_comm parameter_alignment reduce_bucket_size reduce_scatter round_robin_gradients "
    "save_muon_momentum_buffer_in_memory stage3_allgather_sequential stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold "
    "stage3_param_persistence_threshold stage3_prefetch_bucket_size sub_group_size use_multi_rank_bucket_allreduce "
    "zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights"
).split()
# Switches of unsupported features, which the config rejects.
_NEVER = (
    "is_deepcompile_active is_deepcompile_enabled optimizer_legacy_fusion super_offload checkpoint_writer_enabled"
).split()


def config_of(engine: Any) -> ConfigView:
    """The engine's config as DeepSpeed's object, `engine._config`; created once."""
    if "_config" not in engine.__dict__:
        engine.__dict__["_config"] = ConfigView.of(engine.settings.resolved, engine.dp_world_size)
    view: ConfigView = engine.__dict__["_config"]
    return view


def _key(path: str) -> Callable[[Any], Any]:
    read = attrgetter(path)

    def answer(engine: Any) -> Any:
        value = read(config_of(engine))
        return value() if callable(value) else value

    answer.__doc__ = f"The config's {path}."
    return answer


def _never(engine: Any) -> bool:
    """False: the feature is not supported, and the config rejects it."""
    return False


# Files


def _get_ckpt_name(engine: Any, checkpoints_path: str, tag: str, mp_placeholder: str | None = None) -> str:
    """Path of the model file that this rank reads."""
    from hf_zero.checkpoint.deepspeed.keys import model_file

    name = model_file(engine.groups.shard.rank, engine.zero_optimization_stage(), engine.groups.model_rank)
    return os.path.join(checkpoints_path, str(tag), name if mp_placeholder is None else name.replace("00", "*"))


def _get_zero_ckpt_name(engine: Any, checkpoints_path: str, tag: str) -> str:
    """Path of this rank's optimizer file."""
    from hf_zero.checkpoint.deepspeed.keys import optimizer_file

    rank, part = engine.groups.shard.rank, engine.groups.model_rank
    name = optimizer_file(rank, bf16=engine.bfloat16_enabled(), model_rank=part)
    return os.path.join(checkpoints_path, str(tag), name)


# Weights


def module_state_dict(
    engine: Any,
    destination: dict[str, Any] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
    exclude_frozen_parameters: bool = False,
) -> dict[str, Any]:
    """The model's state dict with whole weights, on every rank. Collective at stage 3, and among ranks that hold parts
    of matrices.

    Args:
        destination: gets the weights and is returned; `prefix` comes before their names.
        keep_vars: the parameters themselves, where ranks have them whole.
    """
    module = engine.module
    if engine.zero_optimization_stage() < 3 and not engine.groups.holds_parts:
        state: dict[str, Any] = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        for name in frozen if exclude_frozen_parameters else ():
            state.pop(prefix + name, None)
        return state
    if keep_vars:
        raise NotImplementedError(
            "module_state_dict(keep_vars=True): this rank has parts of the parameters, so whole ones are copies; leave "
            "keep_vars out, or read engine.module.named_parameters() inside deepspeed.zero.GatheredParameters(...)"
        )
    weights: dict[str, Any] = consolidated_state_dict(module, keeps=True, exclude_frozen=exclude_frozen_parameters)
    weights.update((name, inner.get_extra_state()) for name, inner in with_extra_states(module))
    state = {} if destination is None else destination
    state.update({prefix + name: value for name, value in weights.items()})
    return state


def _consolidated_16bit_state_dict(engine: Any, exclude_frozen_parameters: bool = False) -> Any:
    """Return whole weights on rank 0 and None elsewhere, at every stage. Collective."""
    if engine.zero_optimization_stage() == 3:
        return engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
    if engine.groups.holds_parts:
        return engine.module_view.consolidated(exclude_frozen_parameters)
    if engine.groups.world.rank != 0:
        return None
    return engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)


def _empty_partition_cache(engine: Any) -> None:
    """Release all gathered parameters at stage 3, except persistent ones. Collective."""
    store = engine.module_view.store
    if store is not None:
        store.prepare_update()


# Ranks and groups


def _coalesce_grad_reduction(engine: Any) -> AbstractContextManager[None]:
    """Do nothing: buckets are reduced once per micro-batch anyway, so several backward calls need no context."""
    return nullcontext()


def _get_data_types(engine: Any) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of the model, dtype in which gradients are accumulated)."""
    policy = engine.settings.resolved.precision
    return DTYPES[policy.model], DTYPES[policy.accumulation or policy.model]


def _communication_data_type(engine: Any) -> torch.dtype:
    policy = engine.settings.resolved.precision
    return DTYPES[policy.communication or policy.model]


# What is trained


def _optimizer(engine: Any, caller: str) -> ZeroOptimizer:
    gradients: EngineGradients = engine.gradients
    return gradients.parts(caller).optimizer


def _trained(engine: Any) -> ZeroOptimizer | None:
    assembly: Assembly | None = engine.gradients.assembly
    return assembly.optimizer if assembly is not None else None


def _get_global_grad_norm(engine: Any) -> float | None:
    """Global L2 norm of the last step before clipping; None before the first. Waits for the device."""
    optimizer = _trained(engine)
    return optimizer.grad_norm if optimizer is not None else None


def _was_step_applied(engine: Any) -> bool:
    """Whether the last boundary changed the weights; waits for the device."""
    optimizer = _trained(engine)
    return optimizer is not None and engine.global_steps > 0 and not optimizer.overflow


def _offload_states(
    engine: Any, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
) -> None:
    """Move states that forward does not need to host memory, for example before generation; the next step reloads them.

    Args:
        include: members of `OffloadStateTypeEnum`; default: all except the model's weights.
        non_blocking: accepted; the copies are complete when this returns.
    """
    if str(getattr(device, "value", device)) != "cpu":
        raise ValueError(f"offload_states(device={device!r}): only host memory (cpu) serves")
    from hf_zero.api.offload_states import OffloadStates  # few programs need it

    parts = engine.gradients.parts("offload_states")
    if engine.gradients.offloaded is None:
        engine.gradients.offloaded = OffloadStates(parts.optimizer, parts.reducer)
    engine.gradients.offloaded.send(include, pinned=pin_memory)


def _reload_states(engine: Any, non_blocking: bool = False) -> None:
    """Move the states of `offload_states` back, if there are any."""
    engine.gradients.bring_back()


def _get_type(engine: Any) -> list[Any]:
    """`type` of every param group."""
    return [group.get("type") for group in _optimizer(engine, "get_type").param_groups]


def _get_wall_clock_timers(engine: Any) -> dict[str, float]:
    """Times of the last update in milliseconds; empty without wall_clock_breakdown. Waits for the device."""
    watching = engine.training_features.named("profiling")
    last = watching.last_breakdown() if watching is not None else None
    return dict(last.timers) if last is not None else {}


def _throughput_timer(engine: Any) -> Any:
    """Created on first use. The engine starts and stops it around its updates from then on."""
    from hf_zero.profiling.timers import ThroughputTimer

    options = type("Enabled", (), {"enabled": True, "synchronized": False})()
    engine.tput_timer = ThroughputTimer(options, engine.settings.samples_per_update(), start_step=0)
    engine.tput_timer.start()
    return engine.tput_timer


def _offloads(engine: Any, name: str, device: str) -> bool:
    section = getattr(config_of(engine).zero_config, name)
    return section is not None and section.device == device


# Batches


def deepspeed_io(
    engine: Any,
    dataset: Any,
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Any = None,
    collate_fn: Any = None,
    num_local_io_workers: int | None = None,
) -> Any:
    """DeepSpeed's method: a DataLoader over this rank's part of `dataset`, or over the samples of `data_sampler`.

    Args:
        batch_size: default: the micro-batch; without a size and a sampler, the result is that of `training_loader`.
        route: "train" shuffles.
    """
    size = batch_size or engine.settings.train_micro_batch_size_per_gpu()
    if data_sampler is None and batch_size is None and route == "train":
        return training_loader(engine, dataset, collate_fn)
    if data_sampler is None:
        ranks = engine.groups.data
        data_sampler = DistributedSampler(dataset, num_replicas=ranks.size, rank=ranks.rank, shuffle=route == "train")
    pinned = pin_memory and engine.device.type != "cpu"
    options = {"num_workers": num_local_io_workers or 0, "pin_memory": pinned, "collate_fn": collate_fn}
    return DataLoader(dataset, batch_size=size, sampler=data_sampler, **options)


# Training features


def _has(engine: Any, feature: str) -> bool:
    return engine.training_features.named(feature) is not None


def _tuning(engine: Any, key: str, default: Any) -> Any:
    return (engine.config.get("autotuning") or {}).get(key, default)


def _section(engine: Any, name: str) -> dict[str, Any]:
    section: dict[str, Any] = (engine.config.get("data_efficiency") or {}).get(name) or {}
    return section


def _sampled_curriculum(engine: Any, caller: str) -> Any:
    feature = engine.training_features.named("data_sampler")
    if feature is None:
        raise RuntimeError(
            f"engine.{caller}() needs data_efficiency.data_sampling.curriculum_learning to be switched on in the config"
        )
    return feature


def _set_custom_curriculum(engine: Any, schedule_func_dict: Any) -> None:
    """Set functions from update number to difficulty, by metric (seqlen: of the section curriculum_learning)."""
    lengths = engine.training_features.named("curriculum_learning")
    if lengths is not None and "seqlen" in schedule_func_dict:
        lengths.set_custom_get_difficulty(schedule_func_dict["seqlen"])
        return
    _sampled_curriculum(engine, "set_custom_curriculum_learning_schedule").set_custom(schedule_func_dict)


def _set_post_process(engine: Any, post_process_func: Any) -> None:
    """Set a function of (batch, {"current_difficulties": {metric: difficulty}}) that returns the training batch."""
    _sampled_curriculum(engine, "set_data_post_process_func").post_process = post_process_func


VALUES: dict[str, Callable[[Any], Any]] = {
    "_config": config_of,
    "_global_grad_norm": lambda engine: engine.get_global_grad_norm(),
    "_step_applied": lambda engine: engine.was_step_applied(),
    "basic_optimizer": lambda engine: getattr(_trained(engine), "optimizer", None),
    "checkpoint_mp_rank": lambda engine: engine.groups.model_rank,
    "client_lr_scheduler": lambda engine: engine.lr_scheduler if engine.settings.resolved.scheduler is None else None,
    "collate_fn": lambda engine: getattr(engine.training_dataloader, "collate_fn", None),
    "communication_data_type": _communication_data_type,
    "data_parallel_group": lambda engine: (
        None if engine.groups.sample.size > 1 else getattr(engine.mpu, "get_data_parallel_group", get_world_group)()
    ),
    "dist_backend": lambda engine: BACKENDS.get(engine.device.type, "gloo"),
    "dont_change_device": lambda engine: False,
    "dp_world_size": lambda engine: engine.groups.data.size,
    "enable_backward_allreduce": lambda engine: True,
    "expert_data_parallel_group": lambda engine: {},
    "expert_parallel_group": lambda engine: {},
    "global_rank": lambda engine: engine.groups.world.rank,
    "gradient_average": lambda engine: engine.settings.resolved.gradients.average,
    "has_moe_layers": lambda engine: False,
    "inside_no_sync_ctxt": lambda engine: not engine.gradients.syncs,
    "is_compiled": lambda engine: engine.module._compiled_call_impl is not None,
    "local_rank": lambda engine: get_local_rank(),
    "mesh_device": lambda engine: None,
    "moe_layers": lambda engine: [],
    "mp_world_size": lambda engine: engine.groups.model_size,
    "mpu": lambda engine: None,
    "num_experts": lambda engine: [],
    "param_names": lambda engine: {p: name for name, p in engine.module.named_parameters()},
    "pipeline_parallelism": lambda engine: False,
    "random_ltd_scheduler": lambda engine: engine.training_features.named("random_ltd"),
    "save_non_zero_checkpoint": lambda engine: engine.zero_optimization_stage() == 3 or engine.groups.world.rank == 0,
    "save_zero_checkpoint": lambda engine: engine.zero_optimization(),
    "seq_data_parallel_group": lambda engine: get_world_group(),
    "seq_dp_world_size": lambda engine: engine.groups.world.size,
    "seq_parallel_group": lambda engine: process_group_of(engine.groups),
    "sequence_parallel_size": lambda engine: engine.groups.sample.size,
    "tput_timer": _throughput_timer,
    "training_data": lambda engine: getattr(engine.training_dataloader, "dataset", None),
    "use_ds_comm": lambda engine: False,
    "world_size": lambda engine: engine.groups.world.size,
}
METHODS: dict[str, Callable[..., Any]] = {
    **{name: _key(path) for name, path in _KEYS.items()},
    **{f"zero_{re.sub('^(stage3|use|zero)_', '', key)}": _key(f"zero_config.{key}") for key in _ZERO_KEYS},
    **dict.fromkeys(_NEVER, _never),
    "autotuning_enabled": lambda engine: bool(_tuning(engine, "enabled", False)),
    "autotuning_end_profile_step": lambda engine: _tuning(engine, "end_profile_step", 5),
    "autotuning_metric": lambda engine: _tuning(engine, "metric", "throughput"),
    "autotuning_metric_path": lambda engine: _tuning(engine, "metric_path", None),
    "autotuning_start_profile_step": lambda engine: _tuning(engine, "start_profile_step", 3),
    "curriculum_learning_config": lambda engine: _section(engine, "data_sampling").get("curriculum_learning") or {},
    "curriculum_learning_enabled": lambda engine: _has(engine, "data_sampler"),
    "data_efficiency_config": lambda engine: engine.config.get("data_efficiency") or {},
    "data_efficiency_enabled": lambda engine: _has(engine, "data_sampler") or _has(engine, "random_ltd"),
    "data_sampling_config": lambda engine: _section(engine, "data_sampling"),
    "data_sampling_enabled": lambda engine: _has(engine, "data_sampler"),
    "random_ltd_config": lambda engine: _section(engine, "data_routing").get("random_ltd") or {},
    "random_ltd_enabled": lambda engine: _has(engine, "random_ltd"),
    "random_ltd_initialize": lambda engine: None,  # its layers are found when the engine is created
    "set_custom_curriculum_learning_schedule": _set_custom_curriculum,
    "set_data_post_process_func": _set_post_process,
    "_consolidated_16bit_state_dict": _consolidated_16bit_state_dict,
    "_get_ckpt_name": _get_ckpt_name,
    "_get_optimizer_ckpt_name": lambda engine, path, tag, expp_rank=0: _get_zero_ckpt_name(engine, path, tag),
    "_get_zero_ckpt_name": _get_zero_ckpt_name,
    "autotp_size": lambda engine: engine.groups.model_size if engine.groups.model_size > 1 else 0,
    "bfloat16_enabled": lambda engine: engine.settings.resolved.precision.model == "bf16",
    "coalesce_grad_reduction": _coalesce_grad_reduction,
    "collect_python_gc": lambda engine: None,
    "deepspeed_io": deepspeed_io,
    "dynamic_loss_scale": lambda engine: _optimizer(engine, "dynamic_loss_scale").loss_scaler.dynamic,
    "empty_partition_cache": _empty_partition_cache,
    "fp16_enabled": lambda engine: engine.settings.resolved.precision.model == "fp16",
    "get_data_parallel_rank": lambda engine: engine.groups.data.rank,
    "get_data_types": _get_data_types,
    "get_global_grad_norm": _get_global_grad_norm,
    "get_model_parallel_rank": lambda engine: engine.groups.model_rank,
    "get_sequence_parallel_group": lambda engine: process_group_of(engine.groups),
    "get_tensor_parallel_rank": lambda engine: engine.groups.along("tensor").rank,
    "get_type": _get_type,
    "get_wall_clock_timers": _get_wall_clock_timers,
    "gradient_clipping": lambda engine: engine.settings.resolved.gradients.clip_norm,
    "is_first_weights_partition_group": lambda engine: engine.groups.replica == 0,
    "is_iterable_style_dataset": lambda engine, obj: isinstance(obj, IterableDataset),
    "is_map_style_dataset": lambda engine, obj: isinstance(obj, Dataset) and hasattr(obj, "__getitem__"),
    "load_module_state_dict": load_module_state_dict,
    "module_state_dict": module_state_dict,
    "loss_scale": lambda engine: float(_optimizer(engine, "loss_scale").loss_scale),
    "offload_states": _offload_states,
    "postscale_gradients": lambda engine: not config_of(engine).prescale_gradients,
    "reload_states": _reload_states,
    "steps_per_print": lambda engine: engine.settings.resolved.config.steps_per_print,
    "torch_autocast_dtype": lambda engine: DTYPES.get(str(config_of(engine).torch_autocast_dtype)),
    "was_step_applied": _was_step_applied,
    "zenflow_config": lambda engine: None,
    "zero_cpu_offload": lambda engine: _offloads(engine, "offload_optimizer", "cpu"),
    "zero_nvme_offload_optimizer": lambda engine: _offloads(engine, "offload_optimizer", "nvme"),
    "zero_optimization": lambda engine: engine.settings.resolved.zero.stage > 0,
    "zero_optimization_partition_gradients": lambda engine: engine.zero_optimization_stage() >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.zero_optimization_stage() >= 3,
    "zero_optimization_stage": lambda engine: engine.settings.resolved.zero.stage,
    "zero_partial_offload": lambda engine: getattr(config_of(engine).zero_config.offload_optimizer, "ratio", 1.0),
    "zero_use_cpu_optimizer": lambda engine: _offloads(engine, "offload_optimizer", "cpu"),
}
PARTS = {
    "gradients": "is_gradient_accumulation_boundary no_sync scale set_gradient_accumulation_boundary take_reached",
    "module_view": "_zero3_consolidated_16bit_state_dict save_16bit_model save_fp16_model "
    "zero_gather_16bit_weights_on_model_save",
    "settings": "amp_enabled get_batch_info gradient_accumulation_steps set_train_batch_size "
    "set_train_micro_batch_size train_batch_size train_micro_batch_size_per_gpu",
}
SURFACE = Surface("engine", VALUES, METHODS, ENGINE, PARTS)
