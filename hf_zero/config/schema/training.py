"""Sections around the training loop: optimizer, scheduler, checkpoints, activations, data, parallelism."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hf_zero.config.schema.fields import (
    Count,
    Flag,
    Free,
    Positive,
    Section,
    Whole,
    detail,
    ignored,
    supported,
    unsupported,
)

_WRITER = "every rank streams its own files from a few threads, fsynced and checksummed"
_ACTIVATIONS = "Hugging Face models recompute through gradient_checkpointing (--gradient_checkpointing true)"


class Optimizer(Section):
    """The optimizer that the engine builds when the script brings none."""

    type: str | None = supported(None, "Adam, AdamW, or the name of a torch.optim class.")
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


class ActivationCheckpointing(Section):
    """Only for models that call deepspeed.checkpointing themselves."""

    partition_activations: Flag = ignored(False, "Shard saved activations.", why=_ACTIVATIONS)
    cpu_checkpointing: Flag = ignored(False, "Keep them in host memory.", why=_ACTIVATIONS)
    contiguous_memory_optimization: Flag = ignored(False, "Keep them in one buffer.", why=_ACTIVATIONS)
    number_checkpoints: Count | None = ignored(None, "How many.", why=_ACTIVATIONS)
    synchronize_checkpoint_boundary: Flag = ignored(False, "Synchronise at each.", why=_ACTIVATIONS)
    profile: Flag = ignored(False, "Log times.", why=_ACTIVATIONS)


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
    use_gds: Flag = unsupported(False, "GPUDirect storage.", why="files are read and written through host memory")


class TensorParallelGroup(Section):
    """Group of a tensor-parallel run."""

    tp_size: Positive = unsupported(1, "Ranks per group.", why="only data parallelism is built")
    tp_group: Any = detail(None, "Group object.")
    mpu: Any = detail(None, "Model-parallel unit.")


class TensorParallel(Section):
    """Automatic tensor parallelism."""

    autotp_size: Count = unsupported(
        0, "Ranks per tensor-parallel group; 0 and 1: none.", why="only data parallelism is built", off=(0, 1)
    )
    tp_overlap_comm: Flag = detail(False, "Overlap its collectives.")
    preset_model: str | None = detail(None, "Known model family.")
    partition_config: Any = detail(None, "Own partition rules.")
    vocab_parallel_lm_head: Flag | None = detail(None, "Shard the output layer.")
    vocab_parallel_ce_backend: str = detail("torch", "Loss implementation.")
    dtype: Any = detail(None, "Dtype.")
    tp: TensorParallelGroup | None = detail(None, "Group of ranks.")


class Elasticity(Section):
    """Batch sizes that suit many world sizes."""

    enabled: Flag = detail(False, "Choose the batch sizes from the world size.")
    max_train_batch_size: Positive = detail(2000, "Largest batch.")
    micro_batch_sizes: list[Positive] = detail([2, 4, 6], "Allowed micro batches.")
    min_gpus: Positive = detail(1, "Fewest ranks.")
    max_gpus: Positive = detail(10_000, "Most ranks.")
    min_time: Whole = detail(0, "Shortest run.", unit="minutes")
    prefer_larger_batch: Flag = detail(True, "Larger rather than smaller.")
    ignore_non_elastic_batch_info: Flag = detail(False, "Override batch sizes given elsewhere.")
    version: float = detail(0.2, "Version of the rules.")
    num_gpus_per_node: Positive = detail(1, "Ranks per node.")
    model_parallel_size: Positive = detail(1, "Model-parallel size.")


class Curriculum(Section):
    """Sequence-length curriculum of old releases."""

    enabled: Flag = detail(False, "Grow the difficulty during training.")
    curriculum_type: str = detail("seqlen", "What grows.")
    min_difficulty: Count | None = detail(None, "First difficulty.")
    max_difficulty: Count | None = detail(None, "Last difficulty.")
    schedule_type: str | None = detail(None, "Shape of growth.")
    schedule_config: Free | None = detail(None, "Settings of that shape.")


class DynamicBatching(Section):
    """Batches by tokens."""

    enabled: Flag = detail(False, "Batch by tokens.")
    max_tokens: Positive | None = detail(None, "Tokens per batch.", unit="tokens")
    lr_scaling_method: str = detail("linear", "How the learning rate follows.")
    min_batch_size: Positive = detail(1, "Fewest samples.")
    max_batch_size: Positive | None = detail(None, "Most samples.")
    sequence_picking_order: str = detail("dataloader", "Order.")
    verbose: Flag = detail(False, "Log batches.")
    metrics_path: str | None = detail(None, "File of lengths.")


class DataSampling(Section):
    """Sampling for DeepSpeed's own loader."""

    enabled: Flag = detail(False, "Sample by difficulty.")
    num_epochs: Positive = detail(1000, "Epochs.")
    num_workers: Count = detail(0, "Loader workers.")
    pin_memory: Flag = detail(False, "Page-locked batches.")
    curriculum_learning: Free | None = detail(None, "Curriculum metrics.")
    dynamic_batching: DynamicBatching | None = detail(None, "Batches by tokens.")


class DataRouting(Section):
    """Token dropping."""

    enabled: Flag = detail(False, "Route tokens.")
    random_ltd: Free | None = detail(None, "Random layer-wise token dropping.")


class DataEfficiency(Section):
    """Curriculum sampling and token dropping."""

    enabled: Flag = detail(False, "Main switch.")
    seed: Whole = detail(1234, "Seed.")
    data_sampling: DataSampling | None = detail(None, "Sampling.")
    data_routing: DataRouting | None = detail(None, "Routing.")


class SparseAttention(Section):
    """Block-sparse attention modules of old releases."""

    mode: str = detail("fixed", "Pattern.")
    block: Positive = detail(16, "Block side.", unit="tokens")
    different_layout_per_head: Flag = detail(False, "A layout per head.")
    num_local_blocks: Count = detail(4, "Local blocks.")
    num_global_blocks: Count = detail(1, "Global blocks.")
    attention: str = detail("bidirectional", "Direction.")
    horizontal_global_attention: Flag = detail(False, "Global rows too.")
    num_different_global_patterns: Count = detail(1, "Global patterns.")
    num_random_blocks: Count = detail(0, "Random blocks.")
    local_window_blocks: list[Count] = detail([4], "Local windows.")
    global_block_indices: list[Count] = detail([0], "Global blocks.")
    global_block_end_indices: list[Count] | None = detail(None, "Ends of the global blocks.")
    num_sliding_window_blocks: Count = detail(3, "Sliding window.")
