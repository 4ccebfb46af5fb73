"""The top level of a config: every key a ds.json may have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, create_model

from hf_zero.config.features import Extra
from hf_zero.config.features.long_sequences import ACTIVATIONS, TILING, ActivationCheckpointing, Tiling
from hf_zero.config.features.profiling import PROFILING, Observation, Trace
from hf_zero.config.schema.fields import (
    Dtype,
    Flag,
    Free,
    NonNegative,
    Positive,
    PositiveNumber,
    Section,
    as_lower,
    as_whole,
    check,
    detail,
    ignored,
    supported,
    unsupported,
)
from hf_zero.config.schema.training import (
    Aio,
    Amp,
    Bf16,
    Checkpoint,
    DataTypes,
    Fp16,
    Optimizer,
    Scheduler,
    TensorParallel,
    TorchAutocast,
)
from hf_zero.config.schema.zero import Zero


def _as_shard_group(value: object) -> object:
    if isinstance(value, str) and value.lower() == "host":
        return "host"
    try:
        size = as_whole(value)
    except ValueError:
        size = 0
    if size < 1:
        raise ValueError('must be a number of ranks, 1 or more, or "host"')
    return size


def _as_hops(value: object) -> object:
    return value.lower() if isinstance(value, str) and value.lower() == "auto" else as_whole(value)


GradientBits = Annotated[Literal[4, 8], BeforeValidator(as_whole)]
Sees = Annotated[Literal["whole_tensors", "flat_shards"], BeforeValidator(as_lower)]
Hops = Annotated[Literal["auto", 1, 2], BeforeValidator(_as_hops)]
ShardGroup = Annotated[int | Literal["host"], BeforeValidator(_as_shard_group)]
Level = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(as_lower)]


# Made by a call, because the key is a keyword of Python and cannot be written as a field of a class.
OurCheckpoints: Any = create_model(  # type: ignore[call-overload]
    "OurCheckpoints",
    __base__=Section,
    __doc__="Checkpoints beyond what DeepSpeed's section says.",
    **{
        "async": (
            Flag,
            supported(
                False,
                "Training continues at once: what is saved is copied in host memory beside forward and backward, "
                "and another process writes it. The next save and the exit wait, and errors come at the next step.",
            ),
        )
    },
)


_USE_TORCH_COMPILE = "its passes are DeepSpeed's own; use torch_compile of TrainingArguments, or engine.compile()"


class HfZero(Tiling):
    """Settings of our own: DeepSpeed's way where hf_zero goes another, and what DeepSpeed does not have."""

    broadcast_buffers: Flag = supported(
        False,
        "true: after every update all ranks take rank 0's buffers, as DistributedDataParallel does before the next "
        "forward (BatchNorm's running mean and variance); false: every rank keeps its own, as in DeepSpeed.",
    )
    gather_order: Literal["planned", "negotiated"] = supported(
        "planned",
        'Between hosts and on accelerators: "planned" gathers units in the order of the last pass that all ranks have '
        'run alike, ahead and without messages, and agrees on each where there is none; "negotiated" always agrees on '
        "each, for programs in which ranks do different things in every pass (docs/stage3.md). Ranks that share memory "
        "always agree.",
        stages=(3,),
    )
    decay_biases_and_norms: Flag = supported(
        False,
        "Under Trainer with an optimizer section: true makes one param group of all parameters, as DeepSpeed does; "
        "false keeps Trainer's two, so that weight decay spares biases and norms.",
    )
    ignore_unknown_keys: Flag = supported(
        False, "true: every unknown key at the top level is ignored, also one that resembles a known key."
    )
    strict: Flag = supported(False, "true: a setting that is ignored is an error instead of a warning.")
    optimizer_sees: Sees | None = supported(
        None,
        'What an optimizer that is not built in works on: "whole_tensors", each updated by one rank, or "flat_shards", '
        "as DeepSpeed has it. Unset: whole tensors for those known to need them (Muon, Shampoo, SOAP, LARS, LAMB), "
        "flat shards for others. Adafactor has its means over whole matrices unless this says flat_shards.",
        stages=(1, 2, 3),
    )
    quantized_gradient_bits: GradientBits = supported(
        4, "zero_quantized_gradients: bits of an element on its way, 4 or 8.", unit="bits", stages=(3,)
    )
    stochastic_rounding: Flag = supported(
        False, "With bf16 masters: round updates up or down by chance, in proportion, so that small ones are not lost."
    )
    shard_group: ShardGroup | None = supported(
        None,
        'Hybrid sharding: over groups of so many ranks, or "host" for those of a host, each of which holds a copy of '
        "the model's states (docs/hybrid_and_zeropp.md). Unset: over all ranks.",
        why="nothing is sharded",
        unit="ranks",
        stages=(1, 2, 3),
    )
    hops: Hops = supported(
        "auto",
        "Over several hosts gradients are reduced, and updated weights gathered, in 2 hops, within each host and then "
        'across, or in 1. "auto": on CPUs 2 for what is large enough, on accelerators 1 (NCCL finds its own way).',
        stages=(0, 1, 2),
    )
    checkpoint: OurCheckpoints | None = detail(None, "How checkpoints are written.")
    trace: Trace | None = detail(None, "A trace file of some updates (docs/profiling.md).")


class Root(Observation):
    """The whole config; with sections of extras it is one of the classes that `hf_zero.config.extras` makes of it."""

    # Whose keys a config of this class may have, in the order in which they see a forward; the last sees what the
    # others have made of it.
    features: ClassVar[tuple[Extra, ...]] = (ACTIVATIONS, TILING, PROFILING)

    train_batch_size: Positive | None = supported(None, "Samples per update, over all ranks.", unit="samples")
    train_micro_batch_size_per_gpu: Positive | None = supported(
        None, "Samples per forward on one rank.", unit="samples"
    )
    gradient_accumulation_steps: Positive | None = supported(None, "Forwards per update.", unit="forwards")
    managed_gradient_accumulation: Flag = unsupported(
        True, "The engine counts micro-batches.", why="every step() outside a boundary is held back until the boundary"
    )

    log_level: Level | None = supported(None, "debug, info, warning, error or critical.")
    disable_python_gc: Flag = unsupported(
        False, "Switch Python's collector off.", why="call gc.disable() in the script"
    )
    vocabulary_size: Positive | None = check(None, "Only checked: a multiple of 8 is faster.")
    disable_allgather: Flag = ignored(False, "Stored, never read, also in DeepSpeed.", why="nothing reads it")
    dataloader_drop_last: Flag = supported(False, "The engine's own loader leaves out an incomplete last batch.")

    gradient_clipping: NonNegative = supported(1.0, "Largest global L2 norm of the gradient; 0: no clipping.")
    communication_data_type: Dtype | None = supported(None, "Dtype of gradient reduction. Unset: the parameter's own.")
    seq_parallel_communication_data_type: Dtype | None = supported(
        None, "The same where several ranks share a sequence; unset: as `communication_data_type` says."
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(as_lower)] = supported(
        "mean", "Mean or sum of the ranks' gradients."
    )
    prescale_gradients: Flag = supported(
        False, "Divide by the number of ranks before the reduction instead of after (by way of the loss)."
    )
    gradient_predivide_factor: PositiveNumber = supported(
        1.0, "Divide by this before the reduction (by way of the loss), and correct the result after."
    )
    sparse_gradients: Flag = supported(
        False,
        "Sum gradients of embeddings by the rows that a batch has looked up, where that is fewer bytes.",
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
        False, "Rank order of groups.", why="ranks that hold all experts between them are neighbours"
    )
    sequence_parallel_size: Positive = supported(
        1, "Ranks that share each sequence (Ulysses); samples per update count the other ranks only."
    )
    data_parallel_size: Positive | None = check(None, "Must be the number of ranks / sequence_parallel_size.")
    tensor_parallel: TensorParallel | None = detail(None, "Tensor parallelism.")
    pipeline: Free | None = ignored(None, "Only for PipelineModule.", why="pipeline modules are not supported")

    optimizer: Optimizer | None = supported(None, "The optimizer to build.")
    scheduler: Scheduler | None = supported(None, "The schedule to build.")
    fp16: Fp16 | None = detail(None, "fp16 training.")
    bf16: Bf16 | None = detail(None, "bf16 training.")
    torch_autocast: TorchAutocast | None = detail(None, "Forward under torch.autocast.")
    amp: Amp | None = detail(None, "Apex mixed precision, through torch.autocast.")
    msamp: Free | None = unsupported(None, "fp8 through MS-AMP.", why="MS-AMP is retired; use bf16.enabled")
    data_types: DataTypes | None = detail(None, "Dtypes.")
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
    quantize_training: Free | None = unsupported(None, "Quantised training.", why="it is not supported")
    weight_quantization: Free | None = unsupported(None, "Quantised weights.", why="it is not supported")
    graph_harvesting: Flag = unsupported(False, "CUDA graphs.", why="it is not supported; try module.compile()")
    compile: Free | None = unsupported(None, "DeepCompile.", why=_USE_TORCH_COMPILE, switch="deepcompile")
    hybrid_engine: Free | None = unsupported(None, "Train and generate in one engine.", why="it is not supported")
    nebula: Free | None = unsupported(None, "A checkpoint service.", why="checkpoints go to files")
    datastates_ckpt: Free | None = unsupported(None, "A checkpoint engine.", why="checkpoints go to files", switch="")

    hf_zero: HfZero | None = detail(None, "Our own settings.")
