"""Sections around the training loop: optimizer, scheduler, number formats, checkpoints, parallelism."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hf_zero.config.schema.fields import (
    DTYPE_SPELLINGS,
    Count,
    Dtype,
    Flag,
    Free,
    Names,
    NonNegative,
    Positive,
    Section,
    as_dtype,
    as_names,
    check,
    detail,
    ignored,
    supported,
    unsupported,
)

_WRITER = "every rank writes its own files from a few threads, with fsync and checksums"


class Optimizer(Section):
    """The optimizer that the engine builds if the script does not provide one."""

    type: str | None = supported(None, "Adam, AdamW, AdamW8bit, Lion ..., or the name of a torch.optim class.")
    params: Free | None = supported(None, "Its keyword arguments.")
    legacy_fusion: Flag = unsupported(False, "Step signature of old Apex.", why="there is one step signature")


class Scheduler(Section):
    """The learning-rate schedule that the engine steps after every update."""

    type: str | None = supported(None, "One of hf_zero's five schedules, or a torch.optim.lr_scheduler class.")
    params: Free | None = supported(None, "Its keyword arguments.")


def _as_tag_rule(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


class ParallelWrite(Section):
    """Parallel writing of checkpoints."""

    pipeline_stage: Flag = ignored(False, "By pipeline stage.", why=_WRITER)


class CheckpointWriter(Section):
    """How checkpoint files are written."""

    type: Literal["FAST", "PYTHON", "MOCK"] | None = ignored(None, "Kind of writer.", why=_WRITER)
    io_buffer_size: Positive = ignored(67_108_864, "Buffer.", unit="bytes", why=_WRITER)
    io_buffer_double: Flag = ignored(True, "Two buffers.", why=_WRITER)
    show_statistics: Flag = ignored(False, "Log speed.", why=_WRITER)
    data_parallel: Literal["replica", "socket", "machine"] | None = ignored(None, "Who writes.", why=_WRITER)
    decoupled: Flag = ignored(False, "Write in the background.", why=_WRITER)
    io_multiplier: Positive = ignored(1, "Writers per rank.", why=_WRITER)


class Checkpoint(Section):
    """How checkpoints are named, written and read."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_as_tag_rule)] = supported(
        "Warn", "What to do if ranks use different tags; rank 0's is used unless this is Fail."
    )
    load_universal: Flag = supported(False, "Load the checkpoint that `latest_universal` names, if the file exists.")
    use_node_local_storage: Flag = supported(
        False, "Every node writes to its own folder; to load, collect all files in one folder."
    )
    parallel_write: ParallelWrite | None = detail(None, "Parallel writing.")
    checkpoint_serialization: Flag = ignored(
        True, "Serialize with torch.", why="files are always in torch's zip format, which every reader takes"
    )
    writer: CheckpointWriter | None = detail(None, "The writer.")


class Aio(Section):
    """File access for NVMe offload. Every active request has a thread, which does not hold the GIL."""

    block_size: Positive = supported(1_048_576, "Request size, rounded up to 4096.", unit="bytes")
    queue_depth: Positive = supported(8, "Requests under way.")
    intra_op_parallelism: Positive = supported(1, "Times queue_depth: the number of threads.")
    thread_count: Positive = supported(1, "Older name of intra_op_parallelism; the larger of the two counts.")
    single_submit: Flag = ignored(False, "Submit one by one.", why="requests are always submitted one by one", met=True)
    overlap_events: Flag = ignored(True, "Overlap submission and completion.", why="they always overlap")
    use_gds: Flag = unsupported(
        False, "GPUDirect storage.", why="files go through host memory; device nvme works without it"
    )

    @property
    def num_threads(self) -> int:
        """The number of threads, each with one active request."""
        return self.queue_depth * max(self.intra_op_parallelism, self.thread_count)


class TensorParallelGroup(Section):
    """The tensor-parallel group."""

    tp_size: Positive = check(1, "Ranks per group: 1 or autotp_size.")
    tp_group: Any = detail(None, "Group object.")
    mpu: Any = detail(None, "Model-parallel unit.")


class TensorParallel(Section):
    """Automatic tensor parallelism."""

    autotp_size: Count = supported(0, "Size of tensor-parallel groups; 0 and 1: no tensor parallelism.", unit="ranks")
    tp_overlap_comm: Flag = ignored(
        False, "Overlap its collectives.", why="gradients of inputs are summed where autograd needs them"
    )
    preset_model: str | None = ignored(
        None, "Known model family.", why="transformers' own plan says which layers are cut"
    )
    partition_config: Any = check(None, "Custom partition rules: refused with autotp_size; set the model's tp_plan.")
    vocab_parallel_lm_head: Flag | None = check(
        None, "Keep logits of a part of the vocabulary: true is refused with autotp_size."
    )
    vocab_parallel_ce_backend: str = ignored(
        "torch", "Loss implementation.", why="logits are whole on every rank, as losses expect them"
    )
    dtype: Any = ignored(None, "Dtype.", why="the sections bf16 and fp16 decide", met=True)
    tp: TensorParallelGroup | None = detail(None, "Group of ranks.")


def _as_autocast_dtype(value: object) -> object:
    """Parse a dtype in any spelling of torch_autocast, which includes "torch.bfloat16"."""
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else value
    return as_dtype(DTYPE_SPELLINGS.get(name, name) if isinstance(name, str) else name)


AutocastDtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_as_autocast_dtype)]


class Fp16(Section):
    """16-bit training with a scaled loss."""

    enabled: Flag = supported(False, "Cast parameters to fp16, keep fp32 masters, and scale the loss.")
    auto_cast: Flag = supported(False, "Cast floating positional inputs of forward to fp16.")
    loss_scale: NonNegative = supported(0.0, "Fixed loss scale; 0: dynamic.")
    initial_scale_power: Count = supported(16, "The first dynamic scale is 2 to this power.")
    loss_scale_window: Positive = supported(1000, "Updates without overflow before the scale doubles.", unit="updates")
    min_loss_scale: NonNegative = supported(1, "Minimum of the scale; an overflow there ends the run with an error.")
    hysteresis: Count = supported(2, "The scale is halved after this many overflows; 0 means 1.")
    consecutive_hysteresis: Flag = supported(False, "An update without overflow resets the count of overflows.")
    fp16_master_weights_and_grads: Flag = supported(
        False, "Use fp16 weights as masters: 10 bytes per parameter with Adam, and updates are rounded to fp16."
    )


class Bf16(Section):
    """16-bit training without loss scaling."""

    enabled: Flag = supported(False, "Cast parameters to bf16 and keep fp32 masters.")
    check_grad_overflow: Flag = supported(True, "A non-finite gradient on any rank skips the update on all.")
    immediate_grad_update: Flag = ignored(
        False, "Add gradients to their buffer at once.", why="gradients always reach their bucket from a hook", met=True
    )
    bf16_master_weights_and_grads: Flag = supported(
        False, "Use bf16 weights as masters; updates are rounded to bf16, see hf_zero.stochastic_rounding."
    )
    bf16_optimizer_states: Flag = supported(False, "With bf16 masters: keep optimizer states in bf16; else in fp32.")


class TorchAutocast(Section):
    """Forward under torch.autocast."""

    enabled: Flag = supported(False, "Run forward under torch.autocast; parameters keep their dtype.")
    dtype: AutocastDtype | None = supported(
        None, "Lower dtype; unset: torch's choice for the device. fp16 also scales the loss, as torch.amp does."
    )
    lower_precision_safe_modules: Names | None = unsupported(
        None, "Classes that communicate in that dtype.", why="communication_data_type sets one dtype for all gradients"
    )


class Amp(Section):
    """Apex's mixed precision, implemented by torch.autocast."""

    enabled: Flag = supported(False, "Run forward under torch.autocast in fp16, with a scaled loss.")
    opt_level: Literal["O0", "O1", "O2", "O3"] = supported(
        "O1", "O0: full precision; O1: torch.autocast; O2 and O3 are refused in favour of fp16.enabled."
    )
    loss_scale: Literal["dynamic"] | NonNegative = supported("dynamic", "Fixed loss scale, or dynamic.")
    min_loss_scale: NonNegative | None = supported(None, "Minimum of a dynamic scale.")
    max_loss_scale: NonNegative = ignored(2.0**24, "Maximum of a dynamic scale.", why="overflows limit the scale")
    verbosity: Count = ignored(1, "Verbosity of Apex.", why="Apex is not used")
    keep_batchnorm_fp32: Flag | None = unsupported(
        None, "Batch norm in fp32.", why="torch.autocast decides by operation"
    )
    master_weights: Flag | None = unsupported(None, "fp32 masters.", why="parameters are fp32 under torch.autocast")
    cast_model_type: Any = unsupported(None, "Dtype of the model.", why="parameters stay fp32; see fp16.enabled")
    patch_torch_functions: Flag | None = ignored(None, "Patch functions.", why="torch.autocast does that by itself")
    cast_model_outputs: Any = unsupported(None, "Dtype of outputs.", why="outputs are returned as the model gives them")
    num_losses: Count = unsupported(1, "Losses with scales of their own.", why="there is one loss scale")


class DataTypes(Section):
    """Dtypes of gradients and buffers."""

    grad_accum_dtype: Dtype | None = supported(None, "Dtype gradients are summed in. Unset: the model's.")
    param_dtype: Dtype | None = check(None, "Must agree with fp16.enabled and bf16.enabled.")
    buffer_dtype: Dtype | None = supported(
        None,
        "Dtype of floating-point buffers. Unset: their own; BatchNorm's on CPUs follow its weights.",
    )
    keep_in_fp32_modules: Literal["auto"] | Annotated[list[str], BeforeValidator(as_names)] = supported(
        "auto", "Names of buffers that buffer_dtype leaves as they are; auto: the lists of transformers' models."
    )
