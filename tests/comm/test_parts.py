"""Unit tests of communication, on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_zero import integration
from hf_zero.comm import EngineRows, OwnRow, UnitRows, mirror
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.comm.negotiation.lockstep import LockstepNegotiation
from hf_zero.comm.negotiation.passes import Route, Start
from hf_zero.comm.quantized import PlainRows
from hf_zero.offload.vector import InMemoryVector
from hf_zero.params.consolidation import broadcast_buffers

CPU = torch.device("cpu")


def two_units() -> EngineRows:
    """Two units with one row each."""
    rows = [OwnRow(InMemoryVector(torch.full((3,), float(unit))), PlainRows(), CPU) for unit in (0, 1)]
    return EngineRows([UnitRows(f"unit {unit}", [row]) for unit, row in enumerate(rows)], LoneCollectives(), CPU)


@pytest.mark.parametrize("kind", ["alike", "lockstep"])
def test_a_rank_alone_gets_what_it_asks_for(kind: str) -> None:
    collectives, engine = LoneCollectives(), two_units()
    negotiation = collectives.negotiation
    if kind == "lockstep":
        negotiation = LockstepNegotiation(collectives, LoneCollectives())
    first = negotiation.table.register(engine)
    ahead = [negotiation.gather(first + unit, order=unit, in_backward=False) for unit in (0, 1)]
    assert [[rows.row(0).tolist() for rows in gathering.wait()] for gathering in ahead] == [[[0.0] * 3], [[1.0] * 3]]
    assert not any(unit.is_awaited for unit in engine.units)
    assert negotiation.end(in_backward=False) is False and negotiation.end(in_backward=True, failed=True) is True
    negotiation.step(first)
    assert negotiation.version == 1


def test_units_of_an_engine_that_is_gone_cannot_be_gathered() -> None:
    negotiation, engine = LoneCollectives().negotiation, two_units()
    first = negotiation.table.register(engine)
    negotiation.table.forget(first, 2)
    with pytest.raises(RuntimeError, match="that this rank has destroyed"):
        negotiation.gather(first, order=0, in_backward=False)


def test_buffers_of_any_dtype_are_broadcast_in_one_message_each() -> None:
    class Doubling(LoneCollectives):
        messages: list[Tensor] = []

        def _broadcast(self, tensor: Tensor, source: int) -> None:
            self.messages.append(tensor.clone())
            tensor.mul_(2)

    module = nn.Module()
    for name, value in {
        "a": torch.ones(2),
        "b": torch.tensor(3),
        "c": torch.full((1,), 5.0),
        "d": torch.empty(0),
    }.items():
        module.register_buffer(name, value)
    collectives = Doubling()
    broadcast_buffers(module, collectives)
    assert [message.tolist() for message in collectives.messages] == [[1, 1, 5], [3]]
    assert (module.a.tolist(), module.b.item(), module.c.tolist()) == ([2, 2], 6, [10])


def test_every_name_of_the_mirror_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = json.loads((Path(integration.__file__).parent / "names" / "homes.json").read_text())
    assert all(callable(getattr(mirror, name)) for name in homes["comm.comm"]["comm.mirror"].split())
    assert mirror.get_world_group() is torch.distributed.group.WORLD  # another test may have created a world of one
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert mirror.get_all_ranks_from_group() == [0]
    assert mirror.allgather_fn is mirror.all_gather_into_tensor and mirror.has_all_reduce_coalesced()


def test_a_rank_that_waits_serves_the_plan_of_an_engine_that_is_gone() -> None:
    """A rank waited for a reduction while another one needed the rows of a plan. If the plan's engine had been dropped,
    the waiting rank died looking up the rows' owner. Now it serves them, as if it had asked for rows."""
    collectives = LoneCollectives()
    negotiation = LockstepNegotiation(collectives, LoneCollectives())
    number = negotiation.table.register(two_units())
    negotiation._pass.base = 0
    negotiation._pass.follow(Start(number, in_backward=True, trains=True), Route((number,), (0,), 1))
    negotiation._shapes[number] = [(3, torch.float32, torch.device("cpu"), ())]
    negotiation.table.forget(number, 1)
    negotiation.wait_for(0)
    assert negotiation._pass.plan is not None and not negotiation._pass.plan.left and negotiation._pass.has_served_gone
