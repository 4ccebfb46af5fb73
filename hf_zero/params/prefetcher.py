"""Gathers the units of one engine ahead of their use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from hf_zero.comm import Collectives, EngineRows, ledger
from hf_zero.offload.placement import Placements
from hf_zero.offload.vector import stop_if_any
from hf_zero.params.gather_plan import MOST_BESIDE_UPDATE
from hf_zero.params.hooked_modules import ExecutionOrder
from hf_zero.params.unit import LiveElements, Unit, UnitState
from hf_zero.spans import SPANS


class Prefetcher:
    """Gathers units ahead of their use. Each rank requests the units it needs, and `hf_zero.comm.negotiation` matches
    the requests of all ranks.

    Attributes:
        in_backward: whether units are needed from the last to the first.
        trains: whether the current pass records gradients, or is the backward of such a pass.
        rows: this rank's rows, which gathers send.
    """

    def __init__(
        self, units: Sequence[Unit], order: ExecutionOrder, placements: Placements, channel: Collectives
    ) -> None:
        """`placements`: report drive failures; `channel`: the channel that gathers use."""
        self.in_backward = False
        self.trains = True
        self._units = tuple(units)
        self._order = order
        self._placements = placements
        self._channel = channel
        self.rows = EngineRows([unit.rows for unit in self._units], channel, placements.device)
        self._number = channel.negotiation.table.register(self.rows)
        self._ahead: list[Unit] = []  # prefetched, in the order of their requests
        self._live = LiveElements(sum(unit.numel for unit in units if unit.is_gathered))
        for unit in units:
            unit.live = self._live
            for part in unit.parts:
                for numel, dtype in () if part.is_direct else part.form.buffers(part.layout, part.dtype):
                    self.rows.buffers.expect(numel, dtype)

    def gather(self, unit: Unit) -> None:
        """Gather the unit and wait for it."""
        if unit.is_gathered:
            return
        with SPANS.span("gather", unit.name, _phase(self.in_backward)):
            if unit.state is UnitState.RELEASED:
                self._ask_for(unit)
            unit.finish()
            self._put_back(unit)
        if unit in self._ahead:
            self._ahead.remove(unit)

    def prefetch(self, positions: Iterable[int]) -> None:
        """Request the next units, and fetch the shard of the unit after them from its storage, so that its gather can
        start at once.

        With a plan all ranks know what comes next, and as many units are requested as the gather plan allows. Without
        one, the first missing unit at `positions` is requested.
        """
        if not self._order.gather_plan.prefetches:
            return
        upcoming = self._channel.negotiation.upcoming(in_backward=self.in_backward, trains=self.trains)
        if upcoming is None and not self._ahead:
            expected = (unit for position in positions for unit in self._order.by_position[position].units)
            for unit in islice((unit for unit in expected if not unit.is_gathered), 2):
                if self._ahead:
                    unit.fetch()
                else:
                    self._request(unit)
            upcoming = self._channel.negotiation.upcoming(in_backward=self.in_backward, trains=self.trains)
        for place, unit in enumerate(self._planned(() if upcoming is None else upcoming.units)):
            if upcoming is None or place >= upcoming.num_due or not self._has_room_for(unit):
                unit.fetch()
                return
            self._request(unit)

    def _planned(self, upcoming: Sequence[int]) -> Iterator[Unit]:
        """This engine's next units in the plan, up to one that is used again."""
        for number in upcoming:
            if not 0 <= number - self._number < len(self._units):
                return
            unit = self._units[number - self._number]
            if unit.state is not UnitState.RELEASED:
                return
            yield unit

    # During an update

    def next_forward(self) -> list[Unit]:
        """The first units of the next forward, as many as may be in flight at once, unless their rows must be fetched,
        which would delay the update's own transfers. The same on all ranks."""
        units: list[Unit] = []
        upcoming = self._channel.negotiation.upcoming(in_backward=False, trains=True)
        for unit in self._planned(() if upcoming is None else upcoming.units):
            is_one_more = unit not in units and len(self._ahead) + len(units) < MOST_BESIDE_UPDATE
            is_at_hand = all(part.is_at_hand for part in unit.parts)
            if not (is_one_more and is_at_hand and self._has_room_for(unit, after=units)):
                break
            units.append(unit)
        return units

    def gather_beside_update(self, unit: Unit) -> None:
        """Request `unit`, the next one of the next forward, with its updated rows."""
        self.in_backward, self.trains = False, True  # a rank may have evaluated before this update
        self.rows.are_written()
        with ledger.phase("forward"):
            self._request(unit)

    def _has_room_for(self, unit: Unit, after: Sequence[Unit] = ()) -> bool:
        """Whether `unit` may be prefetched after the units `after`."""
        ahead = sum([each.numel for each in (*self._ahead, *after)])
        return self._order.gather_plan.has_room_for(unit.numel, ahead_numel=ahead, live_numel=self._live.numel)

    def _request(self, unit: Unit) -> None:
        """Prefetch `unit`."""
        self._ask_for(unit)
        self._ahead.append(unit)

    def _ask_for(self, unit: Unit) -> None:
        position = self._order.first_use[unit]
        order = -position if self.in_backward else position
        number = self._number + unit.index
        with SPANS.span("gather", unit.name, _phase(self.in_backward)):
            gathering = self._channel.negotiation.gather(
                number, order=order, in_backward=self.in_backward, trains=self.trains
            )
            unit.start(gathering)

    def discard_prefetched(self) -> None:
        """Release the prefetched units, which are not needed."""
        unwanted, self._ahead = self._ahead, []
        for unit in unwanted:
            if unit.is_direct:
                unit.arrive()
            else:
                unit.agree()
        with self.rows.lane():
            for unit in unwanted:
                unit.discard()
                unit.rows.put_back()
            if unwanted:
                self.rows.mark_sent()

    def release_all(self, except_for: Collection[Unit] = ()) -> None:
        """Release all units, except persistent ones."""
        for unit in self._units:
            if (unit.is_gathered or unit.rows.are_open) and unit not in except_for:
                unit.release()
                self._put_back(unit)

    def _put_back(self, unit: Unit) -> None:
        if unit.rows.are_open:
            with self.rows.lane():
                unit.rows.put_back()

    # Waiting for other ranks

    def prepare_to_wait(self, reduction: int) -> None:
        """Return when this rank may wait for reduction number `reduction`: no other rank waits for one of its rows.

        Units that all ranks gather before that are requested now if this pass needs them, so that they are not gathered
        twice.
        """
        negotiation = self._channel.negotiation
        for number in negotiation.due_before(reduction, in_backward=self.in_backward, trains=self.trains):
            place = number - self._number
            if 0 <= place < len(self._units) and self._units[place].state is UnitState.RELEASED:
                self._request(self._units[place])
        negotiation.wait_for(reduction)

    def end_pass(self, *, in_backward: bool) -> None:
        """End a pass: wait until no rank needs this rank's rows for it. Collective.

        Raises:
            StorageError: on all ranks, if one could not read its rows from a drive.
        """
        with ledger.phase(_phase(in_backward)):
            self.discard_prefetched()
            failed = self._placements.parameters.can_fail and self._placements.failure is not None
            if self._channel.negotiation.end(in_backward=in_backward, failed=failed):
                stop_if_any(self._placements.failure, self._channel)

    def begin_update(self, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        """Wait until no rank reads rows, which are about to change. Returns every rank's `facts`. Collective."""
        all_facts = self._channel.negotiation.step(self._number, facts)
        self.rows.about_to_write()
        return all_facts

    def end_update(self) -> None:
        """Allow reads of rows again, and complete gathers requested during the update: nothing is in flight between
        passes, when a rank may exit."""
        with ledger.phase("forward"):
            for unit in self._ahead:
                unit.arrive()
                self._put_back(unit)
        self.rows.are_written()
        self._channel.negotiation.reopen()

    def close(self) -> None:
        """Stop, because the units are gone."""
        self._channel.negotiation.table.forget(self._number, len(self._units))


def _phase(in_backward: bool) -> str:
    return "backward" if in_backward else "forward"
