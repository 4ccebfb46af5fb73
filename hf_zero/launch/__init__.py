"""`hf-zero launch`: starts ranks on this machine, or hands over to pdsh, MPI, Slurm or torchrun. Imports no torch."""

from __future__ import annotations

from typing import Any

_MAX_SHOWN = 80


class LaunchError(ValueError):
    """A job cannot be started; the message says what to do about it."""


def extra_service(name: str) -> Any:
    """An extra's service. It is imported only here, because the config's classes take half a second.

    Raises:
        LaunchError: the extra is not installed.
    """
    from hf_zero.config.extras import ExtraMissing, service

    try:
        return service(name)
    except ExtraMissing as error:
        raise LaunchError(str(error)) from None


def shown(text: object) -> str:
    """`text` quoted, escaped and truncated to one line, for use in messages."""
    full = str(text)
    return repr(full if len(full) <= _MAX_SHOWN else full[:_MAX_SHOWN] + "...")
