"""The top level of a config: all keys of a ds.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from hf_zero.config.errors import Edit
from hf_zero.config.features import Extra
from hf_zero.config.rules import RANKS, Advice, AnyRule, Ranks, Rule, needs
from hf_zero.config.schema.batch import SEQUENCE, BatchSizes
from hf_zero.config.schema.checkpoint import Aio, Checkpoint, OurCheckpoints
from hf_zero.config.schema.fields import (
    Dtype,
    Flag,
    Free,
    NonNegative,
    Positive,
    PositiveNumber,
    as_lower,
    as_whole,
    check,
    detail,
    ignored,
    supported,
    unsupported,
    whole_or,
)
from hf_zero.config.schema.long_sequences import ACTIVATIONS, TILING, ActivationCheckpointing, Tiling
from hf_zero.config.schema.optimizer import Optimizer, Scheduler
from hf_zero.config.schema.parallel import TensorParallel
from hf_zero.config.schema.precision import MASTERS, Amp, Bf16, DataTypes, Fp16, TorchAutocast
from hf_zero.config.schema.profiling import PROFILING, Observation, TraceSection
from hf_zero.config.schema.zero import OptimizerSees, Zero

_NOT_OFFLOADED = "no effect, because no states are offloaded (zero_optimization.offload_optimizer)"


def _as_hops(value: object) -> object:
    return value.lower() if isinstance(value, str) and value.lower() == "auto" else as_whole(value)


GradientBits = Annotated[Literal[4, 8], BeforeValidator(as_whole)]
Sees = Annotated[OptimizerSees, BeforeValidator(as_lower)]
Hops = Annotated[Literal["auto", 1, 2], BeforeValidator(_as_hops)]
ShardGroup = Annotated[int | Literal["host"], BeforeValidator(whole_or("host", unit="ranks"))]
Threads = Annotated[int | Literal["auto", "unchanged"], BeforeValidator(whole_or("auto", "unchanged", unit="threads"))]
Updates = Annotated[Literal["cpu", "device", "both"], BeforeValidator(as_lower)]
Level = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(as_lower)]
_USE_TORCH_COMPILE = "its passes are DeepSpeed's own; use torch_compile of TrainingArguments, or engine.compile()"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPolicy:
    """Processing of reduced gradients before the update."""

    clip_norm: float  # largest global L2 norm; 0.0: no clipping
    average: bool  # mean over ranks; False: sum
    predivide: float = 1.0  # gradients are divided by this before the reduction, and the result is corrected


class HfZero(Tiling):
    """Our own settings: features that DeepSpeed does not have, and DeepSpeed's behaviour where hf_zero differs."""

    broadcast_buffers: Flag = supported(
        False,
        "true: broadcast rank 0's buffers (BatchNorm's running mean and variance) after every update, as "
        "DistributedDataParallel does before forward; false: every rank keeps its own, as in DeepSpeed.",
    )
    gather_order: Literal["planned", "negotiated"] = supported(
        "planned",
        'Between hosts and on accelerators: "planned" prefetches units in the order of the last pass that all ranks '
        'ran alike, and negotiates each gather if there is none; "negotiated" always negotiates, for programs whose '
        "ranks do different things in every pass, and gathers into buffers, so that ranks may use a unit on "
        "different sides of a collective of the program (docs/stage3.md). Ranks that communicate through shared memory "
        "always negotiate.",
        stages=(3,),
    )
    offload_threads: Threads = supported(
        "auto",
        'Threads of the update on the CPU for a model on an accelerator (docs/offload.md): a number, "auto" for this '
        "rank's share of the cores that its host's ranks may use, whatever OMP_NUM_THREADS says (torchrun sets 1), or "
        '"unchanged" for the number that PyTorch uses otherwise.',
        unit="threads",
    )
    offload_update: Updates = supported(
        "cpu",
        'Where offloaded states are updated: "cpu"; "device": masters, states and gradients stream through the '
        'accelerator in chunks; "both": at the same time, each a share that lets them end together, measured at the '
        "start (docs/offload.md). The last bits of weights differ between the two.",
    )
    overlap_step: Flag = supported(
        True,
        "At stage 3 with offload on an accelerator: each unit is updated before the next forward reads it, while the "
        "device computes the units before it. Same values. false: everything is updated in step().",
        stages=(3,),
    )
    decay_biases_and_norms: Flag = supported(
        False,
        "Under Trainer with an optimizer section: true puts all parameters into one param group, as DeepSpeed does; "
        "false keeps Trainer's two groups, which exclude biases and norms from weight decay.",
    )
    ignore_unknown_keys: Flag = supported(
        False, "true: ignore every unknown top-level key, even one that resembles a known key."
    )
    strict: Flag = supported(False, "true: a setting that is ignored is an error instead of a warning.")
    optimizer_sees: Sees | None = supported(
        None,
        'The tensors that a custom optimizer updates: "whole_tensors", each on one rank, or "flat_shards", as in '
        "DeepSpeed. Unset: whole tensors for optimizers known to need them (Muon, Shampoo, SOAP, LARS, LAMB, "
        "StableAdamW), flat shards for others, with a warning if these compute something else there. Adafactor "
        "computes its means over whole matrices unless this is flat_shards.",
        stages=(1, 2, 3),
    )
    quantized_gradient_bits: GradientBits = supported(
        4, "zero_quantized_gradients: bits per communicated element, 4 or 8.", unit="bits", stages=(3,)
    )
    stochastic_rounding: Flag = supported(
        False, "With bf16 master weights: use stochastic rounding, so that small updates are not lost."
    )
    shard_group: ShardGroup | None = supported(
        None,
        'Hybrid sharding: shard over groups of this many ranks, or "host" for the ranks of a host. Each group holds a '
        "copy of the model's states (docs/hybrid_and_zeropp.md). Unset: shard over all ranks.",
        why="nothing is sharded",
        unit="ranks",
        stages=(1, 2, 3),
    )
    hops: Hops = supported(
        "auto",
        "On several hosts, reduce gradients and gather updated weights in 2 hops, within each host and then across "
        'hosts, or in 1. "auto": 2 for large messages on CPUs, 1 on accelerators (NCCL optimizes this itself).',
        stages=(0, 1, 2),
    )
    checkpoint: OurCheckpoints | None = detail(None, "How checkpoints are written.")
    trace: TraceSection | None = detail(None, "A trace file of some updates (docs/profiling.md).")

    rules = (
        needs("hf_zero.stochastic_rounding", MASTERS),
        Advice(
            keys=("hf_zero.offload_update", "zero_optimization.offload_optimizer.device"),
            applies=lambda update, device: update != "cpu" and device in (None, "none"),
            text=_NOT_OFFLOADED,
            ignored=True,
        ),
        Advice(
            keys=(
                "hf_zero.overlap_step",
                "zero_optimization.stage",
                "zero_optimization.offload_optimizer.device",
                "zero_optimization.offload_param.device",
            ),
            applies=lambda overlaps, stage, *devices: (
                not overlaps and stage == 3 and all(device in (None, "none") for device in devices)
            ),
            text="no effect, because no states are offloaded (zero_optimization.offload_optimizer), and no weights "
            "(zero_optimization.offload_param)",
            ignored=True,
        ),
    )


class Root(Observation, BatchSizes):
    """The whole config; with sections of extras it is one of the classes that `hf_zero.config.extras` makes of it."""

    # The features whose keys this class has, in the order in which they process a forward; each receives the result of
    # the previous ones.
    features: ClassVar[tuple[Extra, ...]] = (ACTIVATIONS, TILING, PROFILING)

    managed_gradient_accumulation: Flag = supported(
        True,
        "The engine counts micro-batches, and every gradient_accumulation_steps-th step() updates. False: every step() "
        "updates, however many backward passes precede it; each loss is still divided by gradient_accumulation_steps. "
        "Under Accelerate and Trainer, the script's own steps update in any case.",
    )

    log_level: Level | None = supported(
        None, "debug, info, warning, error or critical.", words="is not one of the valid logging levels"
    )
    disable_python_gc: Flag = supported(
        False,
        "Turn Python's automatic cyclic garbage collection off until engine.destroy(), after one collection; "
        "engine.collect_python_gc() collects at a moment of the script's choice.",
    )
    vocabulary_size: Positive | None = check(None, "Only checked: a multiple of 8 is faster.")
    disable_allgather: Flag = ignored(False, "Stored but never read, as in DeepSpeed.", why="nothing reads it")
    dataloader_drop_last: Flag = supported(False, "The engine's own loader drops an incomplete last batch.")

    gradient_clipping: NonNegative = supported(1.0, "Largest global L2 norm of the gradient; 0: no clipping.")
    communication_data_type: Dtype | None = supported(
        None, "Dtype of gradient reduction. Unset: the parameter's own.", words="Invalid communication_data_type"
    )
    seq_parallel_communication_data_type: Dtype | None = supported(
        None, "The same with sequence parallelism. Unset: `communication_data_type`."
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(as_lower)] = supported(
        "mean", "Mean or sum of the ranks' gradients.", words="Invalid gradient_allreduce_op"
    )
    prescale_gradients: Flag = supported(
        False, "Divide gradients by the number of ranks before the reduction instead of after (by scaling the loss)."
    )
    gradient_predivide_factor: PositiveNumber = supported(
        1.0, "Divide gradients by this before the reduction (by scaling the loss), and correct the result after it."
    )
    sparse_gradients: Flag = supported(
        False,
        "Reduce only the rows of embedding gradients that a batch has used, if that takes fewer bytes.",
        why="gradients are reduced dense there, which gives the same result",
        stages=(0,),
        met=True,
    )

    zero_allow_untested_optimizer: Flag = ignored(
        False, "Allow optimizers outside a list.", why="any torch optimizer is accepted", met=True
    )
    zero_force_ds_cpu_optimizer: Flag = ignored(
        True, "Under offload, insist on the CPU Adam.", why="the optimizer of the script is never replaced", met=True
    )
    use_data_before_expert_parallelism: Flag = unsupported(
        False, "Rank order of groups.", why="the ranks of an expert group are consecutive"
    )
    sequence_parallel_size: Positive = supported(
        1, "Ranks that share each sequence (Ulysses); they count as one data rank."
    )
    data_parallel_size: Positive | None = check(None, "Must be the number of ranks / sequence_parallel_size.")
    tensor_parallel: TensorParallel | None = detail(None, "Tensor parallelism.")
    pipeline: Free | None = ignored(None, "Only for PipelineModule.", why="pipeline modules are not supported")

    fp16: Fp16 | None = detail(None, "fp16 training.")
    bf16: Bf16 | None = detail(None, "bf16 training.", names=("bfloat16",))
    torch_autocast: TorchAutocast | None = detail(None, "Forward under torch.autocast.")
    amp: Amp | None = detail(None, "Apex mixed precision, through torch.autocast.")
    msamp: Free | None = unsupported(None, "fp8 through MS-AMP.", why="MS-AMP is retired; use bf16.enabled")
    data_types: DataTypes | None = detail(None, "Dtypes.")
    optimizer: Optimizer | None = supported(None, "The optimizer to build.")
    scheduler: Scheduler | None = supported(None, "The schedule to build.")
    zero_optimization: Zero | None = detail(None, "Sharding.")
    aio: Aio | None = detail(None, "File access under NVMe offload.")
    activation_checkpointing: ActivationCheckpointing | None = detail(
        None, "What checkpointed layers keep for backward."
    )
    checkpoint: Checkpoint | None = detail(None, "Checkpoints.")

    eigenvalue: Free | None = unsupported(
        None,
        "Eigenvalues of the Hessian.",
        why="they only stretched periods of MoQ, and DeepSpeed never reads the section",
    )
    quantize_training: Free | None = unsupported(None, "Quantized training.", why="it is not supported")
    weight_quantization: Free | None = unsupported(None, "Quantized weights.", why="it is not supported")
    graph_harvesting: Flag = unsupported(False, "CUDA graphs.", why="it is not supported; try module.compile()")
    compile: Free | None = unsupported(None, "DeepCompile.", why=_USE_TORCH_COMPILE, switch="deepcompile")
    hybrid_engine: Free | None = unsupported(None, "Train and generate in one engine.", why="it is not supported")
    nebula: Free | None = unsupported(None, "A checkpoint service.", why="checkpoints go to files")
    datastates_ckpt: Free | None = unsupported(None, "A checkpoint engine.", why="checkpoints go to files", switch="")

    hf_zero: HfZero | None = detail(None, "hf_zero's own settings.")

    rules: ClassVar[tuple[AnyRule, ...]] = (
        Rule(
            keys=(SEQUENCE, RANKS),
            broken=lambda size, ranks: ranks.world_size % ranks.sequence_size and _shared(ranks),
            rule="world size = data ranks x ranks per sequence does not hold: {world} != n x {value}",
            fix="give a divisor of {world}, or start a multiple of {value} ranks",
        ),
        Rule(
            keys=("data_parallel_size", SEQUENCE, RANKS),
            broken=lambda size, _, ranks: (
                size not in (None, ranks.world_size // ranks.sequence_size) and {"ranks": _data_ranks(ranks)}
            ),
            rule="{ranks}",
            fix="remove it",
            edit=Edit.at("data_parallel_size"),
        ),
        Rule(
            keys=(SEQUENCE, RANKS),
            broken=lambda size, ranks: size not in (1, ranks.sequence_size) and {"wanted": ranks.sequence_size},
            rule="the script asks for {wanted} ranks per sequence (mpu, mesh_param, ParallelismConfig(sp_size))",
            fix="remove it, or write {wanted}",
            edit=Edit.at(SEQUENCE),
            unusable=True,
        ),
        Advice(
            keys=("gradient_predivide_factor", "prescale_gradients"),
            applies=lambda factor, prescales: prescales and factor != 1.0,
            text="no effect, prescale_gradients divides by the number of ranks",
            ignored=True,
        ),
        Advice(
            keys=("compile",),
            applies=lambda section: set(section or {}) - {"deepcompile"},
            text="no effect, the engine compiles nothing; use torch_compile or torch.compile()",
            ignored=True,
        ),
        Advice(
            keys=("vocabulary_size",),
            applies=lambda size: size is not None and size % 8,
            text="{vocabulary_size} is not a multiple of 8, which is faster on GPUs",
        ),
        *BatchSizes.rules,
    )

    @property
    def own(self) -> HfZero:
        """hf_zero's own settings."""
        return self.hf_zero or HfZero()

    def gradients(self, world_size: int) -> GradientPolicy:
        """Return the policy of a valid config for a number of ranks."""
        return GradientPolicy(
            clip_norm=self.gradient_clipping,
            average=self.gradient_allreduce_op == "mean",
            predivide=float(world_size) if self.prescale_gradients else self.gradient_predivide_factor,
        )


def _shared(ranks: Ranks) -> dict[str, object]:
    return {"value": ranks.sequence_size, "world": ranks.world_size}


def _data_ranks(ranks: Ranks) -> str:
    world, size = ranks.world_size, ranks.sequence_size
    if size == 1:
        return f"every rank is data parallel, and there are {world}"
    return f"{world} ranks, {size} per sequence, are {world // size} data ranks"
