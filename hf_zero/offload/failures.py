"""A drive that fails on one rank stops all of them, with the reason, where they meet the next time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from hf_zero.comm import Collectives

T = TypeVar("T")


class StorageError(RuntimeError):
    """A file that training lives on cannot be read or written."""


def all_or_none(act: Callable[[], T], collectives: Collectives) -> T:
    """Call `act` on every rank; if it raises StorageError on any, all raise it. Collective."""
    problem, found = None, list[T]()
    try:
        found.append(act())
    except StorageError as error:
        problem = error
    stop_if_any(problem, collectives)
    return found[0]


def stop_if_any(problem: StorageError | None, collectives: Collectives) -> None:
    """All ranks raise StorageError if any has a problem. Collective."""
    problems = collectives.gather_objects(None if problem is None else str(problem))
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if found:
        raise StorageError("; ".join(found))


def sync_failures(problem: StorageError | None, collectives: Collectives, device: torch.device) -> None:
    """`stop_if_any` for where it is called often: one number travels while all is well. Collective."""
    failed = torch.tensor([float(problem is not None)], dtype=torch.float64, device=device)
    collectives.sum_small(failed)
    if failed.item():
        stop_if_any(problem, collectives)
