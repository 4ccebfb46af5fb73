"""User writes into whole parameters: detected, carried over to the shards, compared between ranks.

Whole between steps are persistent parameters, and what inference has kept gathered. A write in place counts up the
parameter's version, by which it is noticed wherever a unit goes back to shards; one through `parameter.data` does not,
so what is whole for long has a digest of its bits taken when it was gathered, and again before it goes.

Every rank carries over its own chunk. So all ranks must have written the same: `mark` travels with the message of the
next step, and where the marks differ no update is made.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.comm.parts import held_part
from hf_zero.device.registry import host_runs_ahead
from hf_zero.params.sharded_parameter import ShardedParameter
from hf_zero.params.stand_ins import StandIns
from hf_zero.params.store import Edits
from hf_zero.params.unit import Unit, UnitPart, digest

MARK_BITS = 20


class ShardedEdits(Edits):
    """Edits of the parameters of one store."""

    def __init__(
        self,
        units: Sequence[Unit],
        masters: Mapping[ShardedParameter, Callable[[Tensor], None]],
        stand_ins: StandIns,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        """`masters`: for parameters that have some, how to overwrite the beginning of this rank's chunk of them."""
        self._units = units
        self._masters = masters
        self._stand_ins = stand_ins
        self._collectives = collectives
        self._persistent = {member for unit in units if unit.is_persistent for member in unit.members}
        # By values, in every step: where the host runs ahead it would have to wait.
        self._may_look = not host_runs_ahead(device)
        self._has_values = device.type != "meta"
        # Of which other ranks hold other parts: what is written into these is not compared.
        self._differ = {m for m in self._persistent if (part := held_part(m.parameter)) is not None and part.is_mixed}
        self._totals: dict[UnitPart, Tensor] = {}  # digests of persistent parts, when they were gathered; 0-dim
        self._digests: dict[UnitPart, list[int]] = {}  # of the members of kept parts, when they were gathered
        self._num_lost: Tensor | None = None
        self._edited: dict[str, int] = {}  # since ranks met the last time: name -> digest

    def remember_persistent(self) -> None:
        """Record the persistent unit after a gather, or after the engine has written to it."""
        for unit in self._units:
            if unit.is_persistent:
                self._totals.update((part, part.digest()) for part in unit.parts)

    def remember_kept(self) -> None:
        """Record the units that inference keeps."""
        for unit in self._units:
            if unit.is_gathered and not unit.is_persistent and self._has_values:
                for part in unit.parts:
                    if part not in self._digests:
                        self._digests[part] = _digests(part)

    def give_up_kept(self) -> None:
        """Sync what inference has kept before it is released."""
        self.adopt()
        for unit in self._units:
            if unit.is_gathered and not unit.is_persistent:
                for part in unit.parts:
                    part.leave_views()

    def close(self) -> None:
        """Stop: the units are gone, and later writes are not tracked."""
        self._units = ()
        self._totals.clear()
        self._digests.clear()
        self._edited.clear()

    def forget_released(self) -> None:
        """Weights are about to change: what was released is no longer what was remembered."""
        for unit in self._units:
            if not unit.is_gathered:
                for part in unit.parts:
                    self._digests.pop(part, None)

    @torch.no_grad()
    def adopt(self) -> None:
        """Carry over writes into parameters that are whole now.

        Raises:
            RuntimeError: when a parameter was given other data.
        """
        for unit in self._units:
            if unit.is_gathered:
                for part in unit.parts:
                    self._sync(part)

    def _sync(self, part: UnitPart) -> None:
        if part in self._totals:
            self._sync_persistent(part)
            return
        known = self._digests.get(part)
        digests = None if known is None else _digests(part)
        for place, member in enumerate(part.members):
            member.sync_master(is_certain=known is not None and digests is not None and known[place] != digests[place])
        if digests is not None:
            self._digests[part] = digests

    def _sync_persistent(self, part: UnitPart) -> None:
        """Part of every step: one check of all, and only if that differs, one of each."""
        is_changed = self._may_look and bool(part.digest() != self._totals[part])
        synced = [member.sync_master(is_certain=is_changed and member.differs()) for member in part.members]
        if is_changed or any(synced):
            self._totals[part] = part.digest()

    def write_master(self, handle: ShardedParameter, chunk: Tensor) -> None:
        """This rank's chunk of `handle` has been given new values."""
        write = self._masters.get(handle)
        if write is not None:
            write(chunk)

    def rewritten(self, handle: ShardedParameter) -> None:
        """The engine has written into the gathered tensor of `handle`."""
        if handle in self._persistent:
            self.remember_persistent()
            return
        for part in self._digests:
            if handle in part.members:
                self._digests[part] = _digests(part)

    def num_lost(self) -> Tensor | float:
        """Released parameters that were filled with a constant, and parts that stay gathered and were written to in a
        way that only the device has seen."""
        constants = self._stand_ins.num_overwritten()
        if not self._totals or self._may_look:
            return constants
        changed = [part.digest() != known for part, known in self._totals.items()]
        self._num_lost = torch.stack(changed).sum()
        return constants + self._num_lost

    def refuse_lost(self) -> None:
        self._stand_ins.refuse_overwritten()
        if self._num_lost is not None and self._num_lost.item():
            names = [_name(member) for part in self._totals for member in part.members]
            raise RuntimeError(
                f"one of the parameters that stay whole ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''}) "
                "was written to through `parameter.data`. On an accelerator such a write is noticed too late to be "
                "kept: leave out `.data` (with torch.no_grad(): parameter.clamp_(...)), on every rank."
            )

    def note(self, handle: ShardedParameter) -> None:
        """Record that a write into `handle` has been carried over."""
        assert handle.unsharded is not None, "only what is whole can be written to"
        if handle not in self._persistent or not (self._may_look or handle in self._differ):
            # Of others the total is compared in every step.
            self._edited[_name(handle)] = int(digest(handle.unsharded)) if self._has_values else 0

    @property
    def mark(self) -> int:
        """Equal on ranks with equal writes and equal persistent parameters."""
        compared = (known for part, known in self._totals.items() if part.members[0] not in self._differ)
        totals = [int(known) for known in compared] if self._may_look else []
        if not self._edited and not totals:
            return 0
        return zlib.crc32(repr((sorted(self._edited.items()), totals)).encode()) >> (32 - MARK_BITS)

    def settle(self, *, are_equal: bool) -> None:
        if not are_equal:
            self._refuse_unequal()
        self._edited.clear()

    def _refuse_unequal(self) -> None:
        facts = self._facts()
        everywhere = self._collectives.gather_objects(facts)
        self._edited.clear()
        names: set[str] = set(facts).union(*everywhere)  # type: ignore[arg-type]
        differing = sorted(n for n in names if any(other.get(n) != facts.get(n) for other in everywhere))  # type: ignore[attr-defined]
        ranks = [rank for rank, other in enumerate(everywhere) if other != everywhere[0]]
        raise RuntimeError(
            "parameters were written to outside of training, and not with the same values on all ranks: "
            f"{', '.join(differing[:8])}{', ...' if len(differing) > 8 else ''} (ranks {ranks} differ from rank 0). "
            "Each rank keeps only a shard, so they would become a mixture. Write the same on every rank, or inside "
            "`with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`, which takes rank 0's values."
        )

    def _facts(self) -> dict[str, int]:
        persistent = {
            _name(member): digest
            for part in self._totals
            if part.members[0] not in self._differ
            for member, digest in zip(part.members, _digests(part), strict=True)
        }
        return {**persistent, **self._edited}


def _name(handle: ShardedParameter) -> str:
    return handle.name or f"a parameter of another module, of shape {tuple(handle.shape)}"


def _digests(part: UnitPart) -> list[int]:
    """Digests of every member's bits, with one device synchronization."""
    digests: list[int] = torch.stack(
        [digest(member.unsharded) for member in part.members if member.unsharded is not None]
    ).tolist()
    return digests
