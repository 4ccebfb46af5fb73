"""The interface between the engine and an optimizer: reduced gradients in, updated weights out, by sub-group."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.comm.parts import HeldPart
from hf_zero.layout import Bucket, Interval
from hf_zero.offload.sub_group import MasterTensor, SubGroup
from hf_zero.optim.stager import StateForm, StateStager


@dataclass(frozen=True, slots=True)
class StepGradients:
    """Inputs of one step.

    Attributes:
        of: the reduced gradient of a sub-group (1-D, summed over ranks), while the stager has that in place. For an
            updater that takes local gradients: of the whole bucket, from this rank alone.
        used: indices of the parameters that got a gradient on any rank since the last step.
        scale: factor to apply to every gradient: the mean over ranks, clipping, loss scale.
        wanted: the shards that have any gradient.
        skip: one element on the device; where it is not zero nothing may change. Only for updaters that obey it.
    """

    of: Callable[[SubGroup], Tensor]
    used: Set[int]
    scale: Tensor | float
    wanted: Sequence[SubGroup]
    skip: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """How one parameter is spread over the ranks.

    Attributes:
        cuts: elements at which one rank's part ends and another's begins, in order; empty where one rank has it all.
    """

    shape: tuple[int, ...]
    cuts: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Peers:
    """Exchanges of an updater with the ranks that share its parameters; the same calls on all, in the same order.

    Attributes:
        rank: this one among them.
        world: how many they are.
        add_up: adds a small tensor up over the ranks, in place.
        gather_whole: from a sub-group's values (1-D, as long as its master) on every rank to whole tensors in their own
            shapes, for every parameter that has a part in the sub-group.
        scatter_whole: the way back: from whole tensors, each given by one rank, to every rank's values of the sub-group
            (a new tensor); elements from no rank are zero.
        members: the parameters that have a part in a sub-group on any rank, in the order in which they lie.
        spread: of every parameter, in the order of the layout.
        part_of: what this rank holds of a parameter of which other ranks hold the rest; None: all of it. What
            `gather_whole` gives is that part.
    """

    rank: int
    world: int
    add_up: Callable[[Tensor], object]
    gather_whole: Callable[[SubGroup, Tensor], Mapping[int, Tensor]]
    scatter_whole: Callable[[SubGroup, Mapping[int, Tensor]], Tensor]
    members: Callable[[SubGroup], Sequence[int]]
    spread: Callable[[], Sequence[Spread]]
    part_of: Callable[[int], HeldPart | None] = lambda parameter: None


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks, for an updater that communicates by itself.

    Attributes:
        buckets: of the layout; `sub_group.bucket` indexes them.
        is_sharded: whether a rank updates its shard of a bucket only.
    """

    collectives: Collectives
    buckets: Sequence[Bucket]
    is_sharded: bool


@dataclass(frozen=True, slots=True)
class StateSlice:
    """Elements from `start` on of one state of a whole parameter, flattened; `shape` is the whole state's."""

    shape: tuple[int, ...]
    start: int
    values: Tensor


WholeStates = Mapping[int, Mapping[str, Any]]
"""By parameter (index of the layout) its state by name: tensors, slices of tensors, and single values."""


OF_WHOLE_TENSORS = "of_whole_tensors"
"""Key in the optimizer's state of a flat shard: by parameter, the states that belong to whole tensors."""


class Updater(ABC):
    """Runs one optimizer over all sub-groups of this rank.

    Attributes:
        stager: brings what an update works on to where it runs; everything is there already unless it is replaced.
        obeys_skip: whether a step heeds `StepGradients.skip` without reading it; if not, the host decides beforehand.
        stays: why masters and states cannot be offloaded; None: they can.
        may_take_local: whether there are steps that want this rank's own gradients: see `takes_local_gradients`.
    """

    obeys_skip = False
    may_take_local = False
    stays: str | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup]) -> None:
        self.optimizer = optimizer
        self.sub_groups = tuple(sub_groups)
        self.stager = StateStager(self.sub_groups)

    @property
    def takes_local_gradients(self) -> bool:
        """Whether the next step wants this rank's own gradients of whole buckets, unreduced. The same on all ranks."""
        return False

    def roll_back(self) -> None:  # noqa: B027
        """Undo the count of a step that the device skipped. Only called where `obeys_skip`."""

    def collect_state(self) -> None:  # noqa: B027
        """Before saving: copy what is kept elsewhere into the optimizer's state. Collective. A no-op by default."""

    def state_replaced(self) -> None:  # noqa: B027
        """Called after the optimizer's state was loaded: drop what was derived from the old one. A no-op by default."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        """Per-element states of a parameter of this group; None where only the optimizer itself knows."""
        return None

    def form_of(self, name: str) -> StateForm | None:
        """How the state of a flat shard is stored that `state_names` names; None: one value per element."""
        return None

    def parameter_steps(self) -> dict[int, int]:
        """Updates that each parameter with a piece here has seen; empty where the optimizer's own counters say it."""
        return {}

    def restore_steps(self, steps: Mapping[int, int]) -> None:  # noqa: B027
        """Take back what `parameter_steps` gave, on any layout. Parameters that are not named keep the sub-group's."""

    def whole_state_names(self) -> tuple[str, ...] | None:
        """States that belong to whole tensors: () has none, None means that only the optimizer itself knows."""
        return ()

    def whole_states(self) -> WholeStates:
        """This rank's part of them, for a checkpoint; other ranks may have the rest."""
        return {}

    def whole_parameters(self) -> Set[int]:
        """Parameters whose whole states `restore_whole_states` wants on this rank."""
        return frozenset()

    def restore_whole_states(self, states: WholeStates) -> None:
        """Take back what `whole_states` of all ranks gave, put together; a parameter not named has seen no update.

        The tensors belong to the caller, and are copied.

        Raises:
            ValueError: for states that this optimizer does not have.
        """
        assert not states, f"{type(self).__name__} has no states of whole tensors"

    @property
    def keeps_everything_whole(self) -> bool:
        """Whether all states belong to whole tensors here, those of one value per element too."""
        return False

    @property
    def may_bind_states(self) -> bool:
        """Whether the optimizer may have states for flat shards that fit these very shards only."""
        return False

    @abstractmethod
    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        """Update the sub-groups; yields each as soon as its new weights are in place."""


class OwnStepUpdater(Updater):
    """Calls the optimizer's own `step` on each batch of sub-groups."""

    @torch.no_grad()
    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        options = Options(self.optimizer)
        for batch in self.stager.batches(gradients.wanted):
            options.begin()
            for sub_group in batch:
                self._hand_over(sub_group, gradients)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            options.end()
            for sub_group in batch:
                self._send_back(sub_group, gradients)
                self.stager.copy_to_lp(sub_group)
                yield sub_group

    @abstractmethod
    def _hand_over(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        """Give the optimizer's tensors their gradients."""

    def _send_back(self, sub_group: SubGroup, gradients: StepGradients) -> None:  # noqa: B027
        """Move updated values to the master. A no-op by default."""


class WholeStepUpdater(OwnStepUpdater):
    """Any torch optimizer, as itself: gradients are handed over in the master dtype and its own `step` is called.

    A parameter that got no gradient anywhere is skipped, as in plain PyTorch, when the optimizer holds it as a tensor
    of its own; inside a flat shard it counts as zero unless the whole shard is unused.
    """

    @property
    def keeps_everything_whole(self) -> bool:
        return bool(self._whole())

    @property
    def may_bind_states(self) -> bool:
        return not self.keeps_everything_whole

    def _whole(self) -> dict[int, nn.Parameter]:
        """The tensors that are parameters in their own shape."""
        tensors = (tensor for sub_group in self.sub_groups for tensor in sub_group.tensors)
        return {tensor.whole: tensor.parameter for tensor in tensors if tensor.whole is not None}

    def parameter_steps(self) -> dict[int, int]:
        """Not all parameters of a bucket are used every time: each has a counter of its own."""
        states = {index: self.optimizer.state.get(parameter, {}) for index, parameter in self._whole().items()}
        return {index: int(state.get("step", 0)) for index, state in states.items()}

    def whole_state_names(self) -> tuple[str, ...] | None:
        return None if self.keeps_everything_whole else ()

    def whole_parameters(self) -> Set[int]:
        return self._whole().keys()

    def whole_states(self) -> WholeStates:
        """All states, if any does not hold one value per element: such states cannot be cut by elements."""
        whole = self._whole()
        states = {index: dict(self.optimizer.state[p]) for index, p in whole.items() if self.optimizer.state.get(p)}
        has_other_shapes = any(
            isinstance(value, Tensor) and value.dim() and value.numel() != whole[index].numel()
            for index, state in states.items()
            for value in state.values()
        )
        return states if has_other_shapes else {}

    def restore_whole_states(self, states: WholeStates) -> None:
        self.optimizer.state.clear()
        for index, parameter in self._whole().items():
            if index in states:
                self.optimizer.state[parameter] = copied(states[index], parameter.device)

    def _hand_over(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        reduced = gradients.of(sub_group)
        for tensor in sub_group.tensors:
            if self._is_used(sub_group, tensor, gradients.used):
                part = reduced.narrow(0, tensor.interval.start, tensor.interval.numel).to(sub_group.master.dtype)
                part = part * gradients.scale if gradients.scale != 1.0 else part
                tensor.parameter.grad = part.view(tensor.parameter.shape)

    @staticmethod
    def _is_used(sub_group: SubGroup, tensor: MasterTensor, used: Set[int]) -> bool:
        return any(
            piece.parameter in used
            and Interval(piece.in_shard, piece.in_shard + piece.numel).intersect(tensor.interval) is not None
            for piece in sub_group.pieces
        )


def copied(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A parameter's state with tensors of its own: on `device`, but for single values, which stay with the host."""
    return {
        kind: value.to(device if value.dim() else "cpu", copy=True) if isinstance(value, Tensor) else value
        for kind, value in state.items()
    }


class Options:
    """Lets an optimizer that is called once per batch of shards count its group's numbers on once per step.

    Every batch begins with the values that the step began with. They must then end alike, or the optimizer looks at all
    parameters together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._name = type(optimizer).__name__
        self._before = [_numbers(group) for group in self._groups]
        self._after: list[dict[str, Any]] | None = None

    def begin(self) -> None:
        if self._after is not None:
            for group, numbers in zip(self._groups, self._before, strict=True):
                group.update(numbers)

    def end(self) -> None:
        after = [_numbers(group) for group in self._groups]
        if self._after not in (None, after):
            raise RuntimeError(
                f"{self._name} computes numbers of its param groups from all parameters together, so it cannot be run "
                'on one sub-group after the other. Set zero_optimization.offload_optimizer.device to "cpu".'
            )
        self._after = after


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """A value that an optimizer may count in a group."""
    return {key: value for key, value in group.items() if isinstance(value, (int, float, bool, str, tuple))}
