"""How a kernel walks a long vector: pieces that stay in cache on a CPU, long ones on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CPU_CHUNK_NUMEL = 1 << 17  # per thread: with 512 KiB of fp32 scratch the chunk stays in cache, call overhead below 1%
GPU_CHUNK_NUMEL = 1 << 26


def chunk_numel(device: torch.device, times: int = 1) -> int:
    """Elements of a chunk; `times` as many on a CPU for a kernel of many calls, whose overhead counts more."""
    return CPU_CHUNK_NUMEL * times * torch.get_num_threads() if device.type == "cpu" else GPU_CHUNK_NUMEL


def chunks(numel: int, device: torch.device, times: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (start, length) pairs that cover `numel` elements."""
    step = chunk_numel(device, times)
    for start in range(0, numel, step):
        yield start, min(step, numel - start)


def scratch_like(device: torch.device, numel: int, times: int = 1) -> torch.Tensor:
    """An uninitialised fp32 chunk for at most `numel` elements."""
    return torch.empty(min(chunk_numel(device, times), numel), dtype=torch.float32, device=device)
