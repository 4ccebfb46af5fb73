"""Messages of hf_zero's logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard(records: list[logging.LogRecord] | None = None, *, level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Collects the messages of hf_zero's logger, from a level on, and its records if a list for them is given."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if records is not None:
                records.append(record)

    logger, ear = logging.getLogger("hf_zero"), Ear(level)
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)
