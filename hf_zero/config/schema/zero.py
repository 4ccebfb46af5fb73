"""The zero_optimization section and its offload blocks."""

from __future__ import annotations

from typing import Literal

from hf_zero.config.schema.fields import (
    LARGEST,
    Count,
    Flag,
    Fraction,
    Free,
    Names,
    PathText,
    Positive,
    PositiveSize,
    Section,
    Size,
    Whole,
    detail,
    ignored,
    supported,
    unsupported,
)

_THREE = (3,)
_BELOW_THREE = (0, 1, 2)
_SHARDED = (1, 2, 3)


_INTERNAL = "hf_zero.offload_threads sets the threads of the update"


class OffloadOptimizer(Section):
    """Where master weights, optimizer states and reduced gradients live: on the device, in host memory, or on NVMe."""

    device: Literal["none", "cpu", "nvme"] | None = supported(
        "none", "Place of the optimizer states: none, cpu (stages 0-3) or nvme (stages 1-3)."
    )
    nvme_path: PathText | None = supported(None, "nvme: an existing folder on the drive.")
    buffer_count: Positive = supported(
        4, "nvme: vectors of one sub-group in memory; Adam has 3. pipeline_read and pipeline_write each add as many."
    )
    pin_memory: Flag = supported(True, "Page-locked host memory, where there is a GPU.")
    pipeline_read: Flag | None = supported(None, "nvme: read the next sub-group during an update. Unset: yes.")
    pipeline_write: Flag | None = supported(None, "nvme: write the last sub-group during an update. Unset: yes.")
    fast_init: Flag = supported(
        False, "nvme: only reserve space for the optimizer states at the start, instead of writing it once."
    )
    ratio: Fraction = supported(
        1.0, "Fraction of the elements whose states are offloaded and updated on the CPU; the rest stays on the device."
    )
    super_offload: Flag = unsupported(
        False, "Variant for machines that share memory between CPU and GPU.", why="its updates may be rolled back"
    )
    cpuadam_cores_perc: Fraction = ignored(0.8, "Fraction of the CPU cores for that variant.", why=_INTERNAL)

    @property
    def reads_ahead(self) -> bool:
        return self.pipeline_read is not False

    @property
    def writes_behind(self) -> bool:
        return self.pipeline_write is not False


class OffloadParam(Section):
    """Where parameters live between uses; stage 3 only."""

    device: Literal["none", "cpu", "nvme"] | None = supported("none", "Place of the parameters: none, cpu or nvme.")
    nvme_path: PathText | None = supported(None, "nvme: an existing folder on the drive.")
    buffer_count: Positive = supported(
        5, "nvme: maximum number of shards in memory for transfers (at least three).", unit="buffers"
    )
    buffer_size: PositiveSize = supported(
        100_000_000, "nvme: buffer_count times this limits the total size of those shards.", unit="elements"
    )
    max_in_cpu: Size = supported(
        1_000_000_000, "nvme: this part of a rank's shards stays in host memory.", unit="elements"
    )
    pin_memory: Flag = supported(True, "Page-locked host memory, where there is a GPU.")

    @property
    def buffer_numel(self) -> int:
        """The total number of elements of all buffers."""
        return self.buffer_count * self.buffer_size


class LeafModule(Section):
    """Modules that stage 3 gathers as one unit."""

    classes: Names = detail([], "Class names.")
    names: Names = detail([], "Module names.")
    name_suffixes: Names = detail([], "Suffixes of module names.")


class LocoParam(Section):
    """Error feedback of quantized gradients."""

    err_beta: Fraction = supported(0.8, "Decay of the moving average of errors; below 1.")
    reset_T: Positive = supported(1024, "Errors are reset after this many reductions of a bucket.")


class Zero(Section):
    """What is sharded over the ranks, and how it is communicated."""

    stage: Whole = supported(0, "What is sharded: 0 nothing, 1 optimizer states, 2 + gradients, 3 + parameters.")

    reduce_bucket_size: Positive = supported(
        500_000_000, "Size of a bucket of gradients.", unit="elements", stages=_BELOW_THREE
    )
    allgather_bucket_size: Positive = supported(
        500_000_000,
        "Size of a bucket of parameters; the smaller of the two sizes is used for both.",
        unit="elements",
        stages=_BELOW_THREE,
    )
    overlap_comm: Flag | None = supported(None, "Reduce gradients while backward runs. Unset: yes, at every stage.")
    ignore_unused_parameters: Flag = supported(True, "false: a trainable parameter without gradient is an error.")

    allgather_partitions: Flag = ignored(
        True, "Gather updated parameters, or broadcast them.", why="parameters are always gathered in place"
    )
    reduce_scatter: Flag = ignored(
        True,
        "Reduce-scatter gradients, or all-reduce them.",
        why="stages 1-2 always reduce-scatter, stage 0 all-reduces",
    )
    contiguous_gradients: Flag = ignored(
        True, "Copy gradients into one buffer.", why="gradients always go to contiguous buckets"
    )
    round_robin_gradients: Flag = ignored(
        False,
        "Spread parameters over owners.",
        why="every bucket is cut into equal shards, so all ranks share the work; checkpoint files have this order",
        met=True,
    )
    use_multi_rank_bucket_allreduce: Flag = ignored(
        True, "Fuse slices of several owners.", why="one reduce-scatter serves all owners"
    )
    parameter_alignment: Flag = ignored(
        False, "Align parameters in flat buffers.", why="our layout sets the alignment", met=True
    )
    compute_grad_norm: Flag = ignored(True, "Compute the gradient norm.", why="the norm is always computed")
    load_from_fp32_weights: Flag = ignored(True, "Load masters from their fp32 copies.", why="they always are")
    elastic_checkpoint: Flag = ignored(
        False, "Checkpoints for another world size.", why="every checkpoint loads at any world size and stage", met=True
    )
    cpu_offload_use_pin_memory: Flag | None = ignored(
        None, "Deprecated.", why="pinning is set by offload_optimizer.pin_memory and offload_param.pin_memory"
    )
    legacy_stage1: Flag = unsupported(False, "Stage 1 of old releases.", why="there is one stage 1")

    offload_optimizer: OffloadOptimizer | None = supported(None, "Place of the optimizer states.")
    offload_param: OffloadParam | None = supported(
        None,
        "Place of the parameters (stage 3).",
        why="to offload at other stages, use offload_optimizer",
        stages=_THREE,
    )

    sub_group_size: Count = supported(
        1_000_000_000,
        "Size of the sub-groups of an offloaded update; at stage 3 also of the tensors in checkpoint files.",
        unit="elements",
    )
    stage3_max_live_parameters: Size = supported(
        1_000_000_000, "Units stay gathered up to this total size.", unit="elements", stages=_THREE
    )
    stage3_max_reuse_distance: Size = supported(
        1_000_000_000, "A unit that is used again within this distance stays gathered.", unit="elements", stages=_THREE
    )
    stage3_prefetch_bucket_size: Size = supported(
        50_000_000,
        "Maximum size of the prefetched units; above 0: at least one unit (docs/stage3.md).",
        unit="elements",
        stages=_THREE,
    )
    stage3_param_persistence_threshold: Size = supported(
        100_000, "Parameters up to this size stay gathered.", unit="elements", stages=_THREE
    )
    stage3_model_persistence_threshold: Size = supported(
        LARGEST, "Limit for all parameters that stay gathered.", unit="elements", stages=_THREE
    )
    stage3_gather_16bit_weights_on_model_save: Flag = supported(
        False,
        "Gather whole weights when the model is saved.",
        why="whole weights are always saved",
        stages=_THREE,
        met=True,
    )
    stage3_module_granularity_threshold: Count = ignored(
        0,
        "Fetch modules finer than this as one.",
        why="whole blocks are gathered as one anyway",
        stages=_THREE,
        met=True,
    )
    stage3_use_all_reduce_for_fetch_params: Flag = ignored(
        False, "Gather by all-reduce.", why="a unit is one all-gather", stages=_THREE
    )
    stage3_allgather_sequential: Flag = ignored(
        False, "Gather one parameter at a time.", why="a unit is one all-gather", stages=_THREE
    )
    memory_efficient_linear: Flag = ignored(
        True, "Linear layers that save less for backward.", why="linear layers save no copy", stages=_THREE
    )
    override_module_apply: Flag = ignored(
        True, "Module.apply gathers what it touches.", why="reading a parameter in zero.Init gathers it", stages=_THREE
    )
    pipeline_loading_checkpoint: Flag = ignored(
        False,
        "Ranks of a node load in turn.",
        why="no rank loads more than one tensor at a time",
        stages=_THREE,
        met=True,
    )
    log_trace_cache_warnings: Flag = ignored(
        False, "Diagnostics of the gather order.", why="the order is fixed and has no cache", stages=_THREE, met=True
    )
    enable_sanity_checks: Flag = ignored(False, "Diagnostics.", why="the checks are always on", stages=_THREE, met=True)
    leaf_module: LeafModule | None = supported(None, "Modules gathered as one unit.", stages=_THREE)
    save_muon_momentum_buffer_in_memory: Flag = supported(False, "Muon under NVMe.", stages=_THREE)

    zero_hpz_partition_size: Count = supported(
        1,
        "hpZ: groups of this many ranks of a host keep secondary shards and gather among themselves; 0 and 1: off.",
        why="every rank has all parameters",
        unit="ranks",
        stages=_THREE,
    )
    zero_quantized_weights: Flag = supported(
        False, "qwZ: gather weights quantized to int8; shards and masters stay exact.", stages=_THREE
    )
    zero_quantized_nontrainable_weights: Flag = supported(
        False, "Keep and gather frozen weights in int8.", stages=_THREE
    )
    zero_quantized_gradients: Flag = supported(
        False,
        "qgZ: reduce gradients in int4 (hf_zero.quantized_gradient_bits), within a host and then across hosts.",
        stages=_THREE,
    )
    zeropp_loco_param: LocoParam | None = supported(
        None, "LoCo: add the quantization errors of gradients to later gradients.", stages=_THREE
    )
    mics_shard_size: Whole = supported(
        -1,
        "MiCS: shard over groups of this many ranks, each with a copy of the model's states; -1: over all ranks. The "
        "same as hf_zero.shard_group.",
        why="nothing is sharded",
        unit="ranks",
        stages=_SHARDED,
    )
    mics_hierarchical_params_gather: Flag = supported(
        False,
        "MiCS: if a group spans hosts, weights are sent across once per update, and gathers stay within a host: "
        "zero_hpz_partition_size with the ranks of a host.",
        stages=_THREE,
    )
    zenflow: Free | None = unsupported(
        None, "Delayed updates.", why="every update is complete; use offload_optimizer alone", switch=None
    )
