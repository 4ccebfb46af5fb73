"""A drive failure on one rank stops all ranks; and placement of parameter shards."""

from __future__ import annotations

import pytest
import torch

from hf_zero.comm.collectives import LoneCollectives
from hf_zero.config import OffloadParam
from hf_zero.offload.placement import Placements, in_memory_placement, store_of_parameters
from hf_zero.offload.vector import MemoryStore, StorageError, all_or_none, stop_if_any, sync_failures

CPU = torch.device("cpu")


class Others(LoneCollectives):
    """This rank and another one, which may have failed."""

    def __init__(self, problem: str | None) -> None:
        super().__init__()
        self.problem = problem
        self.messages = 0

    def gather_objects(self, value: object) -> list[object]:
        self.messages += 1
        return [value, self.problem]

    def _sum_small(self, values: torch.Tensor) -> None:
        values += self.problem is not None


def test_all_ranks_hear_of_one_rank_s_problem() -> None:
    with pytest.raises(StorageError, match="^rank 1: no space$"):
        stop_if_any(None, Others("no space"))
    with pytest.raises(StorageError, match="rank 0: mine; rank 1: theirs"):
        stop_if_any(StorageError("mine"), Others("theirs"))
    stop_if_any(None, Others(None))


def test_what_is_done_together_fails_together() -> None:
    def fail() -> int:
        raise StorageError("read-only")

    assert all_or_none(lambda: 3, Others(None)) == 3
    with pytest.raises(StorageError, match="rank 1: full"):
        all_or_none(lambda: 3, Others("full"))
    with pytest.raises(StorageError, match="rank 0: read-only"):
        all_or_none(fail, Others(None))


def test_while_all_is_well_one_number_travels() -> None:
    well, failed = Others(None), Others("gone")
    sync_failures(None, well, CPU)
    assert well.messages == 0
    with pytest.raises(StorageError, match="rank 1: gone"):
        sync_failures(None, failed, CPU)
    assert failed.messages == 1


def test_shards_of_parameters_stay_in_memory_unless_a_drive_is_asked_for() -> None:
    policy = OffloadParam(device="cpu", pin_memory=False)
    for store in (store_of_parameters(None, CPU, None), store_of_parameters(policy, CPU, None)):
        assert isinstance(store, MemoryStore) and not store.can_fail
        assert store.adopt("weights", torch.arange(3.0)).take().tolist() == [0, 1, 2]


def test_the_first_buckets_stay_near_as_long_as_there_is_room() -> None:
    """At stage 3 forward uses them first, so that it need not wait for an update that is deferred."""
    near, far = in_memory_placement(CPU), in_memory_placement(CPU)
    placements = Placements(CPU, near, [(far, 1.0)], near_numel=10)
    assert [placements.next(numel) is near for numel in (6, 6, 4, 1)] == [True, False, True, False]
    assert placements.failure is None


def test_far_placements_alternate_by_their_shares() -> None:
    """Neighbouring buckets are updated at the same time only if they are in different placements."""
    near, host, device = (in_memory_placement(CPU) for _ in range(3))
    placements = Placements(CPU, near, [(host, 0.25), (device, 0.75)], near_numel=1)
    assert placements.next(1) is near
    chosen = ["device" if placements.next(1) is device else "host" for _ in range(8)]
    assert chosen == ["device", "host", "device", "device"] * 2
