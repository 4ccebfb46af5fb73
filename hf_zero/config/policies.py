"""Policies: small frozen objects that the resolver creates and other packages read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_zero.config.sources import Source

if TYPE_CHECKING:
    from hf_zero.config.errors import Problem, Remark
    from hf_zero.config.schema.fields import S
    from hf_zero.config.schema.root import Root
    from hf_zero.config.schema.training import Aio
    from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam, Zero

DtypeName = Literal["fp32", "bf16", "fp16"]
OptimizerSees = Literal["whole_tensors", "flat_shards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """Batch sizes: train_batch_size == micro_batch_size * accumulation_steps * number of data ranks."""

    train_batch_size: int  # samples per update; with tensor parallelism, counted once for each rank that sees them
    micro_batch_size: int  # samples per forward on one rank
    accumulation_steps: int  # forwards per update
    drop_last: bool = False  # drop an incomplete last batch; only for a loader made from training_data=


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScalePolicy:
    """Loss scaling, which keeps fp16 gradients within their range."""

    fixed: float | None = None  # a constant scale; None: a dynamic scale, by the rules below
    initial: float = 65536.0
    window: int = 1000  # clean updates before the scale doubles
    minimum: float = 1.0  # an overflow here ends the run
    hysteresis: int = 2  # the number of overflows after which the scale is reduced
    consecutive: bool = False  # a clean update resets the count of overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastPolicy:
    """Forward runs under torch.autocast; parameters keep their dtype."""

    dtype: DtypeName | None  # None: torch's default for the device


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """The dtype of each kind of tensor, and the handling of non-finite gradients."""

    model: DtypeName  # "fp32" means that parameters keep their dtype
    communication: DtypeName | None  # dtype of gradient reduction; None: the parameter's own
    accumulation: DtypeName | None  # dtype for accumulating gradients over micro-batches; None: the parameter's own
    skip_nonfinite: bool  # a non-finite gradient on any rank skips the update on all of them
    auto_cast_inputs: bool  # cast floating positional inputs of forward to the model's dtype
    loss_scale: LossScalePolicy | None = None  # None: no loss scaling
    autocast: AutocastPolicy | None = None
    low_precision_masters: bool = False  # 16-bit weights are their own masters
    low_precision_states: bool = False  # optimizer states in the masters' dtype; else at least fp32
    rounds_stochastically: bool = False  # stochastic rounding of bf16 masters after an update; else to nearest
    buffers: DtypeName | None = None  # dtype of floating-point buffers; None: their own
    kept_buffers: tuple[str, ...] | None = None  # patterns of names that `buffers` excepts; None: the model's lists


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPolicy:
    """What is sharded, and the sizes of buckets and groups."""

    stage: int
    shard_size: int | Literal["host"] | None = None  # ranks that share the states of one model copy; None: all
    gather_size: int | Literal["host"] | None = None  # size of hpZ's groups, which gather among themselves
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
    streaming: Any = None  # the section of the extra `streaming`; None: updates run after backward
    files: Aio


@dataclass(frozen=True, slots=True, kw_only=True)
class InitPolicy:
    """The config values for `zero.Init`."""

    precision: PrecisionPolicy
    shard_size: int | Literal["host"] | None
    offload: OffloadParam | None
    files: Aio


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPolicy:
    """Processing of reduced gradients before the update."""

    clip_norm: float  # largest global L2 norm; 0.0: no clipping
    average: bool  # mean over ranks; False: sum
    predivide: float = 1.0  # gradients are divided by this before the reduction, and the result is corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPolicy:
    """`type` is "Adam", "AdamW" or the name of a torch.optim class; `params` holds only what the user set."""

    type: str
    params: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """`type` is one of ours or the name of a torch.optim.lr_scheduler class; `params` only what the user set."""

    type: str
    params: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The final value of a key and its source."""

    path: str
    value: object
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results of examining a valid or invalid config."""

    config: Root  # typed, without the invalid keys; see `section`
    batch: BatchPolicy | None  # None: not enough is known to derive it
    optimizer: OptimizerPolicy | None
    scheduler: SchedulerPolicy | None
    extras: Mapping[str, Any]  # policies of the enabled features by name
    problems: tuple[Problem, ...]
    remarks: tuple[Remark, ...]
    provenance: Mapping[str, Provenance]  # by key path: value and origin
    autos: frozenset[str]  # the keys that are still "auto"
    world_size: int
    sequence_size: int  # ranks that share each sequence
    tensor_size: int  # ranks that hold parts of the same matrices

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on keys: settings without effect, old names, unfilled autos."""
        return tuple(str(remark) for remark in self.remarks if not remark.ignored)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Requested settings that have no effect, each with the reason."""
        return tuple(str(remark) for remark in self.remarks if remark.ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Findings):
    """A resolved config, which has no problems, and no "auto" except in `raw`."""

    batch: BatchPolicy
    precision: PrecisionPolicy
    zero: ZeroPolicy
    gradients: GradientPolicy
    raw: dict[str, object]  # the user's own dict, untouched, for `engine.config`

    @property
    def features(self) -> tuple[str, ...]:
        """The functions, as "module:function", that create the training features which the config enables."""
        enabled = (extra for extra in self.config.features if extra.name in self.extras)
        return tuple(target for extra in enabled for target in extra.features)

    @property
    def samples_per_update(self) -> int:
        """The number of distinct samples: those of a tensor-parallel group count once."""
        return self.batch.train_batch_size // self.tensor_size

    def section(self, kind: type[S]) -> S:
        """Return the section of this class, or its defaults if the config does not have it."""
        return self.config.section(kind)
