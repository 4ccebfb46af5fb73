"""Questions about an engine's config that DeepSpeed's engine answers by methods."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.api.engine import ZeroEngine
from hf_zero.config.objects import ConfigView
from hf_zero.precision import DTYPES


class ConfigQueries(ZeroEngine):
    """Each method returns the value of the key that it is named after, as the config has it after all defaults."""

    @property
    def _config(self) -> ConfigView:
        """The config as DeepSpeed's object; created once."""
        view: ConfigView | None = self.__dict__.get("_config_view")
        if view is None:
            view = self.__dict__["_config_view"] = ConfigView.of(self.settings.resolved, self.groups.data.size)
        return view

    # Top-level keys

    def aio_config(self) -> Any:
        return self._config.aio_config

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._config.checkpoint_tag_validation_enabled

    def checkpoint_tag_validation_fail(self) -> bool:
        return self._config.checkpoint_tag_validation_fail

    def dataloader_drop_last(self) -> bool:
        return self.settings.resolved.config.dataloader_drop_last

    def dump_state(self) -> bool:
        return self.settings.resolved.config.dump_state

    def gradient_predivide_factor(self) -> float:
        return self.settings.resolved.config.gradient_predivide_factor

    def load_universal_checkpoint(self) -> bool:
        return self._config.load_universal_checkpoint

    def log_level(self) -> str | None:
        return self.settings.resolved.config.log_level

    def managed_gradient_accumulation(self) -> bool:
        return self.settings.resolved.config.managed_gradient_accumulation

    def memory_breakdown(self) -> bool:
        return self.settings.resolved.config.memory_breakdown

    def optimizer_name(self) -> str | None:
        return self._config.optimizer_name

    def optimizer_params(self) -> dict[str, Any] | None:
        return self._config.optimizer_params

    def scheduler_name(self) -> str | None:
        return self._config.scheduler_name

    def scheduler_params(self) -> dict[str, Any] | None:
        return self._config.scheduler_params

    def torch_autocast_enabled(self) -> bool:
        return self._config.torch_autocast_enabled

    def use_node_local_storage(self) -> bool:
        return self._config.use_node_local_storage

    def wall_clock_breakdown(self) -> bool:
        return self.settings.resolved.config.wall_clock_breakdown

    def zero_allow_untested_optimizer(self) -> bool:
        return self.settings.resolved.config.zero_allow_untested_optimizer

    def zero_force_ds_cpu_optimizer(self) -> bool:
        return self.settings.resolved.config.zero_force_ds_cpu_optimizer

    def steps_per_print(self) -> int | None:
        return self.settings.resolved.config.steps_per_print

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return DTYPES.get(str(self._config.torch_autocast_dtype))

    def gradient_clipping(self) -> float:
        return self.settings.resolved.gradients.clip_norm

    # Precision

    def bf16_master_weights_and_gradients(self) -> bool:
        return self._config.bfloat16_config.bf16_master_weights_and_grads

    def bf16_optimizer_states(self) -> bool:
        return self._config.bfloat16_config.bf16_optimizer_states

    def fp16_auto_cast(self) -> bool:
        return self._config.float16_config.auto_cast

    def fp16_master_weights_and_gradients(self) -> bool:
        return self._config.float16_config.fp16_master_weights_and_grads

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        return self._config.float16_config.dynamic_loss_scale_args()

    def initial_dynamic_scale(self) -> int:
        return self._config.float16_config.initial_dynamic_scale()

    def bfloat16_enabled(self) -> bool:
        return self.settings.resolved.precision.model == "bf16"

    def fp16_enabled(self) -> bool:
        return self.settings.resolved.precision.model == "fp16"

    def amp_enabled(self) -> bool:
        """Whether forward runs under torch.autocast."""
        return self.settings.amp_enabled()

    @property
    def communication_data_type(self) -> torch.dtype:
        policy = self.settings.resolved.precision
        return DTYPES[policy.communication or policy.model]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the model, dtype in which gradients are accumulated)."""
        policy = self.settings.resolved.precision
        return DTYPES[policy.model], DTYPES[policy.accumulation or policy.model]

    # Batch sizes

    def train_batch_size(self) -> int:
        """Samples per update on all ranks. A sample that several ranks share (sequence and tensor parallelism) counts
        once for each of them."""
        return self.settings.train_batch_size()

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self.settings.train_micro_batch_size_per_gpu()

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self.settings.gradient_accumulation_steps()

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        return self.settings.get_batch_info()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of accumulation steps so that the next update has `train_batch_size` samples.

        Args:
            train_batch_size: a multiple of the micro-batch times the number of ranks.

        Raises:
            ValueError: for any other number.
            WrongMoment: if gradients of the next update are pending.
        """
        self.settings.set_train_batch_size(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward, and the train batch size with it.

        Raises:
            ValueError: unless it is positive.
        """
        self.settings.set_train_micro_batch_size(micro_batch_size)

    # ZeRO

    def zero_optimization(self) -> bool:
        """Whether the stage is 1, 2 or 3."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self.settings.resolved.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() >= 3

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states are in host memory."""
        return self._offloads("cpu")

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether optimizer states are in host memory."""
        return self._offloads("cpu")

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer states are on a drive."""
        return self._offloads("nvme")

    def _offloads(self, device: str) -> bool:
        section = self._config.zero_config.offload_optimizer
        return section is not None and section.device == device

    def zero_partial_offload(self) -> float:
        """The share of optimizer states that is offloaded; with "auto" 1.0 until the first update."""
        section, assembly = self._config.zero_config.offload_optimizer, self.gradients.assembly
        auto = None if assembly is None else assembly.step.auto_ratio
        if auto is not None and auto.chosen is not None:
            return auto.chosen.ratio
        return getattr(section, "first_ratio", 1.0)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether saving the model gathers whole weights that no rank has: at stage 3 if the config says so, and always
        with tensor parallelism. Otherwise every rank has whole weights anyway."""
        return self.module_view.zero_gather_16bit_weights_on_model_save()

    def zero_allgather_bucket_size(self) -> int:
        return self._config.zero_config.allgather_bucket_size

    def zero_allgather_partitions(self) -> bool:
        return self._config.zero_config.allgather_partitions

    def zero_compute_grad_norm(self) -> bool:
        return self._config.zero_config.compute_grad_norm

    def zero_contiguous_gradients(self) -> bool:
        return self._config.zero_config.contiguous_gradients

    def zero_elastic_checkpoint(self) -> bool:
        return self._config.zero_config.elastic_checkpoint

    def zero_ignore_unused_parameters(self) -> bool:
        return self._config.zero_config.ignore_unused_parameters

    def zero_legacy_stage1(self) -> bool:
        return self._config.zero_config.legacy_stage1

    def zero_load_from_fp32_weights(self) -> bool:
        return self._config.zero_config.load_from_fp32_weights

    def zero_log_trace_cache_warnings(self) -> bool:
        return self._config.zero_config.log_trace_cache_warnings

    def zero_offload_optimizer(self) -> Any:
        return self._config.zero_config.offload_optimizer

    def zero_offload_param(self) -> Any:
        return self._config.zero_config.offload_param

    def zero_overlap_comm(self) -> bool | None:
        return self._config.zero_config.overlap_comm

    def zero_parameter_alignment(self) -> bool:
        return self._config.zero_config.parameter_alignment

    def zero_reduce_bucket_size(self) -> int:
        return self._config.zero_config.reduce_bucket_size

    def zero_reduce_scatter(self) -> bool:
        return self._config.zero_config.reduce_scatter

    def zero_round_robin_gradients(self) -> bool:
        return self._config.zero_config.round_robin_gradients

    def zero_save_muon_momentum_buffer_in_memory(self) -> bool:
        return self._config.zero_config.save_muon_momentum_buffer_in_memory

    def zero_allgather_sequential(self) -> bool:
        return self._config.zero_config.stage3_allgather_sequential

    def zero_max_live_parameters(self) -> int:
        return self._config.zero_config.stage3_max_live_parameters

    def zero_max_reuse_distance(self) -> int:
        return self._config.zero_config.stage3_max_reuse_distance

    def zero_model_persistence_threshold(self) -> int:
        return self._config.zero_config.stage3_model_persistence_threshold

    def zero_module_granularity_threshold(self) -> int:
        return self._config.zero_config.stage3_module_granularity_threshold

    def zero_param_persistence_threshold(self) -> int:
        return self._config.zero_config.stage3_param_persistence_threshold

    def zero_prefetch_bucket_size(self) -> int:
        return self._config.zero_config.stage3_prefetch_bucket_size

    def zero_sub_group_size(self) -> int:
        return self._config.zero_config.sub_group_size

    def zero_multi_rank_bucket_allreduce(self) -> bool:
        return self._config.zero_config.use_multi_rank_bucket_allreduce

    def zero_hpz_partition_size(self) -> int:
        return self._config.zero_config.zero_hpz_partition_size

    def zero_quantized_gradients(self) -> bool:
        return self._config.zero_config.zero_quantized_gradients

    def zero_quantized_nontrainable_weights(self) -> bool:
        return self._config.zero_config.zero_quantized_nontrainable_weights

    def zero_quantized_weights(self) -> bool:
        return self._config.zero_config.zero_quantized_weights

    def is_sanity_checks_enabled(self) -> bool:
        return self._config.zero_config.enable_sanity_checks

    # Other sections

    def checkpoint_serialization_enabled(self) -> bool:
        return self._config.checkpoint_config.checkpoint_serialization

    def flops_profiler_detailed(self) -> bool:
        return self._config.flops_profiler_config.detailed

    def flops_profiler_enabled(self) -> bool:
        return self._config.flops_profiler_config.enabled

    def flops_profiler_module_depth(self) -> int:
        return self._config.flops_profiler_config.module_depth

    def flops_profiler_output_file(self) -> str | None:
        return self._config.flops_profiler_config.output_file

    def flops_profiler_profile_step(self) -> int:
        return self._config.flops_profiler_config.profile_step

    def flops_profiler_recompute_fwd_factor(self) -> float:
        return self._config.flops_profiler_config.recompute_fwd_factor

    def flops_profiler_top_modules(self) -> int:
        return self._config.flops_profiler_config.top_modules

    def autotuning_enabled(self) -> bool:
        return bool(self._raw("autotuning").get("enabled", False))

    def autotuning_start_profile_step(self) -> Any:
        return self._raw("autotuning").get("start_profile_step", 3)

    def autotuning_end_profile_step(self) -> Any:
        return self._raw("autotuning").get("end_profile_step", 5)

    def autotuning_metric(self) -> Any:
        return self._raw("autotuning").get("metric", "throughput")

    def autotuning_metric_path(self) -> Any:
        return self._raw("autotuning").get("metric_path", None)

    def data_efficiency_config(self) -> dict[str, Any]:
        return self._raw("data_efficiency")

    def data_sampling_config(self) -> dict[str, Any]:
        return self._raw("data_efficiency", "data_sampling")

    def curriculum_learning_config(self) -> dict[str, Any]:
        return self._raw("data_efficiency", "data_sampling", "curriculum_learning")

    def random_ltd_config(self) -> dict[str, Any]:
        return self._raw("data_efficiency", "data_routing", "random_ltd")

    def _raw(self, *path: str) -> dict[str, Any]:
        """A section as it was written."""
        section: dict[str, Any] = dict(self.config)
        for name in path:
            section = section.get(name) or {}
        return section

    # Features that do not exist here, and that the config refuses

    def is_deepcompile_enabled(self) -> bool:
        return False

    def is_deepcompile_active(self) -> bool:
        return False

    def optimizer_legacy_fusion(self) -> bool:
        return False

    def super_offload(self) -> bool:
        return False

    def checkpoint_writer_enabled(self) -> bool:
        return False

    def zenflow_config(self) -> None:
        return None
