"""`hf-zero launch`: starts ranks on this machine, or hands over to pdsh, MPI, Slurm or torchrun. Imports no torch."""

from __future__ import annotations

_MAX_SHOWN = 80


class LaunchError(ValueError):
    """A job that cannot be started, and what to do about it."""


def shown(text: object) -> str:
    """A value as messages show it: quoted, escaped, and not longer than a line."""
    words = str(text)
    return repr(words if len(words) <= _MAX_SHOWN else words[:_MAX_SHOWN] + "...")
