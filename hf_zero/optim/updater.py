"""The seam between the engine and an optimizer: reduced gradients in, updated weights out, shard by shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.layout import Interval, Piece


@dataclass(frozen=True, slots=True)
class MasterTensor:
    """One tensor that the base optimizer holds in its `param_groups`: a view of `interval` of the owned part."""

    parameter: nn.Parameter
    interval: Interval


@dataclass(frozen=True, slots=True)
class MasterShard:
    """What one rank updates of one bucket for one of the optimizer's groups.

    Attributes:
        bucket: index of the bucket.
        part: which elements of the rank's part of the bucket these are.
        group: index of the optimizer's param group.
        master: 1-D master weights of the owned part.
        narrow: 1-D, same length, where the rounded weights go; None when the master is the weight.
        tensors: how the base optimizer sees `master`: one flat tensor, or one tensor per parameter.
        pieces: which parameters lie where in `master`.
    """

    bucket: int
    part: Interval
    group: int
    master: Tensor
    narrow: Tensor | None
    tensors: tuple[MasterTensor, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class ShardGradients:
    """Inputs of one step.

    Attributes:
        reduced: one 1-D tensor per shard (summed over ranks), None for a shard without any gradient. For an updater
            that takes local gradients: of the whole bucket, from this rank alone.
        used: indices of the parameters that got a gradient on any rank since the last step.
        scale: factor to apply to every gradient: the mean over ranks, clipping, loss scale.
    """

    reduced: Sequence[Tensor | None]
    used: Set[int]
    scale: float


@dataclass(frozen=True, slots=True)
class Peers:
    """What an updater may ask of the ranks that share its parameters. Every rank asks the same, in the same order.

    Attributes:
        add_up: adds a small tensor up over the ranks, in place.
        gather_whole: from a shard's values (1-D, as long as its master) on every rank to whole tensors in their own
            shapes, for every parameter that has a part in the shard.
    """

    add_up: Callable[[Tensor], object]
    gather_whole: Callable[[MasterShard, Tensor], Mapping[int, Tensor]]


class Updater(ABC):
    """Runs one optimizer over all shards of this rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[MasterShard]) -> None:
        self.optimizer = optimizer
        self.shards = tuple(shards)

    @property
    def takes_local_gradients(self) -> bool:
        """Whether the next step wants this rank's own gradients of whole buckets, unreduced. The same on all ranks."""
        return False

    def collect_state(self) -> None:  # noqa: B027
        """Ahead of saving: put into the optimizer's state what is kept elsewhere. Collective. Nothing, by default."""

    def state_replaced(self) -> None:  # noqa: B027
        """The optimizer's state has been loaded: forget what was derived from the old one. Nothing, by default."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        """Per-element states of a parameter of this group; None where only the optimizer itself knows."""
        return None

    def parameter_steps(self) -> dict[int, int]:
        """Updates that each parameter with a piece here has seen; empty where the optimizer's own counters say it."""
        return {}

    def restore_steps(self, steps: Mapping[int, int]) -> None:  # noqa: B027
        """Take back what `parameter_steps` gave, on any layout. Parameters that are not named keep the shard's."""

    @abstractmethod
    def step(self, gradients: ShardGradients) -> Iterator[int]:
        """Update the shards; yields the index of each as soon as its new weights are in place."""


class WholeStepUpdater(Updater):
    """Any torch optimizer, as itself: gradients are handed over in the master dtype and its own `step` is called.

    A parameter that got no gradient anywhere is skipped, as in plain PyTorch, when the optimizer holds it as a tensor
    of its own; inside a flat shard it counts as zero unless the whole shard is unused.
    """

    @torch.no_grad()
    def step(self, gradients: ShardGradients) -> Iterator[int]:
        for shard, reduced in zip(self.shards, gradients.reduced, strict=True):
            if reduced is None:
                continue
            for tensor in shard.tensors:
                if self._is_used(shard, tensor, gradients.used):
                    part = reduced.narrow(0, tensor.interval.start, tensor.interval.numel).to(shard.master.dtype)
                    part = part * gradients.scale if gradients.scale != 1.0 else part
                    tensor.parameter.grad = part.view(tensor.parameter.shape)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for index, shard in enumerate(self.shards):
            if gradients.reduced[index] is None:
                continue
            if shard.narrow is not None:
                shard.narrow.copy_(shard.master)
            yield index

    @staticmethod
    def _is_used(shard: MasterShard, tensor: MasterTensor, used: Set[int]) -> bool:
        return any(
            piece.parameter in used
            and Interval(piece.in_shard, piece.in_shard + piece.numel).intersect(tensor.interval) is not None
            for piece in shard.pieces
        )
