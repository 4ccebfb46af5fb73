"""Sections for files: checkpoints, and the access to drives under NVMe offload."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, create_model

from hf_zero.config.rules import Advice
from hf_zero.config.schema.fields import Flag, Positive, Section, detail, ignored, supported, unsupported

_WRITER = "every rank writes its own files from a few threads, with fsync and checksums"


def _as_tag_rule(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


class ParallelWrite(Section):
    """Parallel writing of checkpoints."""

    pipeline_stage: Flag = ignored(
        False, "By pipeline stage.", why=_WRITER, words="pipeline_stage value of {value} is invalid"
    )


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
        "Warn",
        "What to do if ranks use different tags; rank 0's is used unless this is Fail.",
        words="invalid tag_validation value",
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


# Created by a call, because the key is a Python keyword and cannot be written as a field of a class.
OurCheckpoints: Any = create_model(  # type: ignore[call-overload]
    "OurCheckpoints",
    __base__=Section,
    __doc__="Checkpoints beyond what DeepSpeed's section says.",
    **{
        "async": (
            Flag,
            supported(
                False,
                "Save asynchronously: state is copied to host memory during forward and backward, and another process "
                "writes it. The next save and the exit wait for it, and its errors are raised at the next step.",
            ),
        )
    },
)


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

    rules = (
        Advice(
            keys=(
                "aio",
                "zero_optimization.offload_optimizer.device",
                "zero_optimization.offload_param.device",
                "zero_optimization.stage",
            ),
            applies=lambda aio, states, parameters, stage: (
                not (states == "nvme" or (stage == 3 and parameters == "nvme"))
            ),
            text="no effect, nothing is offloaded to NVMe",
            ignored=True,
        ),
    )
