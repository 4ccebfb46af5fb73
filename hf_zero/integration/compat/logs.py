"""The logging helpers of `deepspeed.utils.logging`, and what else reports on a run, on our logger."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hf_zero.comm import this_process
from hf_zero.log import log_dist, logger

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


@functools.lru_cache(None)
def warning_once(message: str) -> None:
    """A warning, the first time that somebody gives it."""
    logger.warning(message)


@functools.lru_cache(None)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist`, the first time only."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """To standard output on the given ranks; -1 among them, or None, means every rank."""
    if ranks is None or -1 in ranks or this_process().rank in ranks:
        sys.stdout.write(f"[Rank {this_process().rank}] {message}\n")
        sys.stdout.flush()


def print_json_dist(
    message: Mapping[str, Any], ranks: Sequence[int] | None = None, path: str | os.PathLike[str] | None = None
) -> None:
    """Write `message` with the rank as a JSON file, on the given ranks; without a path nothing."""
    if path is None or not (ranks is None or -1 in ranks or this_process().rank in ranks):
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**message, "rank": this_process().rank}, file)


def get_log_level_from_string(log_level_str: str) -> int:
    """
    Raises:
        ValueError: for a level that is none.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str!r} is not one of the log levels {', '.join(log_levels)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger lets through messages of this level."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def print_configuration(args: Any, name: str) -> None:
    """Log every attribute of a namespace."""
    logger.info("%s:", name)
    for attribute, value in sorted(vars(args).items()):
        logger.info("  %s %s %s", attribute, "." * max(1, 29 - len(attribute)), value)


class LoggerFactory:
    """Makes loggers; kept for programs that make their own through it."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        if name is None:
            raise ValueError("create_logger() needs a name")
        made = logging.getLogger(name)
        made.setLevel(level)
        return made
