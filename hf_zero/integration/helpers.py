"""Small helpers that training scripts import from deepspeed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import psutil
import torch

from hf_zero.comm import ledger
from hf_zero.integration.accelerator import get_accelerator
from hf_zero.log import log_dist

T = TypeVar("T")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy every tensor inside nested dicts, lists and tuples, so that a view is saved without its whole storage.

    Tied tensors (the same elements of the same memory) are one tensor in the copy, too: whoever writes it to a file
    tells by that what has to be written once.
    """
    return _clone(item, device, {})


def _clone(item: Any, device: torch.device | str, copies: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        return _clone_tensor(item, device, copies)
    if isinstance(item, dict):
        copied = item.copy()
        copied.update((key, _clone(value, device, copies)) for key, value in item.items())
        return copied
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_clone(value, device, copies) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_clone(value, device, copies) for value in item)
    return item


def _clone_tensor(
    tensor: torch.Tensor, device: torch.device | str, copies: dict[tuple[Any, ...], torch.Tensor]
) -> torch.Tensor:
    place: tuple[Any, ...] = (id(tensor),)  # memory that is empty or elsewhere says nothing
    if tensor.layout is torch.strided and tensor.numel() and tensor.data_ptr():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if place not in copies:
        # A parameter that is a view of a flat buffer would drag that buffer into the file: hence always a copy.
        copies[place] = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    return copies[place]


class RepeatingLoader(Iterable[T]):
    """A data loader that starts over when it is exhausted."""

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        return next(self._batches)


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> Iterator[None]:
    """Build modules on a device (by default without memory) and in a floating dtype."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of this process and its device on rank 0, if forced (scripts leave these calls in)."""
    if not force:
        return
    gib = 1024**3
    here, device = psutil.Process().memory_info().rss / gib, get_accelerator()
    log_dist(
        f"{message} | process {here:.2f} GiB | {device.current_device_name()} allocated "
        f"{device.memory_allocated() / gib:.2f} GiB, peak {device.max_memory_allocated() / gib:.2f} GiB"
    )


def log_summary(show_straggler: bool = False) -> None:
    """Log on rank 0 every collective the engine issued so far: phase, name, calls, bytes.

    Args:
        show_straggler: accepted for DeepSpeed's callers; waiting times are not recorded, so none are shown.
    """
    rows = [
        f"{phase:10} {operation:20} {tally.calls:8d} calls {tally.num_bytes / 1024**2:12.2f} MiB"
        for (phase, operation), tally in sorted(ledger.tallies.items())
    ]
    log_dist("collectives issued so far\n" + "\n".join(rows or ["none"]))
