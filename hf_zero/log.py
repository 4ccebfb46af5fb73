"""The `hf_zero` logger with one handler. Only rank 0 logs messages below warnings."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

logger = logging.getLogger("hf_zero")
_WIDTH_IN_FILES = 150


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks only; -1 among them means every rank, None means rank 0."""
    chosen = [0] if ranks is None else ranks
    if -1 in chosen or _rank() in chosen:
        logger.log(level, "[Rank %d] %s", _rank(), message, extra={"chosen_rank": True})


def tracked(items: Sequence[T], words: str) -> Iterator[T]:
    """Yield the items, with a progress bar if rank 0 has a terminal."""
    if _rank() != 0 or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console  # only needed with a terminal
    from rich.progress import track

    yield from track(items, words, console=Console(stderr=True), transient=True)


def table_console() -> Console:
    """Return a console for tables: as wide as the terminal or $COLUMNS, else wide enough for most tables."""
    from rich.console import Console

    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Console(highlight=False, width=None if is_known else _WIDTH_IN_FILES)


def _rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _speaks(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or _rank() == 0 or hasattr(record, "chosen_rank")


def _root_is_silent(record: logging.LogRecord) -> bool:
    """Whether the root logger prints nothing. If it has handlers, it prints the record, which must not appear twice."""
    return not logging.getLogger().handlers


def _configure() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [hf_zero] %(message)s", "%H:%M:%S"))
    handler.addFilter(_root_is_silent)
    logger.addHandler(handler)
    logger.addFilter(_speaks)
    logger.setLevel(logging.INFO)


_configure()
