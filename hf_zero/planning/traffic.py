"""Bytes that one rank sends per update, to ranks of its host and to other hosts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per update and rank."""

    within: float = 0.0
    across: float = 0.0

    @property
    def total(self) -> float:
        return self.within + self.across


def traffic(
    *,
    stage: int,
    trained_bytes: float,
    whole_bytes: float,
    kept_share: float,
    micro_batches: int,
    ranks: int,
    hosts: int,
) -> Traffic:
    """An exchange of B bytes among n ranks makes each send B (n - 1) / n, an all-reduce twice that.

    Args:
        trained_bytes, whole_bytes: of trained parameters, and of all.
        kept_share: of stage 3's gathers that backward need not repeat.
    """
    if ranks == 1:
        return Traffic()
    reduced, gathered = trained_bytes, trained_bytes if stage in (1, 2) else 0.0
    if stage == 0:
        reduced *= 2
    if stage >= 2:
        reduced *= micro_batches
    if stage == 3:
        gathered = whole_bytes * (2 - kept_share) * micro_batches
    sent = (reduced + gathered) * (ranks - 1) / ranks
    per_host = ranks // hosts
    away = (ranks - per_host) / (ranks - 1)  # of the others, so many are on other hosts
    return Traffic(within=sent * (1 - away), across=sent * away)
