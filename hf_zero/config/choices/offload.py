"""What the sections on offloading say, as policies."""

from __future__ import annotations

from hf_zero.config import policies
from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam


def optimizer_offload(section: OffloadOptimizer | None) -> policies.OptimizerOffload | None:
    if section is None or section.device in (None, "none"):
        return None
    return policies.OptimizerOffload(
        device="nvme" if section.device == "nvme" else "cpu",
        folder=section.nvme_path,
        pinned=section.pin_memory,
        buffer_count=section.buffer_count,
        reads_ahead=section.pipeline_read is not False,
        writes_behind=section.pipeline_write is not False,
        writes_first=not section.fast_init,
        ratio=section.ratio,
    )


def parameter_offload(section: OffloadParam | None) -> policies.ParameterOffload | None:
    if section is None or section.device in (None, "none"):
        return None
    return policies.ParameterOffload(
        device="nvme" if section.device == "nvme" else "cpu",
        folder=section.nvme_path,
        pinned=section.pin_memory,
        buffer_count=section.buffer_count,
        buffer_numel=section.buffer_count * section.buffer_size,
        host_numel=section.max_in_cpu,
    )
