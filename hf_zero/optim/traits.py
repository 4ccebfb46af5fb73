"""The traits of an optimizer: how it runs on shards, and what it needs for that.

hf_zero's own classes declare their traits by `family`, an elementwise rule, or by a method `traits`. A declaration only
applies to the declaring class; a subclass may behave differently. Unused classes are not imported.

`WholeTensorUpdater` runs any torch optimizer on whole tensors even if ranks hold shards: each parameter is updated by
one rank, its keeper.

    every rank    shards of gradients and masters --gather--> the keeper of each parameter has both whole
    keeper                                                    its own step
    every rank    shards of masters              <--scatter-- whole masters

The keeper of a parameter has the optimizer's state for it, so states of any shape are distributed over ranks. This
takes three collectives per sub-group and step, where an elementwise update needs none.

`adopt_masters` makes an optimizer hold masters instead of the model's parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.config import OptimizerSees
from hf_zero.config.extras import loaded
from hf_zero.config.schema.optimizer_types import type_of_class
from hf_zero.device.registry import runtime_of
from hf_zero.optim.elementwise import ElementwiseUpdater, Family
from hf_zero.optim.stager import moved_to
from hf_zero.optim.updater import (
    OwnStepUpdater,
    Peers,
    Spread,
    StepGradients,
    SubGroup,
    Updater,
    UpdaterRanks,
    WholeStepUpdater,
)

_NAMES = "param_names"  # torch's own, which no step reads


def adopt_masters(
    optimizer: torch.optim.Optimizer,
    sub_groups: Sequence[SubGroup],
    groups: Sequence[dict[str, Any]],
    given: Sequence[Sequence[Tensor]] | None = None,
    trained: Sequence[Tensor] = (),
) -> None:
    """Make `optimizer` hold the tensors of `sub_groups`; its groups stay the same objects.

    Args:
        given: the groups' parameters as they came, if the tensors are whole: they keep their order, and frozen ones
            stay, so that lists beside them (names, scaling factors) still fit.
        trained: the parameters of the layout, in its order; with `given`.

    Raises:
        RuntimeError: if the optimizer has been used.
    """
    masters: list[list[nn.Parameter]] = [[] for _ in groups]
    for sub_group in sub_groups:
        masters[sub_group.group].extend(tensor.parameter for tensor in sub_group.tensors)
    if given is not None:
        tensors = (tensor for sub_group in sub_groups for tensor in sub_group.tensors)
        master_of: dict[int, Any] = {id(trained[t.whole]): t.parameter for t in tensors if t.whole is not None}
        masters = [[master_of.get(id(parameter), parameter) for parameter in group] for group in given]
    adopt(optimizer, masters, groups)


def lists_beside(optimizer: torch.optim.Optimizer) -> list[str]:
    """Keys of the optimizer's groups with one entry for each parameter, which flat shards do not match."""
    found: dict[str, None] = {}
    for group in optimizer.param_groups:
        for key, value in group.items():
            is_list = isinstance(value, (list, tuple)) and key not in optimizer.defaults
            if is_list and key not in ("params", _NAMES) and value and len(value) == len(group["params"]):
                found[key] = None
    return list(found)


def adopt(
    optimizer: torch.optim.Optimizer, masters: Sequence[Sequence[nn.Parameter]], groups: Sequence[dict[str, Any]]
) -> None:
    """Make `optimizer` hold `masters`, listed by group."""
    made_state_at_init = _refuse_used(optimizer)
    optimizer.state.clear()
    for group, mine in zip(groups, masters, strict=True):
        group["params"] = list(mine)
    optimizer.param_groups[:] = groups
    if made_state_at_init:
        # Adagrad and similar optimizers fill `state` in the constructor: run it again for the masters.
        optimizer.state.update(remade(optimizer, groups).state)


def _refuse_used(optimizer: torch.optim.Optimizer) -> bool:
    """Raise an error if the optimizer has stepped; otherwise return whether it holds state nevertheless."""
    states = [state for state in optimizer.state.values() if state]
    uncounted = [state for state in states if "step" not in state]
    if any(float(state.get("step", 0)) > 0 for state in states) or not _are_new(optimizer, uncounted):
        raise RuntimeError(
            f"{type(optimizer).__name__} has already stepped, and its state describes the model's own parameters. "
            "Give initialize() an optimizer that has not been used yet."
        )
    return bool(states)


def _are_new(optimizer: torch.optim.Optimizer, states: Sequence[dict[str, Any]]) -> bool:
    """Whether the constructor makes these states, as APOLLO's does."""
    if not states:
        return True
    try:
        fresh = remade(optimizer, optimizer.param_groups)
    except Exception:  # other arguments
        return False
    made = [set(state) for state in fresh.state.values()]
    return all(set(state) in made for state in states)


def remade(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """A new optimizer of the same class for `groups`."""
    taken = inspect.signature(type(optimizer)).parameters  # the groups have the other defaults
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return type(optimizer)([dict(group) for group in groups], **defaults)


def keepers(spread: Sequence[Spread], world: int) -> list[int]:
    """Assign each parameter to a rank: largest first, each to the rank with the fewest elements so far."""
    loads, keeper_of = [0] * world, [0] * len(spread)
    for index in sorted(range(len(spread)), key=lambda index: (-spread[index].numel, index)):
        keeper_of[index] = min(range(world), key=lambda rank: (loads[rank], rank))
        loads[keeper_of[index]] += spread[index].numel
    return keeper_of


class WholeTensorUpdater(OwnStepUpdater):
    """Runs the optimizer's own step on the parameters that this rank keeps."""

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], peers: Peers) -> None:
        super().__init__(optimizer, sub_groups)
        self._peers = peers
        self._spread = peers.spread()
        keeper, groups = keepers(self._spread, peers.world), optimizer.param_groups
        self._kept: dict[int, nn.Parameter] = {}
        masters: list[list[nn.Parameter]] = [[] for _ in groups]
        for sub_group in sub_groups:
            for parameter in self._members(sub_group):
                if keeper[parameter] == peers.rank:
                    self._kept[parameter] = kept = nn.Parameter(self._absent(parameter, sub_group.master))
                    masters[sub_group.group].append(kept)
        adopt(optimizer, masters, groups)

    @property
    def keeps_everything_whole(self) -> bool:
        return True

    def whole(self) -> dict[int, nn.Parameter]:
        return self._kept

    def _members(self, sub_group: SubGroup) -> Sequence[int]:
        """Parameters that have a part in the sub-group on any rank."""
        return self._peers.members(sub_group)

    def _hand_over(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        """Give kept parameters their whole masters and gradients."""
        masters = self._peers.gather_whole(sub_group, sub_group.master)
        reduced = gradients.of(sub_group).to(sub_group.master.dtype) * gradients.scale
        whole = self._peers.gather_whole(sub_group, reduced)
        for parameter in self._members(sub_group):
            kept = self._kept.get(parameter)
            if kept is not None and parameter in gradients.used:
                kept.data = masters[parameter].clone()  # a view would keep the whole gathered buffer alive
                kept.grad = whole[parameter].clone()

    def call_outside(self, method: Callable[[], Any]) -> Any:
        for sub_group in self.sub_groups:
            for parameter, whole in self._peers.gather_whole(sub_group, sub_group.master).items():
                if parameter in self._kept:
                    self._kept[parameter].data = whole.clone()
        result = method()
        for sub_group in self.sub_groups:
            self._return(sub_group, range(len(self._spread)))
        return result

    def _send_back(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        self._return(sub_group, gradients.used)

    def _return(self, sub_group: SubGroup, used: Container[int]) -> None:
        """Distribute the kept ones of these parameters to the masters of all ranks."""
        mine: dict[int, Tensor] = {}
        for parameter in self._members(sub_group):
            if parameter in self._kept and parameter in used:
                mine[parameter] = self._kept[parameter].detach()
        updated = self._peers.scatter_whole(sub_group, mine)
        for piece in sub_group.pieces:
            if piece.parameter in used:
                part = updated.narrow(0, piece.in_shard, piece.numel)
                sub_group.master.narrow(0, piece.in_shard, piece.numel).copy_(part)
        for parameter in mine:
            self._kept[parameter].data = self._absent(parameter, sub_group.master)

    def moved(self, sub_group: SubGroup) -> None:
        memory = runtime_of(sub_group.master.device).own
        for parameter in filter(self._kept.__contains__, self._members(sub_group)):
            kept = self._kept[parameter]
            kept.data = self._absent(parameter, sub_group.master)
            state = self.optimizer.state.get(kept, {})
            state.update(moved_to(memory, state))
            self._move_counts(state, sub_group)

    def _absent(self, parameter: int, master: Tensor) -> Tensor:
        """Placeholder of a kept parameter between steps: NaN in its shape, without memory, on the device of its
        update."""
        nan = torch.full((), float("nan"), dtype=master.dtype, device=master.device)
        return nan.expand(self._spread[parameter].shape)


Make = Callable[[Sequence[SubGroup], "Peers | None", "UpdaterRanks | None"], Updater]


class Sees(Enum):
    """The inputs of an optimizer at stages 1 to 3."""

    ELEMENTS = "flat shards, one element at a time"
    SHARDS_AND_PEERS = "flat shards, and asks other ranks for what they lack"
    BUCKETS = "whole buckets: it averages gradients itself"
    FLAT_SHARDS = "flat shards, as itself"
    WHOLE_TENSORS = "whole tensors, as itself"


@dataclass(frozen=True, slots=True)
class Traits:
    """
    Attributes:
        make: creates an updater that computes exactly the optimizer's own step; None: its own step runs.
        highest_stage: the last stage at which it works.
        serves_whole_buckets: whether `make` also works if a rank owns whole buckets.
        joins_parts: whether `make` also works if ranks hold parts of parameters.
        unmet: a requirement that a sharded step does not meet.
    """

    sees: Sees
    make: Make | None = None
    highest_stage: int = 3
    serves_whole_buckets: bool = True
    joins_parts: bool = False
    unmet: str | None = None

    @property
    def cuts(self) -> bool:
        """Whether a rank's part of a bucket may be updated in sub-groups without changing the result."""
        return self.sees in (Sees.ELEMENTS, Sees.FLAT_SHARDS)

    @property
    def keeps_shapes(self) -> bool:
        """Whether it holds one tensor per parameter in its own shape if a rank owns whole buckets."""
        return self.make is None or not self.serves_whole_buckets


def traits_of(optimizer: torch.optim.Optimizer, choice: OptimizerSees | None = None) -> Traits:
    """Return the traits of `optimizer`.

    Args:
        choice: the config's choice for optimizers without an own updater, and for Adafactor.
    """
    ours = _built_in(optimizer, choice)
    if ours is not None:
        return ours
    known = [registered for kind in type(optimizer).__mro__ if (registered := type_of_class(kind)) is not None]
    is_whole = choice == "whole_tensors" or choice is None and any(kind.whole_tensors for kind in known)
    unmet = next((kind.needs for kind in known if kind.needs), None)
    return Traits(Sees.WHOLE_TENSORS if is_whole else Sees.FLAT_SHARDS, unmet=unmet)


def family_of(optimizer: torch.optim.Optimizer) -> Family | None:
    """The elementwise rule of this optimizer. Exact classes only: a subclass may behave differently."""
    own = vars(type(optimizer)).get("family")
    family = own if isinstance(own, Family) else _stand_in(optimizer)
    return family if isinstance(family, Family) else None


def _stand_in(optimizer: torch.optim.Optimizer) -> Family | Traits | None:
    """The replacement for the step of a foreign class, unless the step has hooks."""
    kind = type_of_class(type(optimizer))
    if kind is None or not kind.stands_in:
        return None
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    stand_in: Family | Traits | None = loaded(kind.stands_in)(optimizer)
    return stand_in


def updater_for(
    optimizer: torch.optim.Optimizer,
    sub_groups: Sequence[SubGroup],
    peers: Peers | None = None,
    ranks: UpdaterRanks | None = None,
    choice: OptimizerSees | None = None,
) -> Updater:
    """Create an updater: an own implementation if it computes the same, else the optimizer's own step on its inputs.

    Args:
        peers: the ranks that share the parameters; None if every rank owns whole buckets.
        ranks: all ranks, for optimizers that exchange gradients themselves.
    """
    traits = traits_of(optimizer, choice)
    if traits.make is not None and (peers is not None or traits.serves_whole_buckets):
        return traits.make(sub_groups, peers, ranks)
    if peers is not None and traits.sees is Sees.WHOLE_TENSORS:
        return WholeTensorUpdater(optimizer, sub_groups, peers)
    return WholeStepUpdater(optimizer, sub_groups)


def _built_in(optimizer: torch.optim.Optimizer, choice: OptimizerSees | None) -> Traits | None:
    """Traits of optimizers with an own updater at every stage they support."""
    rule = family_of(optimizer)
    if rule is not None:
        return Traits(Sees.ELEMENTS, lambda sub_groups, peers, ranks: ElementwiseUpdater(optimizer, sub_groups, rule))
    described: Callable[[torch.optim.Optimizer], Traits] | None = vars(type(optimizer)).get("traits")
    if described is not None:
        return described(optimizer)
    stand_in = _stand_in(optimizer) if choice != "flat_shards" else None
    return stand_in if isinstance(stand_in, Traits) else None
