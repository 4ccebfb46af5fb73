"""Quantized reductions: sums within the error bound of their blocks, the same on every transport, error feedback."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_zero.comm import Channel, Collectives, ledger
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.comm.quantized import FeedbackRule, QuantizedReduction
from hf_zero.comm.rows import FlatRows, Pending
from hf_zero.kernels.message import message_bytes
from hf_zero.kernels.quantize import dequantize_reference, quantize_reference
from tests.comm.test_collectives import KINDS
from tests.support.in_process import InProcessWorld
from tests.support.ranks import run_each

CPU = torch.device("cpu")
ROW = 200


def contribution(rank: int, world: int) -> Tensor:
    return torch.randn(world * ROW, generator=torch.Generator().manual_seed(rank)) * 0.1 ** (rank % 3)


def rounded(values: Tensor, bits: int) -> Tensor:
    return dequantize_reference(*quantize_reference(values, bits))


def run_exchange(rank: int, world: int, kind: str) -> list[float]:
    collectives = KINDS[kind]()
    under_way = []
    for start in (0, 100):  # two at a time
        sent = torch.tensor([start + 10.0 * rank + peer for peer in range(world) for _ in range(3)])
        under_way.append((sent, collectives.exchange_rows(sent, sent.new_empty)))
    found = []
    for _, rows in reversed(under_way):
        rows.wait()
        found += [float(rows.row(source)[2]) for source in range(world)]
        rows.give_back()
    wire = QuantizedReduction([collectives], 4).wire(ROW, CPU)
    shard = torch.empty(ROW)
    wire.reduce_scatter(shard, contribution(rank, world)).wait()
    expected = sum(rounded(contribution(peer, world).view(world, ROW)[rank], 4) for peer in range(world))
    assert torch.equal(shard, expected)
    return found


def test_rows_are_exchanged_and_added_up_alike_by_everything() -> None:
    expected = [[start + 10.0 * peer + rank for start in (100, 0) for peer in range(3)] for rank in range(3)]
    assert run_each(run_exchange, 3, [(3, kind) for kind in KINDS]) == [expected] * len(KINDS)


class Group(LoneCollectives):
    """Some ranks of an in-process world, as a separate group."""

    def __init__(self, world: InProcessWorld, members: list[int], channel: int) -> None:
        Collectives.__init__(self, members.index(world.rank), len(members))
        self._ranks, self._members, self._channel = world, members, channel

    def _exchange_rows(self, flat: Tensor, take: object) -> FlatRows:
        everyone = self._ranks.exchange(self._channel, flat.clone())
        each = flat.numel() // self.size
        parts = [everyone[member][self.rank * each : (self.rank + 1) * each] for member in self._members]  # type: ignore[index]
        return FlatRows(None, torch.cat(parts), self.size, Pending())


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 2), (2, 3)])
def test_two_hops_quantise_once_each(hosts: int, local: int) -> None:
    """Ranks of a host are consecutive; one host's sum for each of the others is sent between hosts."""
    size = hosts * local
    world = InProcessWorld(size)

    def body(rank: int) -> Tensor:
        host, place = divmod(rank, local)
        within = Group(world, list(range(host * local, (host + 1) * local)), 0)
        across = Group(world, list(range(place, size, local)), 1)
        wire = QuantizedReduction([within, across], 4).wire(ROW, CPU)
        shard = torch.empty(ROW)
        pending = wire.reduce_scatter(shard, contribution(rank, size))
        assert pending.has_more_rounds
        pending.wait()
        return shard

    ledger.reset()
    found = world.run(body)
    counted = sum(tally.num_bytes for (_, name), tally in ledger.tallies.items() if name == "all_to_all")
    assert counted == size * message_bytes(ROW, 4) * (size + hosts)
    rows = [contribution(rank, size).view(size, ROW) for rank in range(size)]
    for rank in range(size):
        sums = [sum(rounded(rows[host * local + peer][rank], 4) for peer in range(local)) for host in range(hosts)]
        expected = sum(rounded(each, 4) for each in sums)  # type: ignore[arg-type]
        assert torch.equal(found[rank], expected)


def test_feedback_makes_up_for_what_was_left_out() -> None:
    """With a constant gradient, its small elements are always lost without feedback; with it their mean is correct."""
    flat = torch.full((2 * ROW,), 0.05)
    flat[::50] = 1.0
    world = InProcessWorld(2)

    def mean(rank: int, rule: FeedbackRule | None, rounds: int = 60) -> Tensor:
        wire = QuantizedReduction([world.collectives(Channel.REDUCE)], 4, rule).wire(ROW, CPU)
        total = torch.zeros(ROW)
        for _ in range(rounds):
            shard = torch.empty(ROW)
            wire.reduce_scatter(shard, flat.clone()).wait()
            total += shard / 2
        return total / rounds

    def body(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        loco = mean(rank, FeedbackRule(0.8, 1024))
        return mean(rank, None), loco, mean(rank, FeedbackRule(0.8, 1))

    for plain, loco, always_reset in world.run(body):
        assert not bool(plain[1:50].any()) and torch.equal(plain, always_reset)
        torch.testing.assert_close(loco[1:50].mean(), torch.tensor(0.05), rtol=0.1, atol=0)


def test_errors_follow_the_loss_scale_and_are_dropped() -> None:
    wire = QuantizedReduction([_Pair()], 4, FeedbackRule(0.5, 10)).wire(ROW, CPU)
    shard = torch.empty(ROW)
    wire.reduce_scatter(shard, contribution(0, 2)).wait()
    (errors,) = wire.errors
    scales = errors[:, -16:].view(torch.bfloat16)[:, :2].clone()
    assert bool(scales.all())
    wire.rescale(0.5)
    assert torch.equal(errors[:, -16:].view(torch.bfloat16)[:, :2], scales / 2)
    wire.forget()
    assert not bool(errors.any()) and wire.num_reduced == 0


class _Pair(LoneCollectives):
    """Two ranks that always send the same."""

    def __init__(self) -> None:
        Collectives.__init__(self, 0, 2)

    def _exchange_rows(self, flat: Tensor, take: object) -> FlatRows:
        return FlatRows(None, flat[: flat.numel() // 2].repeat(2), 2, Pending())
