"""What is wrong with a command line, a hostfile or a file of variables: a sentence for the user, no traceback."""

from __future__ import annotations

_MAX_SHOWN = 80


class LaunchError(ValueError):
    """A job that cannot be started, and what to do about it."""


def shown(text: object) -> str:
    """A value as it may stand in a message: quoted, escaped, and not longer than a line."""
    words = str(text)
    return repr(words if len(words) <= _MAX_SHOWN else words[:_MAX_SHOWN] + "...")
