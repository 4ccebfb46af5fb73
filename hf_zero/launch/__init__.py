"""`hf-zero launch`: starts ranks on this machine, or hands over to pdsh, MPI, Slurm or torchrun. Imports no torch."""

from __future__ import annotations

_MAX_SHOWN = 80


class LaunchError(ValueError):
    """A job cannot be started; the message says what to do about it."""


def shown(text: object) -> str:
    """`text` quoted, escaped and truncated to one line, for use in messages."""
    full = str(text)
    return repr(full if len(full) <= _MAX_SHOWN else full[:_MAX_SHOWN] + "...")
