"""The answers of the resolver: small frozen values that the packages below receive whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hf_zero.config.sources import Source

if TYPE_CHECKING:
    from hf_zero.config.schema.fields import S
    from hf_zero.config.schema.root import Root
    from hf_zero.config.schema.training import Aio
    from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam, Zero

DtypeName = Literal["fp32", "bf16", "fp16"]
OptimizerSees = Literal["whole_tensors", "flat_shards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """train_batch_size == micro_batch_size * accumulation_steps * ranks that share no sequence, always."""

    train_batch_size: int  # samples per update; of tensor-parallel training once for each rank that sees them
    micro_batch_size: int  # samples per forward on one rank
    accumulation_steps: int  # forwards per update
    drop_last: bool = False  # leave out an incomplete last batch; only for a loader made from training_data=


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScalePolicy:
    """How the loss of a 16-bit float model is kept inside the range of its gradients."""

    fixed: float | None = None  # a scale that never changes; None: one that follows overflows, by the rules below
    initial: float = 65536.0
    window: int = 1000  # clean updates before the scale doubles
    minimum: float = 1.0  # an overflow here ends the run
    hysteresis: int = 2  # the scale falls at this many overflows, earlier ones are forgiven
    consecutive: bool = False  # a clean update makes the scaler forget overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastPolicy:
    """Forward under torch.autocast; parameters keep their dtype."""

    dtype: DtypeName | None  # None: what torch takes on this kind of device


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """Which dtype each kind of tensor has, and what a non-finite gradient does."""

    model: DtypeName  # "fp32" means: parameters keep the dtype they came with
    communication: DtypeName | None  # dtype of gradient reduction; None: the parameter's own
    accumulation: DtypeName | None  # dtype gradients are summed in over micro-batches; None: the parameter's own
    skip_nonfinite: bool  # a non-finite gradient on any rank skips the update on all of them
    auto_cast_inputs: bool  # cast floating positional inputs of forward to the model's dtype
    loss_scale: LossScalePolicy | None = None  # None: the loss is differentiated as it is
    autocast: AutocastPolicy | None = None
    low_precision_masters: bool = False  # 16-bit weights are their own masters
    low_precision_states: bool = False  # optimizer states in the masters' dtype; else at least fp32
    rounds_stochastically: bool = False  # how bf16 masters are rounded after an update; else to nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPolicy:
    """What is sharded, and the sizes in which it travels."""

    stage: int
    shard_size: int | Literal["host"] | None = None  # ranks that share the states of one copy; None: all
    gather_size: int | Literal["host"] | None = None  # of them, ranks that gather around use among themselves (hpZ)
    hops: Literal["auto", 1, 2] = "auto"  # of reductions and gathers over several hosts, below stage 3
    bucket_numel: int  # elements per bucket, the same for reducing gradients and gathering parameters
    overlap_reduction: bool  # start reductions while backward still runs
    sparse_gradients: bool = False  # sum embeddings by the rows that are not zero
    require_all_gradients: bool  # a trainable parameter without gradient is an error
    sub_group_numel: int  # elements per sub-group of the update and per tensor in stage 3's checkpoints; 0: uncut
    keys: Zero  # the section itself, of which most is read as it is
    follows_plans: bool = True  # stage 3 gathers in the order of the last pass that all ranks have run alike, unasked
    gradient_bits: int | None = None  # stage 3: 8 or 4, of gradients on their way; None: all
    optimizer_sees: OptimizerSees | None = None  # of a given optimizer; None: what it is known to need
    offload_optimizer: OffloadOptimizer | None = None  # None: on the device
    offload_param: OffloadParam | None = None
    streaming: Any = None  # the section of that extra; None: updates come after backward
    files: Aio


@dataclass(frozen=True, slots=True, kw_only=True)
class InitPolicy:
    """The config's values for `zero.Init`."""

    precision: PrecisionPolicy
    shard_size: int | Literal["host"] | None
    offload: OffloadParam | None
    files: Aio


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPolicy:
    """Treatment of the reduced gradient before the update."""

    clip_norm: float  # largest global L2 norm; 0.0: no clipping
    average: bool  # mean over ranks; False: sum
    predivide: float = 1.0  # gradients are divided by this before they are summed, and the result is corrected


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
    """The value of one key in the end, and where it came from."""

    path: str
    value: object
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A config after every question has been answered. No "auto" is left in it, except in `raw`."""

    batch: BatchPolicy
    precision: PrecisionPolicy
    zero: ZeroPolicy
    gradients: GradientPolicy
    optimizer: OptimizerPolicy | None
    scheduler: SchedulerPolicy | None
    extras: Mapping[str, Any] = field(default_factory=dict)  # by name: the policy of each feature that is switched on
    features: tuple[str, ...] = ()  # "module:function", what makes their training features
    sequence_size: int = 1  # ranks that share each sequence
    tensor_size: int = 1  # ranks that hold parts of the same matrices
    config: Root  # as it is checked and typed; see `section`
    raw: dict[str, object]  # the user's own dict, untouched, for `engine.config`
    notes: tuple[str, ...]  # remarks on single keys: settings that change nothing, old names, autos left open
    warnings: tuple[str, ...] = ()  # settings that ask for something that does not happen, each with the reason
    provenance: Mapping[str, Provenance] = field(default_factory=dict)  # by key path: value and origin

    @property
    def samples_per_update(self) -> int:
        """Different ones: those that a tensor group sees count once."""
        return self.batch.train_batch_size // self.tensor_size

    def section(self, kind: type[S]) -> S:
        """The section of this class, with its defaults where the config has none."""
        return self.config.section(kind)
