"""Parallel groups for unit tests."""

from __future__ import annotations

from hf_zero.comm import Channel, Collectives, ParallelGroups
from hf_zero.comm.collectives import LoneCollectives


def groups_of(collectives: Collectives | None = None) -> ParallelGroups:
    """Plain ZeRO with the same collectives on every channel; default: a world of one."""
    given = LoneCollectives() if collectives is None else collectives
    return ParallelGroups.plain(dict.fromkeys(Channel, given))
