"""Sums of flat vectors accumulated in fp32 for any dtype of the parts, and copies between vectors and padded rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_zero.kernels.vectors import chunks, scratch_like


def sum_parts_reference(parts: Sequence[Tensor], out: Tensor) -> None:
    """out = sum of `parts` (1-D, equal length), accumulated in at least fp32 and rounded once."""
    fp32 = torch.promote_types(torch.float32, out.dtype)
    out.copy_(torch.stack([part.to(fp32) for part in parts]).sum(dim=0))


def sum_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Same as the reference, without a full fp32 copy. `out` may be one of the parts."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if len(parts) == 2 or out.dtype not in (torch.bfloat16, torch.float16):
        # The sum of two 16-bit values is rounded once in any case.
        if any(part.data_ptr() == out.data_ptr() for part in parts[2:]):
            _sum_into_a_part(parts, out)
            return
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return
    total, part_fp32 = scratch_like(out.device, out.numel()), scratch_like(out.device, out.numel())
    for start, length in chunks(out.numel(), out.device):
        total[:length].copy_(parts[0].narrow(0, start, length))
        for part in parts[1:]:
            total[:length].add_(part_fp32[:length].copy_(part.narrow(0, start, length)))
        out.narrow(0, start, length).copy_(total[:length])


def _sum_into_a_part(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sum in the order of `parts` by chunks; `out` is one of the parts, and is only overwritten after it was read."""
    total = torch.empty(scratch_like(out.device, out.numel()).shape, dtype=out.dtype, device=out.device)
    for start, length in chunks(out.numel(), out.device):
        torch.add(parts[0].narrow(0, start, length), parts[1].narrow(0, start, length), out=total[:length])
        for part in parts[2:]:
            total[:length].add_(part.narrow(0, start, length))
        out.narrow(0, start, length).copy_(total[:length])


def add_into(total: Tensor, part: Tensor) -> None:
    """total += part for 1-D tensors of any dtypes; `part` is first rounded to total's dtype.

    On a CPU, PyTorch's mixed-dtype addition is ten times slower than a cast of chunks that stay in cache. On a device,
    it is a single pass over memory, and a separate cast would be another one.
    """
    is_exact = torch.promote_types(total.dtype, part.dtype) == total.dtype
    if total.dtype == part.dtype or (is_exact and total.device.type != "cpu"):
        total.add_(part)
        return
    rounded = torch.empty(scratch_like(total.device, total.numel()).shape, dtype=total.dtype, device=total.device)
    for start, length in chunks(total.numel(), total.device):
        total.narrow(0, start, length).add_(rounded[:length].copy_(part.narrow(0, start, length)))


def write_rows(rows: Tensor, values: Tensor) -> None:
    """Copy `values` into `rows` (2-D), with the padding set to zero."""
    num_full, rest = divmod(values.numel(), rows.shape[1])
    if num_full:
        rows[:num_full].copy_(values[: num_full * rows.shape[1]].view(num_full, -1))
    if rest:
        rows[num_full, :rest].copy_(values[num_full * rows.shape[1] :])
    if num_full < rows.shape[0]:
        rows[num_full, rest:].zero_()
        rows[num_full + 1 :].zero_()


def add_rows(rows: Tensor, values: Tensor) -> None:
    """Add `values` to `rows` (2-D); the padding is unchanged."""
    chunk = rows.shape[1]
    for row, start in enumerate(range(0, values.numel(), chunk)):
        part = values[start : start + chunk]
        add_into(rows[row, : part.numel()], part)


def read_rows(values: Tensor, rows: Tensor) -> None:
    """Copy `rows` back into `values`, without the padding."""
    num_full, rest = divmod(values.numel(), rows.shape[1])
    if num_full:
        values[: num_full * rows.shape[1]].view(num_full, -1).copy_(rows[:num_full])
    if rest:
        values[num_full * rows.shape[1] :].copy_(rows[num_full, :rest])
