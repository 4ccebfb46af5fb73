"""Gathers the units of one engine, one ahead of its use, and gives other ranks the rows that they need of this one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from hf_zero.comm import Collectives, Rows, ledger
from hf_zero.offload.failures import stop_if_any
from hf_zero.offload.placement import Placements
from hf_zero.params.hooked_modules import ExecutionOrder
from hf_zero.params.unit import GatherBuffers, Unit, UnitState
from hf_zero.spans import SPANS


class Prefetcher:
    """What ranks do at the same time is no concern of it: each asks for what it needs when it needs it, and
    `hf_zero.comm.negotiation` brings them together.

    Attributes:
        in_backward: units are wanted from the last to the first.
    """

    def __init__(
        self, units: Sequence[Unit], order: ExecutionOrder, placements: Placements, channel: Collectives
    ) -> None:
        """`placements`: tell whether a drive has failed; `channel`: over whose negotiation units are gathered."""
        self.in_backward = False
        self._units = tuple(units)
        self._order = order
        self._placements = placements
        self._channel = channel
        self._number = channel.negotiation.register(self, len(self._units))
        self._ahead: Unit | None = None  # asked for before its use
        self.buffers = GatherBuffers()
        for unit in units:
            for part in unit.parts:
                for numel, dtype in part.form.buffers(part.layout, part.dtype):
                    self.buffers.expect(numel, dtype)

    # What other ranks need of this one (`negotiation.Source`)

    def name(self, unit: int) -> str:
        return self._units[unit].name

    def open_rows(self, unit: int) -> Sequence[Tensor]:
        return self._units[unit].open_rows()

    def close_rows(self, unit: int) -> None:
        self._units[unit].put_back()

    def take_buffer(self, numel: int, row: Tensor) -> Tensor:
        return self.buffers.take(numel, row)

    def give_buffer(self, rows: Rows) -> None:
        self.buffers.give(rows)

    # What this rank needs

    @property
    def _phase(self) -> str:
        return "backward" if self.in_backward else "forward"

    def gather(self, unit: Unit) -> None:
        """The unit has its values when this returns."""
        if unit.is_gathered:
            return
        with SPANS.span("gather", unit.name, self._phase):
            if unit.state is UnitState.RELEASED:
                self._ask_for(unit)
            unit.finish(self.buffers)
        if self._ahead is unit:
            self._ahead = None

    def prefetch(self, positions: Iterable[int]) -> None:
        """Ask for the first unit that is missing there, and fetch the one after it from where shards are kept, so that
        its gather can start at once. One is asked for at a time."""
        if self._ahead is not None or not self._order.gather_plan.prefetches:
            return
        for position in positions:
            for unit in self._order.by_position[position].units:
                if unit.is_gathered:
                    continue
                if self._ahead is not None:
                    unit.fetch()
                    return
                self._ask_for(unit)
                self._ahead = unit

    def _ask_for(self, unit: Unit) -> None:
        position = self._order.first_use[unit]
        order = -position if self.in_backward else position
        number = self._number + unit.index
        with SPANS.span("gather", unit.name, self._phase):
            unit.start(self._channel.negotiation.gather(number, order=order, in_backward=self.in_backward))

    def release_all(self, except_for: Collection[Unit] = ()) -> None:
        """Back to shards, persistent units apart."""
        for unit in self._units:
            if unit not in except_for:
                unit.release()
                unit.put_back()

    # Where all ranks meet

    def end_pass(self, *, in_backward: bool) -> None:
        """Wait until no rank needs this one's rows for the pass that ends here. Collective.

        Raises:
            StorageError: on all ranks, when one could not read its rows from a drive.
        """
        with ledger.phase("backward" if in_backward else "forward"):
            unwanted, self._ahead = self._ahead, None
            if unwanted is not None:
                unwanted.discard(self.buffers)
            failed = self._placements.parameters.can_fail and self._placements.failure is not None
            if self._channel.negotiation.end(in_backward=in_backward, failed=failed):
                stop_if_any(self._placements.failure, self._channel)

    def begin_update(self) -> None:
        """Rows are about to change: nobody reads them from now on. Collective."""
        self._channel.negotiation.step(self._number)

    def end_update(self) -> None:
        """Rows are right again."""
        self._channel.negotiation.reopen()

    def close(self) -> None:
        """The units are gone."""
        self._channel.negotiation.forget(self._number, len(self._units))
