"""Sections around the training loop: optimizer, scheduler, checkpoints, parallelism."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hf_zero.config.schema.fields import (
    Count,
    Flag,
    Free,
    Positive,
    Section,
    check,
    detail,
    ignored,
    supported,
    unsupported,
)

_WRITER = "every rank streams its own files from a few threads, fsynced and checksummed"


class Optimizer(Section):
    """The optimizer that the engine builds when the script brings none."""

    type: str | None = supported(None, "Adam, AdamW, AdamW8bit, Lion ..., or the name of a torch.optim class.")
    params: Free | None = supported(None, "Its keyword arguments.")
    legacy_fusion: Flag = unsupported(False, "Step signature of old Apex.", why="there is one step signature")


class Scheduler(Section):
    """The learning-rate schedule that the engine steps after every update."""

    type: str | None = supported(None, "One of our five schedules, or a torch.optim.lr_scheduler class.")
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
        "Warn", "What to do when ranks name the tag differently; rank 0's is taken unless this is Fail."
    )
    load_universal: Flag = supported(False, "Load what `latest_universal` names, if it is there.")
    use_node_local_storage: Flag = supported(
        False, "Every node writes into a folder of its own; to load, bring all files together in one."
    )
    parallel_write: ParallelWrite | None = detail(None, "Parallel writing.")
    checkpoint_serialization: Flag = ignored(
        True, "Serialise with torch.", why="files are always in torch's zip format, which every reader takes"
    )
    writer: CheckpointWriter | None = detail(None, "The writer.")


class Aio(Section):
    """File access under NVMe offload. Every request under way has a thread, which holds nothing of the interpreter."""

    block_size: Positive = supported(1_048_576, "Request size, rounded up to 4096.", unit="bytes")
    queue_depth: Positive = supported(8, "Requests under way.")
    intra_op_parallelism: Positive = supported(1, "Times queue_depth: the number of threads.")
    thread_count: Positive = supported(1, "Older name of intra_op_parallelism; the larger of the two counts.")
    single_submit: Flag = ignored(
        False, "Submit one by one.", why="requests are always handed over one by one", met=True
    )
    overlap_events: Flag = ignored(True, "Overlap submission and completion.", why="they always overlap")
    use_gds: Flag = unsupported(
        False, "GPUDirect storage.", why="files go through host memory; device nvme works without it"
    )

    @property
    def num_threads(self) -> int:
        """Each has one request under way."""
        return self.queue_depth * max(self.intra_op_parallelism, self.thread_count)


class TensorParallelGroup(Section):
    """Group of a tensor-parallel run."""

    tp_size: Positive = check(1, "Ranks per group: 1, or as autotp_size says.")
    tp_group: Any = detail(None, "Group object.")
    mpu: Any = detail(None, "Model-parallel unit.")


class TensorParallel(Section):
    """Automatic tensor parallelism."""

    autotp_size: Count = supported(0, "Ranks that hold parts of the same matrices; 0 and 1: none.", unit="ranks")
    tp_overlap_comm: Flag = ignored(
        False, "Overlap its collectives.", why="gradients of inputs are summed where autograd wants them"
    )
    preset_model: str | None = ignored(
        None, "Known model family.", why="transformers' own plan says which layers are cut"
    )
    partition_config: Any = check(None, "Own partition rules: refused beside autotp_size; set the model's tp_plan.")
    vocab_parallel_lm_head: Flag | None = check(
        None, "Logits of a part of the vocabulary: true is refused beside autotp_size."
    )
    vocab_parallel_ce_backend: str = ignored(
        "torch", "Loss implementation.", why="logits are whole on every rank, as losses expect them"
    )
    dtype: Any = ignored(None, "Dtype.", why="the sections bf16 and fp16 say it", met=True)
    tp: TensorParallelGroup | None = detail(None, "Group of ranks.")
