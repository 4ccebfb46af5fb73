"""Shared memory between ranks of one machine: reuse, fallback if a rank cannot use it, and errors for dead ranks."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from hf_zero.comm import MAX_SEND_BUFFERS, Pending, collectives_for
from hf_zero.comm.collectives import own_shard
from hf_zero.comm.cpu import blocks, shared_memory
from hf_zero.comm.cpu.host import HostCollectives
from hf_zero.comm.cpu.point_to_point import ExchangeCollectives
from tests.support.ranks import RankFailure, run_ranks

CPU = torch.device("cpu")
NUMEL = 1 << 20


def run_many(rank: int, world: int) -> int:
    """Gathers of changing values; a block that was overwritten before all ranks had read it would be detected."""
    first, second = collectives_for(CPU), collectives_for(CPU)
    for call in range(50):
        flat = torch.zeros(NUMEL)
        own_shard(flat, rank, world).fill_(100.0 * call + rank)
        small = torch.full((world,), float(call))
        pending = first.all_gather(flat)
        second.all_reduce(small).wait()
        own_shard(flat, rank, world).fill_(-1.0)  # the piece has already been sent
        pending.wait()
        for peer in range(world):
            expected = -1.0 if peer == rank else 100.0 * call + peer
            assert bool((own_shard(flat, peer, world) == expected).all())
        assert small.tolist() == [float(world * call)] * world
    assert not first._link.link._posted
    return len(first._link.own.tensors)


@pytest.mark.parametrize("world", [2, 4])
def test_blocks_are_used_again(world: int) -> None:
    assert max(run_ranks(run_many, world, world)) <= 6  # a few per size, not one per call


def run_burst(rank: int) -> list[int]:
    """Twenty reductions in flight at once; then a few more, one by one."""
    collectives = collectives_for(CPU)
    assert isinstance(collectives, HostCollectives)
    pending = []
    for number in range(20):
        shard = torch.empty(1000 + number)
        flat = torch.full((2 * shard.numel(),), 1.0 * number)
        pending.append((number, shard, collectives.reduce_scatter(shard, flat)))
    levels = [len(collectives.buffers())]
    collectives.gather_objects(None)  # a rank that already reads would return the other one's blocks
    for number, shard, handle in pending:
        handle.wait()
        assert shard.tolist() == [2.0 * number] * (1000 + number)
    for _ in range(blocks._MAX_IDLE + 1):
        collectives.sum_small(torch.zeros(1))
    return [*levels, len(collectives.buffers())]


def test_blocks_of_a_burst_do_not_stay() -> None:
    """In the first step nobody waited for reductions: every rank kept memory for all of them permanently."""
    for during, after in run_ranks(run_burst, 2):
        assert during >= 20
        assert after <= 3  # small ones


def run_send_buffers(rank: int) -> tuple[int, int]:
    """Twenty reductions from send buffers, used as for gradients; one rank is slow."""
    collectives = collectives_for(CPU)
    assert isinstance(collectives, HostCollectives)
    under_way: list[tuple[torch.Tensor, torch.Tensor, Pending]] = []

    def land(call: int) -> None:
        buffer, shard, pending = under_way.pop(0)
        pending.wait()
        collectives.give_send_buffer(buffer)
        assert bool((shard == 1.0 + 2 * call).all())

    for call in range(20):
        if rank:
            time.sleep(0.01)
        if len(under_way) == MAX_SEND_BUFFERS:
            land(call - MAX_SEND_BUFFERS)
        buffer = collectives.take_send_buffer(2 * NUMEL, torch.float32, CPU)
        buffer.fill_(call + rank)
        shard = torch.empty(NUMEL)
        under_way.append((buffer, shard, collectives.reduce_scatter(shard, buffer)))
    for call in range(20 - MAX_SEND_BUFFERS, 20):
        land(call)
    return len(collectives.buffers()), sum(block.numel() for block in collectives.buffers())


def test_a_fast_rank_waits_rather_than_take_a_third_send_buffer() -> None:
    """Gradients are written where the other ranks read them: overwriting a buffer too early would be detected."""
    assert run_ranks(run_send_buffers, 2) == [(MAX_SEND_BUFFERS, MAX_SEND_BUFFERS * 2 * 4 * NUMEL)] * 2


def run_unreachable(rank: int, reason: str) -> str:
    patches = {
        "another host": mock.patch.object(shared_memory, "host_name", lambda: f"host {rank}"),
        "another file system": mock.patch.object(shared_memory, "_call", lambda rank, _: {} if rank == 0 else None),
        "no memory files": mock.patch.object(os, "memfd_create", side_effect=OSError) if rank else nullcontext(),
        "no temporary folder": mock.patch.object(
            shared_memory.tempfile, "TemporaryDirectory", side_effect=FileNotFoundError("no usable")
        ),
    }
    with patches[reason]:
        collectives = collectives_for(CPU)
    values = torch.ones(2)
    collectives.all_reduce(values).wait()
    assert values.tolist() == [2.0, 2.0]
    return type(collectives).__name__


@pytest.mark.parametrize("reason", ["another host", "another file system", "no memory files", "no temporary folder"])
def test_ranks_that_cannot_share_memory_exchange_messages(reason: str) -> None:
    """One rank that cannot is enough, because all of them have to do the same. Without a writable folder,
    FileNotFoundError ended a run that gloo could have carried. (A process connects once, hence a start for each.)"""
    assert run_ranks(run_unreachable, 2, reason) == [ExchangeCollectives.__name__] * 2


def run_leaving(rank: int) -> None:
    collectives = collectives_for(CPU)
    assert isinstance(collectives, HostCollectives)
    collectives.sum_small(torch.zeros(1))
    if rank == 0:
        collectives.all_gather(torch.zeros(8)).wait()
    collectives._link.link.close()


def test_a_rank_that_stops_is_named_at_once() -> None:
    with pytest.raises(RankFailure, match="rank 1 has exited"):
        run_ranks(run_leaving, 2)


def run_without_the_last(rank: int, folder: str) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which is dead; the order of waiting is deterministic."""
    collectives = collectives_for(CPU)
    assert isinstance(collectives, HostCollectives)
    collectives.sum_small(torch.zeros(1))
    if rank == 2:
        os._exit(9)
    try:
        collectives._link.link.claim([rank + 1], call=1000)
    except RuntimeError as error:
        Path(folder, str(rank)).write_text(str(error))
        raise


def test_a_rank_that_was_not_asked_is_named_all_the_same(tmp_path: Path) -> None:
    """Previously a rank was blamed that only ended because another one had."""
    with pytest.raises(RankFailure, match="rank 2 of 3 failed first"):
        run_ranks(run_without_the_last, 3, str(tmp_path))
    assert (tmp_path / "1").read_text() == "rank 2 has exited"
    assert (tmp_path / "0").read_text() == "rank 2 has exited, and then rank 1"


def run_late(rank: int) -> None:
    collectives = collectives_for(CPU)
    assert isinstance(collectives, HostCollectives)
    collectives._link.link.timeout_s = 0.2
    if rank == 0:
        collectives.all_gather(torch.zeros(8)).wait()
    time.sleep(1)


def test_a_rank_that_does_not_answer_is_named_after_the_groups_timeout() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 has not responded for 0\.2 seconds"):
        run_ranks(run_late, 2)


def run_slow(rank: int) -> list[str]:
    collectives = collectives_for(CPU)
    assert isinstance(collectives, HostCollectives)
    warned: list[str] = []
    with (
        mock.patch.object(shared_memory, "STALL_S", 0.05),
        mock.patch.object(shared_memory.logger, "warning", lambda text, *values: warned.append(text % values)),
    ):
        if rank == 1:
            time.sleep(0.5)
        collectives.all_gather(torch.zeros(8)).wait()
    return warned


def test_a_rank_that_is_waited_for_is_named_long_before_the_timeout() -> None:
    """A rank that ran a forward alone silently slept for half an hour, without saying for whom it waited."""
    warned, _ = run_ranks(run_slow, 2)
    assert warned and warned[0].startswith("nothing from rank 1 for 0.05 seconds: this rank waits for it")
