"""Gathers the units of one engine ahead of their use, and serves this rank's rows to other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice

from torch import Tensor

from hf_zero.comm import Collectives, Rows, gather_lane, ledger
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import DONE, Event
from hf_zero.offload.placement import Placements
from hf_zero.offload.vector import stop_if_any
from hf_zero.params.gather_plan import MOST_BESIDE_UPDATE
from hf_zero.params.hooked_modules import ExecutionOrder
from hf_zero.params.unit import GatherBuffers, LiveElements, Unit, UnitState
from hf_zero.spans import SPANS


class Prefetcher:
    """Gathers units ahead of their use. Each rank requests the units it needs, and `hf_zero.comm.negotiation` matches
    the requests of all ranks.

    Attributes:
        in_backward: whether units are needed from the last to the first.
        trains: whether the current pass records gradients, or is the backward of such a pass.
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
        self._number = channel.negotiation.sources.register(self, len(self._units))
        self._runtime = runtime_of(placements.device)
        self._rows_written: Event | None = None  # None: not yet recorded
        self._served: Event = DONE  # when other ranks have this rank's rows; compute has not waited for it
        self.buffers = GatherBuffers(placements.device)
        self.take_buffer = self.buffers.take
        self._ahead: list[Unit] = []  # prefetched, in the order of their requests
        self._live = LiveElements(sum(unit.numel for unit in units if unit.is_gathered))
        for unit in units:
            unit.live = self._live
            for part in unit.parts:
                for numel, dtype in part.form.buffers(part.layout, part.dtype):
                    self.buffers.expect(numel, dtype)

    # What other ranks need from this one (`negotiation.Source`)

    def name(self, unit: int) -> str:
        return self._units[unit].name

    def open_rows(self, unit: int) -> Sequence[Tensor]:
        if self._rows_written is None:
            self._rows_written = self._runtime.record()
        with gather_lane(self._channel, self._runtime.device, self._rows_written):
            return self._units[unit].open_rows()

    def close_rows(self, unit: int) -> None:
        with self._on_lane():
            self._units[unit].put_back()
            self._served = self._runtime.record()

    def _put_back(self, unit: Unit) -> None:
        with self._on_lane():
            unit.put_back()

    def take_unread(self, numel: int, row: Tensor) -> Tensor:
        return (self.buffers.take_unread if self._channel.has_gather_lane else self.buffers.take)(numel, row)

    def give_unread(self, rows: Rows) -> None:
        if not self._channel.has_gather_lane:
            rows.wait()
            self.buffers.give(rows)

    def _on_lane(self) -> AbstractContextManager[None]:
        """Context for work of the gather lane that does not wait for compute."""
        return gather_lane(self._channel, self._runtime.device, DONE)

    # What this rank needs

    def gather(self, unit: Unit) -> None:
        """Gather the unit and wait for it."""
        if unit.is_gathered:
            return
        with SPANS.span("gather", unit.name, _phase(self.in_backward)):
            if unit.state is UnitState.RELEASED:
                self._ask_for(unit)
            unit.finish(self.buffers)
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
        self.rows_are_written()
        with ledger.phase("forward"):
            self._request(unit)

    def ask_ahead(self, unit: int, *, in_backward: bool, trains: bool) -> bool:
        is_of_this_pass = (in_backward, trains) == (self.in_backward, self.trains)
        if not is_of_this_pass or self._units[unit].state is not UnitState.RELEASED:
            return False
        self._request(self._units[unit])
        return True

    def _has_room_for(self, unit: Unit, after: Sequence[Unit] = ()) -> bool:
        """Whether `unit` may be prefetched after the units `after`."""
        ahead = sum(each.numel for each in (*self._ahead, *after))
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
        with self._on_lane():
            for unit in unwanted:
                unit.discard(self.buffers)
                unit.put_back()
            if unwanted:
                self._served = self._runtime.record()

    def release_all(self, except_for: Collection[Unit] = ()) -> None:
        """Release all units, except persistent ones."""
        for unit in self._units:
            if unit not in except_for:
                unit.release()
                self._put_back(unit)

    # Synchronisation of all ranks

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
        self.about_to_write()
        return all_facts

    def end_update(self) -> None:
        """Allow reads of rows again, and complete gathers requested during the update: nothing is in flight between
        passes, when a rank may exit."""
        with ledger.phase("forward"):
            for unit in self._ahead:
                unit.arrive()
                self._put_back(unit)
        self.rows_are_written()
        self._channel.negotiation.reopen()

    def about_to_write(self) -> None:
        """Make compute wait until gathers for other ranks have read this rank's rows. The next gather waits for what is
        written then."""
        self._runtime.wait(self._served)
        self._served = DONE
        self._rows_written = None

    def rows_are_written(self) -> None:
        """Make gathers wait for everything queued on the compute stream so far, and for nothing later: others may need
        a row before they take part in a collective for which this rank's compute waits."""
        self._rows_written = self._runtime.record()

    def close(self) -> None:
        """Stop, because the units are gone."""
        self._channel.negotiation.sources.forget(self._number, len(self._units))


def _phase(in_backward: bool) -> str:
    return "backward" if in_backward else "forward"
