"""The zero_optimization section and its offload blocks, and the groups of ranks that share states and gathers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from hf_zero.config.errors import Edit, Problem
from hf_zero.config.rules import RANKS, Advice, Ranks, Rule, Several
from hf_zero.config.schema.batch import TENSOR
from hf_zero.config.schema.checkpoint import Aio
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
    Size,
    StrictSection,
    Whole,
    detail,
    fraction_or,
    ignored,
    supported,
    unsupported,
)
from hf_zero.config.schema.precision import PrecisionPolicy, precision_of

if TYPE_CHECKING:
    from hf_zero.config.schema.root import HfZero, Root

_SHARDED = (1, 2, 3)
on_nvme = partial(supported, beside=("device", ("nvme",)))
below_3 = partial(supported, stages=(0, 1, 2))
at_3 = partial(supported, stages=(3,))
idle_at_3 = partial(ignored, stages=(3,))
met_at_3 = partial(ignored, stages=(3,), met=True)
STAGE, MICS, SHARD_GROUP = "zero_optimization.stage", "zero_optimization.mics_shard_size", "hf_zero.shard_group"
HPZ = "zero_optimization.zero_hpz_partition_size"
GROUP_KEYS = (MICS, SHARD_GROUP)
OptimizerSees = Literal["whole_tensors", "flat_shards"]
GroupSize = int | Literal["host"] | None
Ratio = Annotated[float | Literal["auto"], BeforeValidator(fraction_or("auto"))]


_INTERNAL = "hf_zero.offload_threads sets the threads of the update"


class OffloadOptimizer(StrictSection):
    """Where master weights, optimizer states and reduced gradients live: on the device, in host memory, or on NVMe."""

    device: Literal["none", "cpu", "nvme"] | None = supported(
        "none", "Place of the optimizer states: none, cpu (stages 0-3) or nvme (stages 1-3)."
    )
    nvme_path: PathText | None = on_nvme(None, "nvme: an existing folder on the drive.")
    buffer_count: Positive = on_nvme(
        4, "nvme: vectors of one sub-group in memory; Adam has 3. pipeline_read and pipeline_write each add as many."
    )
    pin_memory: Flag = supported(True, "Page-locked host memory, where there is a GPU.")
    pipeline_read: Flag | None = on_nvme(None, "nvme: read the next sub-group during an update. Unset: yes.")
    pipeline_write: Flag | None = on_nvme(None, "nvme: write the last sub-group during an update. Unset: yes.")
    fast_init: Flag = on_nvme(
        False, "nvme: only reserve space for the optimizer states at the start, instead of writing it once."
    )
    ratio: Ratio = supported(
        1.0,
        "Fraction of the elements whose states are offloaded and updated on the CPU; the rest stays on the device. "
        '"auto": everything is offloaded for the first update, which shows what else the device has to hold; then as '
        "many buckets as fit move to it (docs/offload.md).",
    )
    super_offload: Flag = unsupported(
        False, "Variant for machines that share memory between CPU and GPU.", why="its updates may be rolled back"
    )
    cpuadam_cores_perc: Fraction = ignored(0.8, "Fraction of the CPU cores for that variant.", why=_INTERNAL)

    @property
    def is_off(self) -> bool:
        return self.device in (None, "none")

    @property
    def first_ratio(self) -> float:
        """The ratio of the first update; with "auto" it is 1."""
        return 1.0 if self.ratio == "auto" else self.ratio

    @property
    def reads_ahead(self) -> bool:
        return self.pipeline_read is not False

    @property
    def writes_behind(self) -> bool:
        return self.pipeline_write is not False


class OffloadParam(StrictSection):
    """Where parameters live between uses; stage 3 only."""

    device: Literal["none", "cpu", "nvme"] | None = supported("none", "Place of the parameters: none, cpu or nvme.")
    nvme_path: PathText | None = on_nvme(None, "nvme: an existing folder on the drive.")
    buffer_count: Positive = on_nvme(
        5, "nvme: maximum number of shards in memory for transfers (at least three).", unit="buffers"
    )
    buffer_size: PositiveSize = on_nvme(
        100_000_000, "nvme: buffer_count times this limits the total size of those shards.", unit="elements"
    )
    max_in_cpu: Size = on_nvme(
        1_000_000_000, "nvme: this part of a rank's shards stays in host memory.", unit="elements"
    )
    pin_memory: Flag = supported(True, "Page-locked host memory, where there is a GPU.")

    @property
    def is_off(self) -> bool:
        return self.device in (None, "none")

    @property
    def buffer_numel(self) -> int:
        """The total number of elements of all buffers."""
        return self.buffer_count * self.buffer_size


class LeafModule(StrictSection):
    """Modules that stage 3 gathers as one unit."""

    classes: Names = detail([], "Class names.")
    names: Names = detail([], "Module names.")
    name_suffixes: Names = detail([], "Suffixes of module names.")


class LocoParam(StrictSection):
    """Error feedback of quantized gradients."""

    err_beta: Fraction = supported(0.8, "Decay of the moving average of errors; below 1.")
    reset_T: Positive = supported(1024, "Errors are reset after this many reductions of a bucket.")


def _offload_rules(path: str, stages: tuple[int, ...]) -> Iterator[Rule]:
    """Yield the rules of an offload section that has an effect at some stages."""
    device, folder = f"{path}.device", f"{path}.nvme_path"
    yield Rule(
        keys=(device, STAGE),
        broken=lambda device, stage: device == "nvme" and stage == 0 and stage in stages,
        rule="at stage 0 every rank would write all states to the drive",
        fix='set zero_optimization.stage to 1, 2 or 3, or the device to "cpu"',
        unusable=True,
    )
    yield Rule(
        keys=(folder, device, STAGE),
        broken=lambda folder, device, stage: device == "nvme" and stage in stages and folder in (None, "", "none"),
        rule="offload to NVMe needs a folder on the drive",
        fix="give an existing folder",
    )


def _not_divided(size: GroupSize, stage: int, tensor_size: int, ranks: Ranks) -> object:
    count = ranks.with_same_weights
    divides = not isinstance(size, int) or size < 1 or count % size == 0
    cut = tensor_size > 1
    which = f" with the same parts of matrices ({ranks.world_size} / autotp_size {tensor_size})" if cut else ""
    return stage != 0 and ranks.divides and not divides and {"ranks": count, "size": size, "which": which}


def _second_shards(config: Root, ranks: Ranks) -> Iterator[Problem]:
    """Rule that hpZ's groups lie in one host and one shard group. On a single host, larger values mean all ranks."""
    zero, own = config.section(Zero), config.own
    size, shard, hosts = gather_size_in(zero, own), shard_size_in(zero, own), ranks.hosts
    if not isinstance(size, int) or not ranks.divides:
        return
    smallest = min(hosts, default=ranks.with_same_weights)
    if len(hosts) > 1 and size > smallest:
        rule = f"second shards must be within a host, but one host only has {smallest} ranks"
        yield Problem(HPZ, size, rule, f"give {smallest} or a divisor of it; 1 disables them")
        return
    within = smallest if shard == "host" else shard or ranks.with_same_weights
    if shard is not None and size > within:
        rule = f"second shards must be within a shard group, which has {within} ranks"
        yield Problem(HPZ, size, rule, f"give a divisor of {within}; 1 disables them")
    elif size < within and (within % size or any(count % size for count in hosts if len(hosts) > 1)):
        counts = f"{within} ranks" if within % size else f"hosts with {', '.join(map(str, hosts))} ranks"
        rule = f"{counts} cannot be divided into groups of {size}"
        yield Problem(HPZ, size, rule, "give a divisor of the number of ranks per host; 1 disables second shards")


class Zero(StrictSection):
    """What is sharded over the ranks, and how it is communicated."""

    stage: Whole = supported(0, "What is sharded: 0 nothing, 1 optimizer states, 2 + gradients, 3 + parameters.")

    reduce_bucket_size: Positive = below_3(500_000_000, "Size of a bucket of gradients.", unit="elements")
    allgather_bucket_size: Positive = below_3(
        500_000_000, "Size of a bucket of parameters; the smaller of the two sizes is used for both.", unit="elements"
    )
    overlap_comm: Flag | None = supported(
        None,
        "Reduce gradients while backward runs, and at stages 1 and 2 gather updated weights while the next forward "
        "runs. Unset: yes, at every stage.",
    )
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
    offload_param: OffloadParam | None = at_3(
        None, "Place of the parameters (stage 3).", why="to offload at other stages, use offload_optimizer"
    )

    sub_group_size: Count = supported(
        1_000_000_000,
        "Size of the sub-groups of an offloaded update; at stage 3 also of the tensors in checkpoint files.",
        unit="elements",
    )
    stage3_max_live_parameters: Size = at_3(
        1_000_000_000, "Units stay gathered up to this total size.", unit="elements", names=("max_live_parameters",)
    )
    stage3_max_reuse_distance: Size = at_3(
        1_000_000_000,
        "A unit that is used again within this distance stays gathered.",
        unit="elements",
        names=("max_reuse_distance",),
    )
    stage3_prefetch_bucket_size: Size = at_3(
        50_000_000,
        "Maximum size of the prefetched units; above 0: at least one unit (docs/stage3.md).",
        unit="elements",
        names=("prefetch_bucket_size",),
    )
    stage3_param_persistence_threshold: Size = at_3(
        100_000, "Parameters up to this size stay gathered.", unit="elements", names=("param_persistence_threshold",)
    )
    stage3_model_persistence_threshold: Size = at_3(
        LARGEST, "Limit for all parameters that stay gathered.", unit="elements", names=("model_persistence_threshold",)
    )
    stage3_gather_16bit_weights_on_model_save: Flag = at_3(
        False,
        "Gather whole weights when the model is saved.",
        why="whole weights are always saved",
        met=True,
        names=("gather_16bit_weights_on_model_save",),
        old_names=("stage3_gather_fp16_weights_on_model_save",),
    )
    stage3_module_granularity_threshold: Count = met_at_3(
        0,
        "Fetch modules finer than this as one.",
        why="whole blocks are gathered as one anyway",
        names=("module_granularity_threshold",),
    )
    stage3_use_all_reduce_for_fetch_params: Flag = idle_at_3(
        False, "Gather by all-reduce.", why="a unit is one all-gather", names=("use_all_reduce_for_fetch_params",)
    )
    stage3_allgather_sequential: Flag = idle_at_3(
        False, "Gather one parameter at a time.", why="a unit is one all-gather", names=("allgather_sequential",)
    )
    memory_efficient_linear: Flag = idle_at_3(
        True, "Linear layers that save less for backward.", why="linear layers save no copy"
    )
    override_module_apply: Flag = idle_at_3(
        True, "Module.apply gathers what it touches.", why="reading a parameter in zero.Init gathers it"
    )
    pipeline_loading_checkpoint: Flag = met_at_3(
        False, "Ranks of a node load in turn.", why="no rank loads more than one tensor at a time"
    )
    log_trace_cache_warnings: Flag = met_at_3(
        False, "Diagnostics of the gather order.", why="the order is fixed and has no cache"
    )
    enable_sanity_checks: Flag = met_at_3(False, "Diagnostics.", why="the checks are always on")
    leaf_module: LeafModule | None = at_3(None, "Modules gathered as one unit.")
    save_muon_momentum_buffer_in_memory: Flag = at_3(False, "Muon under NVMe.")

    zero_hpz_partition_size: Count = at_3(
        1,
        "hpZ: groups of this many ranks of a host keep secondary shards and gather among themselves; 0 and 1: off.",
        why="every rank has all parameters",
        unit="ranks",
    )
    zero_quantized_weights: Flag = at_3(False, "qwZ: gather weights quantized to int8; shards and masters stay exact.")
    zero_quantized_nontrainable_weights: Flag = at_3(False, "Keep and gather frozen weights in int8.")
    zero_quantized_gradients: Flag = at_3(
        False, "qgZ: reduce gradients in int4 (hf_zero.quantized_gradient_bits), within a host and then across hosts."
    )
    zeropp_loco_param: LocoParam | None = at_3(
        None, "LoCo: add the quantization errors of gradients to later gradients."
    )
    mics_shard_size: Whole = supported(
        -1,
        "MiCS: shard over groups of this many ranks, each with a copy of the model's states; -1: over all ranks. The "
        "same as hf_zero.shard_group.",
        why="nothing is sharded",
        unit="ranks",
        stages=_SHARDED,
    )
    mics_hierarchical_params_gather: Flag = at_3(
        False,
        "MiCS: if a group spans hosts, weights are sent across once per update, and gathers stay within a host: "
        "zero_hpz_partition_size with the ranks of a host.",
    )
    zenflow: Free | None = unsupported(
        None, "Delayed updates.", why="every update is complete; use offload_optimizer alone", switch=None
    )

    @property
    def offloaded_parameters(self) -> OffloadParam | None:
        """The section offload_param, if it has an effect."""
        return (
            None if self.stage != 3 or self.offload_param is None or self.offload_param.is_off else self.offload_param
        )

    rules = (
        Rule(
            keys=(STAGE,),
            broken=lambda stage: stage not in (0, 1, 2, 3),
            rule="must be 0, 1, 2 or 3",
            fix="choose 1, 2 or 3; 0 is plain data parallelism",
            unusable=True,
        ),
        Rule(
            # Published stage-3 configs use 0, which in DeepSpeed gives every parameter its own sub-group.
            keys=("zero_optimization.sub_group_size", STAGE),
            broken=lambda size, stage: size == 0 and stage != 3,
            rule="must be at least 1 below stage 3",
            fix="remove it (1_000_000_000), or write 10 to 50 million",
            edit=Edit.at("zero_optimization.sub_group_size"),
        ),
        *(
            rule
            for offload, stages in (("offload_optimizer", (0, 1, 2, 3)), ("offload_param", (3,)))
            for rule in _offload_rules(f"zero_optimization.{offload}", stages)
        ),
        Rule(
            keys=("zero_optimization.zeropp_loco_param.err_beta", STAGE),
            broken=lambda beta, stage: stage == 3 and beta >= 1,
            rule="must be below 1: at 1 the average of errors stays zero",
            fix="use less, such as 0.8",
        ),
        Advice(
            keys=("zero_optimization.zeropp_loco_param", "zero_optimization.zero_quantized_gradients", STAGE),
            applies=lambda loco, quantized, stage: stage == 3 and not quantized,
            text="no effect, gradients are not quantized (zero_quantized_gradients is off)",
            ignored=True,
        ),
        Rule(
            keys=(MICS,),
            broken=lambda size: size == 0 or size < -1,
            unusable=True,
            rule="must be a number of ranks, or -1 for all",
            fix="give a divisor of the number of ranks",
        ),
        Rule(
            keys=(MICS, SHARD_GROUP, STAGE),
            broken=lambda mics, ours, stage: stage != 0 and mics > 0 and ours not in (None, mics),
            rule=f"{SHARD_GROUP} is the same setting, with another value ({{shard_group}})",
            fix=f"keep one of the two keys, for example {SHARD_GROUP}",
        ),
        *(
            Rule(
                keys=(path, STAGE, TENSOR, RANKS),
                broken=_not_divided,
                rule="the number of ranks{which}, {ranks}, is not a multiple of {size}",
                fix="give a divisor of {ranks}, or start another number of ranks",
            )
            for path in GROUP_KEYS
        ),
        Several(keys=(HPZ, *GROUP_KEYS, STAGE, TENSOR), every=_second_shards),
        Rule(
            keys=(SHARD_GROUP, STAGE, TENSOR, RANKS),
            broken=lambda size, stage, tensor, ranks: (
                stage != 0
                and size == "host"
                and len(set(ranks.hosts)) > 1
                and {"counts": ", ".join(map(str, ranks.hosts))}
            ),
            rule="each host holds a copy, so all must have the same number of ranks, not {counts}",
            fix="start the same number on every host, or give a number of ranks",
        ),
    )


def shard_size_in(zero: Zero, own: HfZero) -> GroupSize:
    """Return the number of ranks that share the states of one model copy; None: all ranks."""
    if zero.stage == 0:
        return None
    return zero.mics_shard_size if zero.mics_shard_size > 0 else own.shard_group


def gather_size_in(zero: Zero, own: HfZero) -> GroupSize:
    """Return the size of the groups that gather parameters for use; "host": one host; None: the whole shard group."""
    if zero.stage == 3 and zero.zero_hpz_partition_size > 1:
        return zero.zero_hpz_partition_size
    in_two_hops = zero.stage == 3 and zero.mics_hierarchical_params_gather and shard_size_in(zero, own) is not None
    return "host" if in_two_hops else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPolicy:
    """What is sharded, and the sizes of buckets and groups."""

    stage: int
    shard_size: GroupSize = None  # ranks that share the states of one model copy; None: all
    gather_size: GroupSize = None  # size of hpZ's groups, which gather among themselves
    hops: Literal["auto", 1, 2] = "auto"  # hops of reductions and gathers over several hosts, below stage 3
    bucket_numel: int  # elements per bucket, the same for reducing gradients and gathering parameters
    bucket_is_given: bool = False  # whether the config has that size, and not just its default
    overlap_reduction: bool  # start reductions while backward still runs
    sparse_gradients: bool = False  # reduce only the nonzero rows of embedding gradients
    require_all_gradients: bool  # a trainable parameter without gradient is an error
    sub_group_numel: int  # elements per sub-group of the update and per tensor in stage 3's checkpoints; 0: uncut
    keys: Zero  # the section itself, for keys that are read directly
    follows_plans: bool = True  # stage 3 gathers in the order of the last pass that all ranks ran alike, unnegotiated
    gradient_bits: int | None = None  # stage 3: reduce gradients in 8 or 4 bits; None: unquantized
    optimizer_sees: OptimizerSees | None = None  # for the script's optimizer; None: what it is known to need
    offload_optimizer: OffloadOptimizer | None = None  # None: on the device
    offload_param: OffloadParam | None = None
    offload_threads: int | Literal["auto", "unchanged"] = "auto"  # of an offloaded update
    offload_update: Literal["cpu", "device", "both"] = "cpu"  # what updates offloaded states
    overlap_step: bool = True  # whether stage 3 may update beside the next forward
    streaming: Any = None  # the section of the extra `streaming`; None: updates run after backward
    files: Aio


@dataclass(frozen=True, slots=True, kw_only=True)
class InitPolicy:
    """The config values for `zero.Init`."""

    precision: PrecisionPolicy
    shard_size: GroupSize
    offload: OffloadParam | None
    files: Aio


def zero_of(config: Root, streaming: Any) -> ZeroPolicy:
    """Return the policy for a valid config, and the section of the extra `streaming`."""
    zero, own = config.section(Zero), config.own
    states = None if zero.offload_optimizer is None or zero.offload_optimizer.is_off else zero.offload_optimizer
    if streaming is not None and states is None and zero.offload_param is not None:
        states = OffloadOptimizer(device="cpu", pin_memory=zero.offload_param.pin_memory)
    return ZeroPolicy(
        stage=zero.stage,
        shard_size=shard_size_in(zero, own),
        gather_size=gather_size_in(zero, own),
        hops=own.hops,
        bucket_numel=min(zero.reduce_bucket_size, zero.allgather_bucket_size),
        bucket_is_given=not zero.model_fields_set.isdisjoint(("reduce_bucket_size", "allgather_bucket_size")),
        overlap_reduction=zero.overlap_comm is not False,
        sparse_gradients=config.sparse_gradients,
        require_all_gradients=not zero.ignore_unused_parameters,
        sub_group_numel=zero.sub_group_size,
        keys=zero,
        follows_plans=own.gather_order == "planned",
        gradient_bits=own.quantized_gradient_bits if zero.stage == 3 and zero.zero_quantized_gradients else None,
        optimizer_sees=own.optimizer_sees,
        offload_optimizer=states,
        offload_param=zero.offloaded_parameters,
        offload_threads=own.offload_threads,
        offload_update=own.offload_update,
        overlap_step=own.overlap_step,
        streaming=streaming,
        files=config.section(Aio),
    )


def init_of(config: Root) -> InitPolicy:
    """Return the policy for building a model."""
    zero = config.section(Zero)
    return InitPolicy(
        precision=precision_of(config),
        shard_size=shard_size_in(zero, config.own),
        offload=zero.offloaded_parameters,
        files=config.section(Aio),
    )
