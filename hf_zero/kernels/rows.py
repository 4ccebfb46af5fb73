"""Cuts a flat tensor into equal chunks, one per row, and puts it together again.

`rows` is a 2-D view (world, chunk) into a larger buffer, so its rows are apart; `values` is 1-D with at most
world * chunk elements. What the last rows have beyond it is padding.
"""

from __future__ import annotations

from torch import Tensor

from hf_zero.kernels.accumulate import add_into


def write_rows(rows: Tensor, values: Tensor) -> None:
    """Copy `values` into `rows`; padding becomes zero."""
    num_full, rest = divmod(values.numel(), rows.shape[1])
    if num_full:
        rows[:num_full].copy_(values[: num_full * rows.shape[1]].view(num_full, -1))
    if rest:
        rows[num_full, :rest].copy_(values[num_full * rows.shape[1] :])
    if num_full < rows.shape[0]:
        rows[num_full, rest:].zero_()
        rows[num_full + 1 :].zero_()


def add_rows(rows: Tensor, values: Tensor) -> None:
    """Add `values` to `rows`; padding is left alone."""
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
