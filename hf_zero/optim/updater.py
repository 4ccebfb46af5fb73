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
from hf_zero.optim.stager import StateForm, StateStager, is_per_element


@dataclass(frozen=True, slots=True)
class StepGradients:
    """Inputs of one step.

    Attributes:
        of: returns the reduced gradient of a sub-group (1-D, summed over ranks) while the stager has it in memory. For
            an updater of local gradients: this rank's gradient of the whole bucket.
        used: indices of the parameters that got a gradient on any rank since the last step.
        scale: factor to apply to every gradient: the mean over ranks, clipping, loss scale.
        wanted: the sub-groups that have any gradient.
        skip: one element on the device; if nonzero, nothing may change. Only for updaters that obey it.
    """

    of: Callable[[SubGroup], Tensor]
    used: Set[int]
    scale: Tensor | float
    wanted: Sequence[SubGroup]
    skip: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """How one parameter is split over the ranks.

    Attributes:
        cuts: elements where one rank's part ends and another's starts, in order; empty if one rank has all.
    """

    shape: tuple[int, ...]
    cuts: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Peers:
    """An updater's exchanges with the ranks that share its parameters. All ranks make the same calls in the same order.

    Attributes:
        rank: this rank's number among them.
        world: their number.
        add_up: sums a small tensor over the ranks, in place.
        gather_whole: gathers a sub-group's values (1-D, with its master's length) from every rank into whole tensors in
            their own shapes, for every parameter that has a part in the sub-group.
        scatter_whole: the inverse: distributes whole tensors, each provided by one rank, to every rank's values of the
            sub-group (a new tensor); elements from no rank are zero.
        members: the parameters that have a part in a sub-group on any rank, in order of their place.
        spread: of every parameter, in the order of the layout.
        part_of: the part of a parameter that this rank holds if other ranks hold the rest (`gather_whole` then returns
            that part); None: all of it.
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
class UpdaterRanks:
    """The ranks, for an updater that communicates by itself.

    Attributes:
        buckets: the layout's buckets; `sub_group.bucket` indexes them.
        is_sharded: whether a rank only updates its shard of a bucket.
    """

    collectives: Collectives
    buckets: Sequence[Bucket]
    is_sharded: bool


@dataclass(frozen=True, slots=True)
class StateSlice:
    """Elements from `start` on of one flattened state of a whole parameter; `shape` is that of the whole state."""

    shape: tuple[int, ...]
    start: int
    values: Tensor


WholeStates = Mapping[int, Mapping[str, Any]]
"""Parameter (layout index) -> its states by name: tensors, slices of tensors, and single values."""


OF_WHOLE_TENSORS = "of_whole_tensors"
"""Key in a flat shard's optimizer state for the states of whole tensors, by parameter."""


class Updater(ABC):
    """Runs one optimizer over all sub-groups of this rank.

    Attributes:
        stager: fetches an update's inputs; by default everything is already in memory.
        obeys_skip: whether a step obeys `StepGradients.skip` on the device; if not, the host decides beforehand.
        stays: the reason why masters and states cannot be offloaded; None: they can.
        may_defer: whether the rest of a step may run after it: no rank takes part in another's, and everything that a
            program may change between steps has been read.
        may_take_local: whether some steps need local gradients, see `takes_local_gradients`.
    """

    obeys_skip = False
    may_defer = False
    may_take_local = False
    stays: str | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup]) -> None:
        self.optimizer = optimizer
        self.sub_groups = tuple(sub_groups)
        self.stager = StateStager(self.sub_groups)

    @property
    def takes_local_gradients(self) -> bool:
        """Whether the next step needs this rank's unreduced gradients of whole buckets. The same on all ranks."""
        return False

    def roll_back(self) -> None:  # noqa: B027
        """Undo the count of a step that the device skipped. Only called if `obeys_skip`."""

    def collect_state(self) -> None:  # noqa: B027
        """Before saving, copy states stored elsewhere into the optimizer's state. Collective. A no-op by default."""

    def state_replaced(self) -> None:  # noqa: B027
        """Called after loading the optimizer's state: drop values derived from the old state. A no-op by default."""

    def moved(self, sub_group: SubGroup) -> None:  # noqa: B027
        """Called after masters and states of a sub-group have moved to another memory. A no-op by default."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...] | None:
        """Names of per-element states of this group's parameters; None if only the optimizer knows."""
        return None

    def form_of(self, name: str) -> StateForm | None:
        """The storage format of a flat shard's state; None: one value per element."""
        return None

    def parameter_steps(self) -> dict[int, int]:
        """Update count of each parameter with a piece on this rank; empty if the optimizer's own counters suffice."""
        return {}

    def restore_steps(self, steps: Mapping[int, int]) -> None:  # noqa: B027
        """Restore the result of `parameter_steps` on any layout. Missing parameters keep the sub-group's count."""

    def set_steps(self, parameter: int, steps: int) -> None:
        """Set the update count of one parameter's pieces on this rank.

        Raises:
            NotImplementedError: if the optimizer has one count for several parameters.
        """
        raise NotImplementedError(
            f"{type(self.optimizer).__name__} counts updates of several parameters together here, so one parameter's "
            "'step' cannot be set. optimizer.state.clear() resets all states and counts."
        )

    def whole_state_names(self) -> tuple[str, ...] | None:
        """Names of states of whole tensors; () means none, None means that only the optimizer knows."""
        return ()

    def whole_states(self) -> WholeStates:
        """This rank's part of the states of whole tensors, for a checkpoint; other ranks may have the rest."""
        return {}

    def whole_parameters(self) -> Set[int]:
        """Parameters whose whole states `restore_whole_states` needs on this rank."""
        return frozenset()

    def restore_whole_states(self, states: WholeStates) -> None:
        """Restore the combined `whole_states` of all ranks; a missing parameter has had no update.

        The tensors belong to the caller, and are copied.

        Raises:
            ValueError: for states that this optimizer does not have.
        """
        assert not states, f"{type(self).__name__} has no states of whole tensors"

    @property
    def keeps_everything_whole(self) -> bool:
        """Whether all states, including per-element states, belong to whole tensors."""
        return False

    @property
    def may_bind_states(self) -> bool:
        """Whether the optimizer may have states that only fit the present flat shards."""
        return False

    def call_outside(self, method: Callable[[], Any]) -> Any:
        """Call a method of the optimizer that may change weights, outside a step. Collective."""
        return method()

    @abstractmethod
    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        """Update the sub-groups, yielding each as soon as its new weights are in place."""


class OwnStepUpdater(Updater):
    """Calls the optimizer's own `step` on each batch of sub-groups."""

    def moved(self, sub_group: SubGroup) -> None:
        for tensor in sub_group.tensors:
            self._move_counts(self.optimizer.state.get(tensor.parameter, {}), sub_group)

    def _move_counts(self, state: dict[str, Any], sub_group: SubGroup) -> None:
        """Move single values to the device of the sub-group's master, where some of torch's steps expect them."""
        group = self.optimizer.param_groups[sub_group.group]
        if group.get("fused") or group.get("capturable"):
            single = {name: value for name, value in state.items() if isinstance(value, Tensor) and not value.dim()}
            state.update((name, value.to(sub_group.master.device)) for name, value in single.items())

    @abstractmethod
    def whole(self) -> Mapping[int, nn.Parameter]:
        """The optimizer's tensors that are parameters in their own shape, by index in the layout."""

    def whole_state_names(self) -> tuple[str, ...] | None:
        return None if self.keeps_everything_whole else ()

    def whole_parameters(self) -> Set[int]:
        return self.whole().keys()

    def whole_states(self) -> WholeStates:
        known = ((index, self.optimizer.state.get(parameter, {})) for index, parameter in self.whole().items())
        return {index: dict(state) for index, state in known if state}

    def set_steps(self, parameter: int, steps: int) -> None:
        if not self.keeps_everything_whole:
            super().set_steps(parameter, steps)
        whole = self.whole().get(parameter)
        state = {} if whole is None else self.optimizer.state.get(whole, {})
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(steps)
        elif "step" in state:
            state["step"] = steps

    def restore_whole_states(self, states: WholeStates) -> None:
        self.optimizer.state.clear()
        for index, parameter in self.whole().items():
            if index in states:
                self.optimizer.state[parameter] = copied(states[index], parameter.device)

    @torch.no_grad()
    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        options = Options(self.optimizer)
        for batch in self.stager.batches(gradients.wanted):
            options.begin()
            for sub_group in batch:
                self._hand_over(sub_group, gradients)
            self._own_step()
            self.optimizer.zero_grad(set_to_none=True)
            options.end()
            for sub_group in batch:
                self._send_back(sub_group, gradients)
                self.stager.copy_to_lp(sub_group)
                yield sub_group

    def _own_step(self) -> None:
        """The optimizer's step. Frozen parameters in its groups stay as they are, whatever gradient they have got."""
        masters = {id(tensor.parameter) for sub_group in self.sub_groups for tensor in sub_group.tensors}
        masters |= set(map(id, self.whole().values()))
        tensors = (tensor for group in self.optimizer.param_groups for tensor in group["params"])
        hidden = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None and id(tensor) not in masters]
        for tensor, _ in hidden:
            tensor.grad = None
        try:
            self.optimizer.step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self.keeps_everything_whole:
                raise
            name = type(self.optimizer).__name__
            raise RuntimeError(
                f"{name}.step() failed on flat shards, which are vectors with parts of several parameters: {error}. If "
                'it needs tensors in their own shape, set "hf_zero": {"optimizer_sees": "whole_tensors"}'
            ) from error
        finally:
            for tensor, gradient in hidden:
                tensor.grad = gradient

    @abstractmethod
    def _hand_over(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        """Set the gradients of the optimizer's tensors."""

    def _send_back(self, sub_group: SubGroup, gradients: StepGradients) -> None:  # noqa: B027
        """Move updated values to the master. A no-op by default."""


class WholeStepUpdater(OwnStepUpdater):
    """Runs any torch optimizer's own `step`, with gradients in the master dtype.

    A parameter without a gradient on any rank is skipped, as in plain PyTorch. Inside a flat shard its gradient counts
    as zero, and its weights and states are restored after the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup]) -> None:
        super().__init__(optimizer, sub_groups)
        self._kept: dict[SubGroup, list[_Kept]] = {}  # of unused parameters, during a step

    @property
    def keeps_everything_whole(self) -> bool:
        return bool(self.whole())

    @property
    def may_bind_states(self) -> bool:
        return not self.keeps_everything_whole

    def whole(self) -> dict[int, nn.Parameter]:
        tensors = (tensor for sub_group in self.sub_groups for tensor in sub_group.tensors)
        return {tensor.whole: tensor.parameter for tensor in tensors if tensor.whole is not None}

    def parameter_steps(self) -> dict[int, int]:
        """Counts per parameter, because not all parameters of a bucket are used in every step."""
        states = {index: self.optimizer.state.get(parameter, {}) for index, parameter in self.whole().items()}
        return {index: int(state.get("step", 0)) for index, state in states.items()}

    def whole_states(self) -> WholeStates:
        """All states, if any of them is not per element and therefore cannot be split by elements."""
        whole, states = self.whole(), super().whole_states()
        has_other_shapes = any(
            isinstance(value, Tensor) and value.dim() and value.numel() != whole[index].numel()
            for index, state in states.items()
            for value in state.values()
        )
        return states if has_other_shapes else {}

    def _hand_over(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        reduced = gradients.of(sub_group)
        for tensor in sub_group.tensors:
            if self._is_used(sub_group, tensor, gradients.used):
                part = reduced.narrow(0, tensor.interval.start, tensor.interval.numel).to(sub_group.master.dtype)
                part = part * gradients.scale if gradients.scale != 1.0 else part
                tensor.parameter.grad = part.view(tensor.parameter.shape)
        self._kept[sub_group] = [
            _Kept(tensor.parameter, place, self.optimizer.state.get(tensor.parameter, {}))
            for tensor in sub_group.tensors
            if tensor.parameter.grad is not None
            for place in _unused(sub_group, tensor, gradients.used)
        ]

    def _send_back(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        for kept in self._kept.pop(sub_group):
            kept.restore(self.optimizer.state.get(kept.parameter, {}))

    @staticmethod
    def _is_used(sub_group: SubGroup, tensor: MasterTensor, used: Set[int]) -> bool:
        # A shard that only has padding follows the other ranks, so that the optimizer does the same on all of them.
        return not sub_group.pieces or any(
            piece.parameter in used
            and Interval(piece.in_shard, piece.in_shard + piece.numel).intersect(tensor.interval) is not None
            for piece in sub_group.pieces
        )


def _unused(sub_group: SubGroup, tensor: MasterTensor, used: Set[int]) -> Iterator[Interval]:
    """The places in `tensor` of parameters that are not used."""
    for piece in sub_group.pieces:
        place = Interval(piece.in_shard, piece.in_shard + piece.numel).intersect(tensor.interval)
        if place is not None and piece.parameter not in used:
            yield Interval(place.start - tensor.interval.start, place.stop - tensor.interval.start)


class _Kept:
    """Copies of some elements of one of the optimizer's tensors and of its states."""

    def __init__(self, parameter: nn.Parameter, place: Interval, state: Mapping[str, Any]) -> None:
        self.parameter = parameter
        self._place = place
        self._values = self._inside(parameter.data).clone()
        self._states = {
            name: self._inside(value).clone() for name, value in state.items() if is_per_element(name, value, parameter)
        }

    def _inside(self, values: Tensor) -> Tensor:
        return values.view(-1).narrow(0, self._place.start, self._place.numel)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._inside(self.parameter.data).copy_(self._values)
        for name, values in self._states.items():
            if name in state:
                self._inside(state[name]).copy_(values)


def copied(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of a parameter's state, on `device` except for single values, which stay on the host."""
    return {
        kind: value.to(device if value.dim() else "cpu", copy=True) if isinstance(value, Tensor) else value
        for kind, value in state.items()
    }


class Options:
    """Lets an optimizer that is called once per batch of sub-groups advance its groups' counters once per step.

    Every batch starts with the values at the start of the step. All batches must end with the same values; otherwise
    the optimizer computes them from all parameters together.
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
                'on one sub-group after the other. Set zero_optimization.offload_optimizer.device to "cpu", and leave '
                "hf_zero.offload_update out."
            )
        self._after = after


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Values of a group that an optimizer may change."""
    return {key: value for key, value in group.items() if isinstance(value, (int, float, bool, str, tuple))}
