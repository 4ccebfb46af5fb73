"""Rank 0 of two, without processes: a model split into units, and a negotiation that returns rows at once.

All events are recorded in order in one list of words: requests ("ask a"), waits ("take a"), module calls ("run a"), and
ends of passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Gathering, Negotiation
from hf_zero.comm.collectives import Collectives, LoneCollectives
from hf_zero.comm.negotiation.gathering import OpenRequest
from hf_zero.comm.negotiation.requests import Decision, Kind
from hf_zero.comm.rows import FlatRows, Pending
from hf_zero.config import Zero
from hf_zero.layout import ParameterSpec
from hf_zero.offload.placement import Placements, in_memory_placement
from hf_zero.params.coordinator import ParameterCoordinator
from hf_zero.params.edits import ShardedEdits
from hf_zero.params.gather_plan import GatherPlan, Use
from hf_zero.params.gathered_modules import find_gathered_modules
from hf_zero.params.hooked_modules import ExecutionOrder, HookedModule, hook_modules
from hf_zero.params.prefetcher import Prefetcher
from hf_zero.params.sharded import UnitBuilder
from hf_zero.params.sharded_parameter import ReadHooks, ShardedParameter, local_chunk
from hf_zero.params.stand_ins import StandIns
from hf_zero.params.store import Trained
from hf_zero.params.unit import Unit, UnitPart
from hf_zero.precision import Precision
from tests.support.groups import groups_of

WORLD = 2
CPU = torch.device("cpu")


class RankZero(LoneCollectives):
    """The first rank of two; all ranks have its values.

    Attributes:
        problem: the problem that the other rank reports when ranks exchange their problems.
    """

    def __init__(self) -> None:
        Collectives.__init__(self, rank=0, size=WORLD)
        self.problem: str | None = None

    def gather_objects(self, value: object) -> list[object]:
        return [value, self.problem]


class RecordedEdits(ShardedEdits):
    """Records when the coordinator lets it check what inference keeps."""

    told: list[str]

    def remember_kept(self) -> None:
        self.told.append("kept")
        super().remember_kept()

    def give_up_kept(self) -> None:
        self.told.append("given up")
        super().give_up_kept()


class PromptNegotiation(Negotiation):
    """Grants every request immediately, with the other rank's rows from `rows_of`.

    Attributes:
        events: requests and waits.
        orders: what the request of every gather says about the order.
        some_rank_failed: what is reported at the end of a pass.
    """

    def __init__(self, events: list[str], rows_of: Callable[[int], Sequence[Tensor]]) -> None:
        super().__init__(rank=0, ranks=range(WORLD))
        self.events = events
        self.orders: list[int] = []
        self.some_rank_failed = False
        self._rows_of = rows_of

    def decide(self, asked: OpenRequest) -> Decision:
        assert asked.decision is not None, "granted when asked"
        if isinstance(asked, Gathering):
            self.events.append(f"take {asked.unit.name}")
        return asked.decision

    def _ask(self, asked: OpenRequest) -> None:
        request = asked.request
        everybody = frozenset(range(WORLD))
        asked.decision = Decision(None, everybody, request.kind is Kind.END and self.some_rank_failed)
        if not isinstance(asked, Gathering):
            phase = "backward" if request.in_backward else "forward"
            self.events.append("step" if request.kind is Kind.STEP else f"end {phase}")
            return
        self.events.append(f"ask {asked.unit.name}")
        self.orders.append(request.order)
        asked.rows = [
            _joined(mine, other, asked.buffers.take(mine.numel() * WORLD, mine))
            for mine, other in zip(asked.own, self._rows_of(request.unit), strict=True)
        ]


def _joined(mine: Tensor, other: Tensor, buffer: Tensor) -> FlatRows:
    flat = buffer[: mine.numel() * WORLD].copy_(torch.cat([mine, other]))
    return FlatRows(buffer, flat, WORLD, Pending())


@dataclass
class Units:
    """A model of which this rank holds half, observed by a coordinator.

    Attributes:
        whole: an unpartitioned copy.
        order: of the hooked modules.
        cursors: reported positions of backward.
        told: reports to the edits.
        channel: the channel of gathers.
        events: all recorded events.
    """

    model: Any
    whole: Any
    units: tuple[Unit, ...]
    hooked_modules: list[HookedModule]
    order: ExecutionOrder
    coordinator: ParameterCoordinator
    channel: RankZero
    negotiation: PromptNegotiation
    cursors: list[int | None]
    told: list[str]
    events: list[str] = field(default_factory=list)

    def drain(self) -> list[str]:
        """Events since the last call."""
        found = list(self.events)
        self.events.clear()
        return found

    @property
    def gathered(self) -> list[str]:
        """Names of the currently gathered units."""
        return [unit.name for unit in self.units if unit.is_gathered]

    def unit(self, name: str) -> Unit:
        return next(unit for unit in self.units if unit.name == name)


def cut(
    model: nn.Module,
    plan: GatherPlan | Callable[[Sequence[Use]], GatherPlan],
    *,
    persistent: Collection[str] = (),
    reads: bool = False,
) -> Units:
    """Partitions `model` and observes it.

    Args:
        persistent: names of parameters that are not partitioned.
        reads: whether to detect reads of parameters, too.
    """
    whole = copy.deepcopy(model)
    units = _built(model, persistent)
    rows = {unit.index: [_other_row(part, dict(whole.named_parameters())) for part in unit.parts] for unit in units}
    events: list[str] = []
    channel = RankZero()
    channel.negotiation = negotiation = PromptNegotiation(events, rows.__getitem__)
    unit_of = {id(m.parameter): unit for unit in units if not unit.is_persistent for m in unit.members}
    hooked_modules = hook_modules(find_gathered_modules(model), unit_of)
    order = ExecutionOrder(hooked_modules, (lambda _uses: plan) if isinstance(plan, GatherPlan) else plan)
    edits = RecordedEdits(units, {}, StandIns(()), channel, CPU)
    edits.told = []
    cursors: list[int | None] = []
    prefetcher = Prefetcher(units, order, Placements(CPU, in_memory_placement(CPU)), channel)
    coordinator = ParameterCoordinator(order, prefetcher, edits, cursors.append)
    for unit in units:
        if unit.is_persistent:
            _gather(unit, negotiation)
    coordinator.watch()
    if reads:
        _notice_reads(model, coordinator, unit_of)
    for name, module in model.named_modules():
        if isinstance(module, Telling):
            module.name, module.events = name, events
    events.clear()
    negotiation.orders.clear()
    return Units(
        model, whole, units, hooked_modules, order, coordinator, channel, negotiation, cursors, edits.told, events
    )


class Telling(nn.Module):
    """A matrix that records when it runs."""

    name = ""
    events: list[str]

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.events = []
        self.weight = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, values: Tensor) -> Tensor:
        self.events.append(f"run {self.name}")
        return torch.tanh(values @ self.weight)


def _built(model: nn.Module, persistent: Collection[str]) -> tuple[Unit, ...]:
    parameters = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    specs = [ParameterSpec(name, parameter.numel(), 0, "float32") for name, parameter in trained.items()]
    collectives = RankZero()
    builder = UnitBuilder(
        model,
        Trained(list(trained.values()), specs),
        Precision(None, None, None),
        groups_of(collectives),
        Placements(CPU, in_memory_placement(CPU)),
        Zero(),
    )
    stays = {id(parameters[name]) for name in persistent}
    return builder.build(find_gathered_modules(model), stays)


def _other_row(part: UnitPart, values: Mapping[str, Tensor]) -> Tensor:
    """The other rank's shard."""
    row = torch.zeros(part.layout.row_numel, dtype=part.dtype)
    for slot, member in zip(part.layout.slots, part.members, strict=True):
        row[slot.offset : slot.offset + slot.chunk] = local_chunk(values[member.name], 1, WORLD)
    return row


def _gather(unit: Unit, negotiation: Negotiation) -> None:
    unit.start(negotiation.gather(unit.index, order=0, in_backward=False))
    unit.finish()


def _notice_reads(model: nn.Module, coordinator: ParameterCoordinator, unit_of: Mapping[int, Unit]) -> None:
    def on_read(handle: ShardedParameter) -> None:
        if coordinator.is_running:
            coordinator.read(unit_of[id(handle.parameter)])

    reads = ReadHooks(on_read)
    for module in model.modules():
        if any(id(parameter) in unit_of for parameter in module.parameters(recurse=False)):
            reads.watch(module)
