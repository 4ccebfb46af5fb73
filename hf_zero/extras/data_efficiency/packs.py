"""Batches with a number of tokens instead of samples: packs of samples, and scaling of the learning rate.

One forward of one rank processes `train_micro_batch_size_per_gpu` packs; an update has `train_batch_size` packs.
Everything is a pure function of the lengths and the settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_zero.extras.data_efficiency.section import PackingPolicy
from hf_zero.log import logger

Packs = list[list[int]]
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class PackedBatches:
    """The packs of one epoch.

    Attributes:
        packs: the packs of all updates, in order.
        per_update: number of packs per update.
        samples: number of samples of every update.
        longest: length of the longest sample of every update.
    """

    packs: Packs
    per_update: int
    samples: list[int]
    longest: list[int]


def pack(
    lengths: Sequence[int], numbers: Sequence[int], policy: PackingPolicy, per_update: int, *, alike: bool = False
) -> PackedBatches:
    """Pack samples in the policy's order, each pack with as many samples as its limits allow.

    Samples that exceed the limits of a pack are dropped, and so are trailing packs that do not fill an update.

    Args:
        lengths: length of every sample of `numbers`, in tokens.
        alike: whether all packs of an update must have the same number of samples.

    Raises:
        ValueError: if there are not enough samples for one update.
    """
    fitting = [(length, number) for length, number in zip(lengths, numbers, strict=True) if length <= policy.max_tokens]
    if len(fitting) < len(numbers):
        dropped = [number for length, number in zip(lengths, numbers) if length > policy.max_tokens]
        shown = ", ".join(map(str, dropped[:_SHOWN])) + (", ..." if len(dropped) > _SHOWN else "")
        text = "dynamic_batching: %d samples are longer than max_tokens (%d) and are dropped: %s"
        logger.warning(text, len(dropped), policy.max_tokens, shown)
    if policy.order == "random":
        shuffled = np.random.default_rng((policy.seed, policy.epoch)).permutation(len(fitting))
        fitting = [fitting[place] for place in shuffled]
    elif policy.order == "seqlen":
        fitting.sort()
    groups = _groups(fitting, policy, per_update if alike else 1)
    whole = len(groups) // per_update * per_update
    if not whole:
        raise ValueError(
            f"dynamic_batching: {len(numbers)} samples make {len(groups)} packs of {policy.limits}, but an update "
            f"needs {per_update} (train_batch_size): lower train_batch_size, max_tokens or min_batch_size"
        )
    updates = [groups[start : start + per_update] for start in range(0, whole, per_update)]
    return PackedBatches(
        packs=[[number for _, number in group] for group in groups[:whole]],
        per_update=per_update,
        samples=[sum(len(group) for group in update) for update in updates],
        longest=[max(length for group in update for length, _ in group) for update in updates],
    )


def _groups(samples: Sequence[tuple[int, int]], policy: PackingPolicy, together: int) -> list[list[tuple[int, int]]]:
    """Build packs in order, `together` equal-sized ones at a time, whose samples are dealt in turn to even lengths."""
    sets: list[list[list[tuple[int, int]]]] = []  # of `together` packs
    tokens: list[int] = []  # of the packs of the last set
    for start in range(0, len(samples) - together + 1, together):
        row = samples[start : start + together]
        is_full = not sets or len(sets[-1][0]) == policy.max_samples
        if is_full or any(have + length > policy.max_tokens for have, (length, _) in zip(tokens, row)):
            sets.append([[] for _ in range(together)])
            tokens = [0] * together
        for place, sample in enumerate(row):
            sets[-1][place].append(sample)
            tokens[place] += sample[0]
    left_out = together * sum(len(packs[0]) for packs in sets if len(packs[0]) < policy.min_samples)
    if left_out:
        logger.warning("dynamic_batching: %d samples in packs smaller than min_batch_size are dropped", left_out)
    return [pack for packs in sets if len(packs[0]) >= policy.min_samples for pack in packs]


def batch_by_seqlens(
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """DeepSpeed's function of this name.

    Args:
        sequence_ids_per_mb: the samples to use; default: all.
        sequence_picking_order: "dataloader", "random" or "seqlen".

    Returns:
        (update, samples) for every pack; the number of samples of every update; its maximum length.

    Raises:
        ValueError: for an unknown order, or if there are not enough samples for one update.
    """
    policy = PackingPolicy(
        max_tokens=max_tokens,
        min_samples=min_batch_size or 1,
        max_samples=max_batch_size,
        order=sequence_picking_order,
        seed=seed or 0,
    )
    numbers = list(range(len(seqlens))) if sequence_ids_per_mb is None else [int(n) for n in sequence_ids_per_mb]
    lengths = [int(seqlens[number]) for number in numbers]
    packing = pack(lengths, numbers, policy, effective_batch_size, alike=required_microbatches_of_same_size)
    packs = [(place // packing.per_update, samples) for place, samples in enumerate(packing.packs)]
    if verbose:
        for update, (samples, longest) in enumerate(zip(packing.samples, packing.longest)):
            logger.info("update %d: %d samples, the longest of %d tokens", update, samples, longest)
    return packs, packing.samples, packing.longest


def scale_lr(base_batch_size: int, batch_size: int, base_lr: Any = 1, method: str | None = "linear") -> Any:
    """Scale a learning rate for `base_batch_size` samples to an update of `batch_size` samples.

    Args:
        method: "linear" (Goyal et al. 2017, arXiv 1706.02677), "sqrt" (Krizhevsky 2014, arXiv 1404.5997), "none".
    """
    share = batch_size / base_batch_size
    factors = {"linear": share, "sqrt": share**0.5, "none": 1.0}
    name = "none" if method is None else method.lower()
    if name not in factors:
        raise ValueError(f"lr_scaling_method {method!r}: must be {', '.join(factors)}")
    return base_lr * factors[name]


class VariableBatches:
    """The packs of all updates over all epochs."""

    def __init__(
        self,
        lengths: Sequence[int],
        policy: PackingPolicy,
        per_update: int,
        numbers: Sequence[int] | None = None,
        *,
        alike: bool = False,
    ) -> None:
        """
        Args:
            numbers: the samples to use; default: all.
            alike: whether all packs of an update must have the same number of samples.
        """
        self._numbers = list(range(len(lengths))) if numbers is None else list(numbers)
        self._lengths = [int(lengths[number]) for number in self._numbers]
        self._policy = policy
        self._per_update = per_update
        self._alike = alike
        self._ends: list[int] = []  # end of every epoch so far, in updates
        self._made: dict[int, PackedBatches] = {}
        self.epoch(0)  # raises for invalid settings

    def epoch(self, number: int) -> PackedBatches:
        """The packs of an epoch; the order "random" differs between epochs."""
        which = number if self._policy.order == "random" else 0
        if which not in self._made:
            if len(self._made) > 1:
                self._made.pop(next(iter(self._made)))
            policy = replace(self._policy, epoch=which)
            self._made[which] = pack(self._lengths, self._numbers, policy, self._per_update, alike=self._alike)
        return self._made[which]

    def samples_of(self, update: int) -> int:
        """Number of samples of an update, counted from 0 over all epochs."""
        while not self._ends or self._ends[-1] <= update:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self.epoch(len(self._ends)).samples))
        epoch = int(np.searchsorted(self._ends, update, side="right"))
        return self.epoch(epoch).samples[update - (self._ends[epoch - 1] if epoch else 0)]
