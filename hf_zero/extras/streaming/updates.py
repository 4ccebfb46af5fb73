"""Updates during backward: a unit's weights are updated as soon as its gradients are reduced, which are then freed.

    backward      unit 3 | unit 2 | unit 1 |
    reduction              3        2        1
    update                          3        2        1      on the host; with a device one unit later
    step                                               agreement, and the rest (persistent or unused parameters)

The updated weights are in host memory; backward reads copies gathered on the device, and a unit whose gradients are
complete on all ranks is not gathered again before the step. If this rank has no gradient of some parameter of a unit,
only the step knows whether another rank has: such a unit is updated in the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.config import ConfigError, GradientPolicy, Problem
from hf_zero.device.registry import runtime_of
from hf_zero.extras.streaming import Streaming
from hf_zero.grads.bucket import BucketGradients
from hf_zero.grads.reducer import GradientReducer
from hf_zero.log import log_dist
from hf_zero.offload.placement import Placements
from hf_zero.offload.sub_group import READERS, SubGroup, wait_for_readers
from hf_zero.optim import Updater
from hf_zero.optim.elementwise import ElementwiseUpdater
from hf_zero.optim.updater import StepGradients


def streamed_updates(
    streaming: Streaming,
    rules: GradientPolicy,
    reducer: GradientReducer,
    updater: Updater,
    placements: Placements,
    *,
    skips: bool,
) -> StreamedUpdates | None:
    """The object that updates during backward; None if updates must follow it, with the same result.

    Args:
        skips: whether nonfinite gradients skip an update.

    Raises:
        ConfigError: if the optimizer is not elementwise.
    """
    if not isinstance(updater, ElementwiseUpdater):
        name, rule = type(updater.optimizer).__name__, "streaming updates one element at a time"
        fix = "use AdamW, AdamW8bit, Lion, Adagrad or SGD, or remove hf_zero.streaming"
        raise ConfigError(Problem("hf_zero.streaming.enabled", True, f"{rule}, but {name} does not", fix))
    reasons = streaming.why_gradients_stay(rules.clip_norm, skips)
    if reasons:
        log_dist(f"streaming: gradients stay in host memory until the update after backward: {'; '.join(reasons)}")
        return None
    return StreamedUpdates(reducer, updater, placements, 1 if runtime_of(placements.device).has_own_memory else 0)


class StreamedUpdates:
    """Updates buckets of one engine during backward.

    Attributes:
        done: indices of buckets updated since the last step.
    """

    def __init__(
        self, reducer: GradientReducer, updater: ElementwiseUpdater, placements: Placements, depth: int
    ) -> None:
        """`depth`: number of reduced gradients that may be in flight to host memory during backward."""
        self.done: set[int] = set()
        self._updater = updater
        self._placements = placements
        self._depth = depth
        self._waiting: deque[BucketGradients] = deque()
        self._of: list[list[SubGroup]] = [[] for _ in reducer.buckets]
        for sub_group in updater.sub_groups:
            self._of[sub_group.bucket].append(sub_group)
        self._gradient: Callable[[SubGroup], Tensor] | None = None
        self._factor: Callable[[], float] | None = None
        self._scale: float | None = None
        self._numbers: list[dict[str, Any]] = []
        reducer.apply_by(self._take)

    def read(self, gradient: Callable[[SubGroup], Tensor], factor: Callable[[], float]) -> None:
        """Set the functions that return gradients, and the factor on the gradients of the current step."""
        self._gradient, self._factor = gradient, factor

    def fix_scale(self) -> float:
        """The factor on all gradients of this step, which is the same for all its updates."""
        if self._scale is None:
            assert self._factor is not None, "read comes first"
            self._scale = self._factor()
        return self._scale

    def wanted(self, sub_groups: Sequence[SubGroup]) -> list[SubGroup]:
        """The sub-groups that the step still has to update.

        Raises:
            RuntimeError: if settings of a param group have changed since the updates during backward.
        """
        if self.done and self._numbers != self._present():
            raise RuntimeError(
                "a param group's settings (such as lr) have changed between backward() and step(): hf_zero.streaming "
                "has updated weights during that backward with the old ones. Change them after step() (as schedulers)"
            )
        self._waiting.clear()
        return [sub_group for sub_group in sub_groups if sub_group.bucket not in self.done]

    def forget(self) -> None:
        """Reset after a step."""
        self.done.clear()
        self._waiting.clear()
        self._scale = None

    def refuse_to_drop(self) -> None:
        """Raise RuntimeError because gradients that would be dropped have already been applied."""
        if self.done:
            raise RuntimeError(
                "zero_grad() after backward(): hf_zero.streaming has updated some weights during that backward, and "
                "the update would stay incomplete. Call step() first, or remove hf_zero.streaming"
            )

    def _take(self, bucket: BucketGradients) -> None:
        """Called when a bucket's gradients are reduced."""
        used = bucket.arrivals.used
        if bucket.trained.is_persistent or any(slot.parameter not in used for slot in bucket.bucket.slots):
            return
        self._waiting.append(bucket)
        while len(self._waiting) > self._depth:
            self._update(self._waiting.popleft())

    @torch.no_grad()
    def _update(self, bucket: BucketGradients) -> None:
        if not self.done:
            self._numbers = self._present()
            if READERS:
                wait_for_readers()
        assert self._gradient is not None, "read comes first"
        used = frozenset(slot.parameter for slot in bucket.bucket.slots)
        sub_groups = self._of[bucket.bucket.index]
        with self._placements.updating():
            for _ in self._updater.step(StepGradients(self._gradient, used, self.fix_scale(), sub_groups)):
                pass
        bucket.reduced.release_applied()
        self.done.add(bucket.bucket.index)

    def _present(self) -> list[dict[str, Any]]:
        groups = self._updater.optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]
