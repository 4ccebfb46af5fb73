"""A drive that fails on one rank stops all of them, with the reason."""

from __future__ import annotations

from collections.abc import Callable

from hf_zero.comm import Collectives
from hf_zero.memory.requests import StorageError


def together(act: Callable[[], object], collectives: Collectives) -> None:
    """Call `act` on every rank; if it raises StorageError on any, all raise it. Collective."""
    problem = None
    try:
        act()
    except StorageError as error:
        problem = str(error)
    stop_if_any(problem, collectives)


def stop_if_any(problem: str | None, collectives: Collectives) -> None:
    """All ranks raise StorageError if any has a problem. Collective."""
    problems = collectives.gather_objects(problem)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if found:
        raise StorageError("; ".join(found))
