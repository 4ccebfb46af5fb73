"""User writes into gathered parameters: detected, copied to the shards, compared between ranks.

Persistent parameters, and units that inference keeps, stay gathered between steps. An in-place write increases the
parameter's version, which is checked when a unit is released. A write through `parameter.data` does not, so digests of
the bits of these parameters are taken when they are gathered, and compared before they are released.

Every rank copies its own chunk, so all ranks must have written the same values. `mark` is sent with the message of the
next step; if marks differ, no update is made.
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
        """`masters`: by parameter, a function that overwrites the beginning of this rank's chunk of its masters."""
        self._units = units
        self._masters = masters
        self._stand_ins = stand_ins
        self._collectives = collectives
        self._persistent = {member for unit in units if unit.is_persistent for member in unit.members}
        # Compared by values in every step, unless the host runs ahead, which would have to wait.
        self._may_look = not host_runs_ahead(device)
        self._has_values = device.type != "meta"
        if self._has_values and not self._may_look:
            # CUDA loads a kernel at its first use, and may wait for everything in flight then: also for a collective
            # that another rank only joins once this one goes on (seen once, at an evaluation beside a backward).
            digest(torch.zeros(1 << 16, device=device))
        # Other ranks hold other parts of these, so writes into them are not compared.
        self._differ = {m for m in self._persistent if (part := held_part(m.parameter)) is not None and part.is_mixed}
        self._totals: dict[UnitPart, Tensor] = {}  # digests of persistent parts when gathered; 0-dim
        self._digests: dict[UnitPart, list[int]] = {}  # digests of the members of kept parts when gathered
        self._num_lost: Tensor | None = None
        self._edited: dict[str, int] = {}  # name -> digest, since ranks last synchronised

    def remember_persistent(self) -> None:
        """Record the persistent unit after a gather, or after the engine has written to it."""
        for unit in self._units:
            if unit.is_persistent:
                self._totals.update((part, part.digest()) for part in unit.parts)

    def remember_kept(self) -> None:
        """Record the units that inference keeps."""
        for part in self._kept_parts() if self._has_values else ():
            if part not in self._digests:
                self._digests[part] = _digests(part)

    def give_up_kept(self) -> None:
        """Copy edits of units that inference kept, before they are released."""
        self.adopt()
        for part in self._kept_parts():
            for member in part.members:
                if member.owner is not None:
                    member.owner.leave_to_graph(member)
            part.leave_views()

    def _kept_parts(self) -> list[UnitPart]:
        return [part for unit in self._units if unit.is_gathered and not unit.is_persistent for part in unit.parts]

    def close(self) -> None:
        """Stop tracking writes, because the units are gone."""
        self._units = ()
        self._totals.clear()
        self._digests.clear()
        self._edited.clear()

    def forget_released(self) -> None:
        """Forget digests of released units before weights change."""
        for part in self._digests.keys() - set(self._kept_parts()):
            del self._digests[part]

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy writes into gathered parameters to shards and masters.

        Raises:
            RuntimeError: if a parameter's data was replaced.
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
        """Check a persistent part in every step: one digest of all members and, if it differs, one of each."""
        is_changed = self._may_look and bool(part.digest() != self._totals[part])
        synced = [member.sync_master(is_certain=is_changed and member.differs()) for member in part.members]
        if is_changed or any(synced):
            self._totals[part] = part.digest()

    def write_master(self, handle: ShardedParameter, chunk: Tensor) -> None:
        """Write new values of this rank's chunk of `handle` to its masters."""
        write = self._masters.get(handle)
        if write is not None:
            write(chunk)

    def rewritten(self, handle: ShardedParameter) -> None:
        """Update the digest after the engine has written into the gathered tensor of `handle`."""
        if handle in self._persistent:
            self.remember_persistent()
            return
        for part in self._digests:
            if handle in part.members:
                self._digests[part] = _digests(part)

    def num_lost(self) -> Tensor | float:
        """Number of released parameters that were filled with a constant, and of persistent parts with a write that
        only the device can detect."""
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
                f"one of the persistent parameters ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''}) "
                "was written to through `parameter.data`. On an accelerator such a write is detected too late to be "
                "kept: leave out `.data` (with torch.no_grad(): parameter.clamp_(...)), on every rank."
            )

    def note(self, handle: ShardedParameter) -> None:
        """Record that a write into `handle` has been copied."""
        assert handle.unsharded is not None, "only gathered parameters can be written to"
        if handle not in self._persistent or not (self._may_look or handle in self._differ):
            # The totals of other parameters are compared in every step.
            self._edited[_name(handle)] = int(digest(handle.unsharded)) if self._has_values else 0

    @property
    def mark(self) -> int:
        """A number that is equal on ranks with equal writes and equal persistent parameters."""
        compared = (known for part, known in self._totals.items() if part.members[0] not in self._differ)
        totals = [int(known) for known in compared] if self._may_look else []
        if not self._edited and not totals:
            return 0
        return zlib.crc32(repr((sorted(self._edited.items()), totals)).encode()) >> (32 - MARK_BITS)

    def commit(self, *, are_equal: bool) -> None:
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
            "Each rank keeps only a shard, so the values would be mixed. Write the same on every rank, or inside "
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
    """Digests of all members' bits, with one device synchronization."""
    digests: list[int] = torch.stack(
        [digest(member.unsharded) for member in part.members if member.unsharded is not None]
    ).tolist()
    return digests
