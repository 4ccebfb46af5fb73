"""Any torch optimizer on whole tensors, also where ranks hold shards: each parameter is updated by one rank.

    every rank    shards of gradients and masters --gather--> the keeper of each parameter has both whole
    keeper                                                    its own step
    every rank    shards of masters              <--scatter-- whole masters

The keeper of a parameter has the optimizer's state for it, so states are shared out over the ranks, whatever shape they
have. It costs three collectives per sub-group and step, where an elementwise update needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor, nn

from hf_zero.optim.adopt import adopt
from hf_zero.optim.updater import Options, Peers, Spread, StepGradients, SubGroup, Updater, WholeStates, copied


def keepers(spread: Sequence[Spread], world: int) -> list[int]:
    """The rank that updates each parameter: large ones first, each to the rank that has least so far."""
    loads, found = [0] * world, [0] * len(spread)
    for index in sorted(range(len(spread)), key=lambda index: (-spread[index].numel, index)):
        found[index] = min(range(world), key=lambda rank: (loads[rank], rank))
        loads[found[index]] += spread[index].numel
    return found


class WholeTensorUpdater(Updater):
    """Runs the optimizer's own step on those parameters that this rank keeps."""

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], peers: Peers) -> None:
        super().__init__(optimizer, sub_groups)
        self._peers = peers
        self._device = sub_groups[0].master.device
        self._spread = peers.spread()
        keeper, groups = keepers(self._spread, peers.world), optimizer.param_groups
        self._kept: dict[int, nn.Parameter] = {}
        masters: list[list[nn.Parameter]] = [[] for _ in groups]
        for sub_group in sub_groups:
            for parameter in self._members(sub_group):
                if keeper[parameter] == peers.rank:
                    self._kept[parameter] = kept = nn.Parameter(self._absent(parameter, sub_group.master.dtype))
                    masters[sub_group.group].append(kept)
        adopt(optimizer, masters, groups)

    @property
    def keeps_everything_whole(self) -> bool:
        return True

    def whole_state_names(self) -> tuple[str, ...] | None:
        return None

    def whole_states(self) -> WholeStates:
        known = ((index, self.optimizer.state.get(kept, {})) for index, kept in self._kept.items())
        return {index: dict(state) for index, state in known if state}

    def whole_parameters(self) -> Set[int]:
        return self._kept.keys()

    def restore_whole_states(self, states: WholeStates) -> None:
        self.optimizer.state.clear()
        for index, saved in states.items():
            if index in self._kept:
                self.optimizer.state[self._kept[index]] = copied(saved, self._device)

    @torch.no_grad()
    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        options = Options(self.optimizer)
        for batch in self.stager.batches(gradients.wanted):
            options.begin()
            for sub_group in batch:
                self._fetch(sub_group, gradients)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            options.end()
            for sub_group in batch:
                self._send_back(sub_group, gradients.used)
                self.stager.copy_to_lp(sub_group)
                yield sub_group

    def _members(self, sub_group: SubGroup) -> Sequence[int]:
        """Parameters that have a part in the sub-group, on any rank."""
        return self._peers.members(sub_group)

    def _fetch(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        """Let kept parameters hold their masters and gradients, whole."""
        masters = self._peers.gather_whole(sub_group, sub_group.master)
        reduced = gradients.of(sub_group).to(sub_group.master.dtype) * gradients.scale
        found = self._peers.gather_whole(sub_group, reduced)
        for parameter in self._members(sub_group):
            kept = self._kept.get(parameter)
            if kept is not None and parameter in gradients.used:
                kept.data = masters[parameter].clone()  # a view would keep what all ranks sent
                kept.grad = found[parameter].clone()

    def _send_back(self, sub_group: SubGroup, used: Set[int]) -> None:
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
            self._kept[parameter].data = self._absent(parameter, sub_group.master.dtype)

    def _absent(self, parameter: int, dtype: torch.dtype) -> Tensor:
        """What a kept parameter shows between steps: NaN in its shape, without memory."""
        nan = torch.full((), float("nan"), dtype=dtype, device=self._device)
        return nan.expand(self._spread[parameter].shape)
