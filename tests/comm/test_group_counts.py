"""How many groups and connections a rank makes: only those that its stage uses, and none that grow with the world."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import LoneCollectives, background_collectives, groups, known_groups, parallel_groups
from hf_zero.comm.cpu import shared_memory
from hf_zero.comm.known_groups import KnownGroups
from hf_zero.comm.mesh import Hosts
from hf_zero.comm.process_group import gloo_connects_on_demand
from tests.support.ranks import rendezvous_url, run_ranks

CUDA = torch.device("cuda")
BOTH = "cpu:gloo,cuda:gloo"  # gloo in NCCL's place
LISTENS, RING = 1, 2  # sockets of a group
STAGE_2, STAGE_3 = {"shards_parameters": False, "by_host": False}, {"shards_parameters": True, "by_host": False}


def num_sockets() -> int:
    names = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(name).startswith("socket:") for name in names if name.is_symlink())


@contextmanager
def counted_groups() -> Iterator[Counter[str | None]]:
    """Counts the groups that this rank becomes a member of, by their backend."""
    made, new_group = Counter[str | None](), dist.new_group

    def counting(ranks: list[int], **keywords: Any) -> Any:
        made[keywords["backend"]] += dist.get_rank() in ranks
        return new_group(ranks, **keywords)

    with mock.patch.object(dist, "new_group", counting):
        yield made


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Groups for CUDA tensors connect with tensors in host memory, on gloo."""
    connect = KnownGroups.connect

    def on_cpu(known: KnownGroups, device: torch.device, used: Any) -> None:
        assert device == CUDA
        connect(known, torch.device("cpu"), used)

    with (
        mock.patch.object(KnownGroups, "connect", on_cpu),
        mock.patch.object(known_groups, "kind_of_backend", lambda backend: "cuda"),
    ):
        yield


def run_counts(rank: int, world: int) -> list[Any]:
    """For stages 2, 3 and 3 again: groups made, sockets then, and sockets added by their first use; at last, those of a
    background thread."""
    with gloo_connects_on_demand():
        dist.init_process_group(
            BOTH, init_method=rendezvous_url(), rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
    groups.hosts()  # the world's own connections
    found: list[Any] = []
    for options in (STAGE_2, STAGE_3, STAGE_3):
        before = num_sockets()
        with counted_groups() as made, as_on_an_accelerator():
            made_groups = parallel_groups(CUDA, **options)
        added = num_sockets() - before
        if options is STAGE_3:
            made_groups.gather.gather_objects(rank)
            made_groups.access.gather_objects(rank)
        assert made_groups.world.gather_objects(rank) == list(range(world))
        found.append((dict(made), added, num_sockets() - before - added))
    before = num_sockets()
    with as_on_an_accelerator():
        assert background_collectives().gather_objects(rank) == list(range(world))
    found.append(num_sockets() - before)
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_groups_and_connections_of_a_rank(world: int) -> None:
    """At stage 2 a rank made groups for gathers, accesses, facts and negotiations, each connected to all ranks; the
    gathers and negotiations are stage 3's. With about 180 ranks these were 1,024 open files, and the start failed."""
    for stage_2, stage_3, again, background in run_ranks(run_counts, world, world, init=False):
        made, added, _ = stage_2
        assert made == {"gloo": 1}, "the group of accesses"
        assert added <= LISTENS + RING, "the world's ring; accesses are not connected"
        made, added, late = stage_3
        assert made == {"gloo": 2}, "gathers and the hosts' negotiation"
        assert added <= 2 * LISTENS + 3 * RING, "gathers, accesses and the negotiation"
        assert late == 0, "everything that the stage uses was connected with the groups"
        assert again == ({}, 0, 0), "a second engine has the same groups"
        assert background <= LISTENS + RING


class FakeGroup:
    """Stands for torch's group of these ranks."""

    bound_device_id: torch.device | None = None

    def __init__(self, ranks: tuple[int, ...], backend: str | None) -> None:
        self.ranks = ranks
        self.backend = backend


def made_in_a_world_of(
    world: int, backend: str, sizes: tuple[Any, ...] = (), *, bound: bool = False, **options: bool
) -> tuple[list[FakeGroup], list[dict[str, Any]]]:
    """The groups that rank 0 of `world` makes, and the keywords of all calls; nothing is connected."""
    everyone = FakeGroup(tuple(range(world)), backend)
    everyone.bound_device_id = CUDA if bound else None
    made: list[FakeGroup] = []
    calls: list[dict[str, Any]] = []

    def new_group(ranks: list[int], **keywords: Any) -> FakeGroup | None:
        calls.append({"ranks": tuple(ranks), **keywords})
        if 0 not in ranks:
            return None
        made.append(FakeGroup(tuple(ranks), keywords["backend"]))
        return made[-1]

    class Alone(LoneCollectives):
        def __init__(self, group: FakeGroup | None = None, hosts: FakeGroup | None = None) -> None:
            ranks = everyone.ranks if group is None else group.ranks
            super().__init__()
            self.rank, self.size, self.ranks = ranks.index(0), len(ranks), ranks

        def gather_objects(self, value: object) -> list[object]:
            return [value if isinstance(value, str) else None] * self.size

    hosts = Hosts(tuple(rank // 8 for rank in range(world)))
    stand_ins: list[tuple[Any, str, Any]] = [
        (dist, "new_group", new_group),
        (type(dist.group), "WORLD", property(lambda _: everyone)),
        *((module, "get_rank", lambda *_: 0) for module in (groups, known_groups)),
        *((module, "get_world_size", lambda *_: world) for module in (groups, known_groups)),
        (known_groups, "NativeCollectives", Alone),
        (known_groups, "GatherStreamCollectives", Alone),
        (known_groups, "remember_ranks", lambda *_: None),
        (known_groups, "common_timeout", lambda: timedelta(minutes=30)),
        (known_groups, "LockstepNegotiation", mock.Mock()),
        (dist.distributed_c10d, "_get_default_store", mock.Mock()),
        (KnownGroups, "connect", lambda *_: None),
        (groups, "_worlds", {}),
        (shared_memory, "host_name", lambda: "host"),
    ]
    patches = [mock.patch.object(target, name, stand_in) for target, name, stand_in in stand_ins]
    patches += [mock.patch("hf_zero.comm.process_group.backend_name", lambda: backend)]
    patches += [mock.patch.object(known_groups, "backend_name", lambda: backend)]
    patches += [mock.patch.object(Hosts, "named", lambda names: (list(names), hosts)[1])]
    for patch in patches:
        patch.start()
    try:
        parallel_groups(CUDA, *sizes, **options)
    finally:
        for patch in reversed(patches):
            patch.stop()
    return made, calls


BACKENDS = ["cpu:gloo,cuda:nccl", "nccl"]


@pytest.mark.parametrize("world", [64, 1024])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_rank_makes_does_not_grow_with_the_world(world: int, backend: str) -> None:
    side = [] if "gloo" in backend else ["gloo"]  # the facts of steps, where the world has no half for host memory
    made, _ = made_in_a_world_of(world, backend, **STAGE_2)
    assert sorted(str(each.backend) for each in made) == sorted([*side, "nccl"])
    made, _ = made_in_a_world_of(world, backend, **STAGE_3)
    assert sorted(str(each.backend) for each in made) == sorted([*side, "gloo", "nccl", "nccl"])
    assert {len(each.ranks) for each in made} == {world}


@pytest.mark.parametrize("world", [128, 1024])
def test_hybrid_sharding_makes_a_rank_a_member_of_the_same_number(world: int) -> None:
    """States are sharded over 8 ranks: others make the groups of the other ranks."""
    made, calls = made_in_a_world_of(world, BACKENDS[0], (8,), **STAGE_3)
    shards = [each.backend for each in made if len(each.ranks) == 8]
    copies = [each.backend for each in made if len(each.ranks) == world // 8]
    assert sorted(map(str, shards)) == ["None", "gloo", "nccl", "nccl"]  # both halves, negotiation, gathers, accesses
    assert copies == [None] and len(made) == 6, "and accesses of all ranks"
    assert not any(call["use_local_synchronization"] for call in calls)


def test_collectives_of_a_device_precede_other_kernels() -> None:
    """Reductions ran at the priority of compute, which waits for them."""
    with mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), create=True):
        _, calls = made_in_a_world_of(64, BACKENDS[0], (8,), **STAGE_3)
    assert {call["backend"]: getattr(call["pg_options"], "is_high_priority_stream", None) for call in calls} == {
        "nccl": True,
        None: True,
        "gloo": None,
    }


def test_a_world_that_is_bound_to_a_device() -> None:
    """torch splits the communicator of such a world on all ranks outside a new group. Members of a gloo group split
    nothing, so that the others would wait for them forever."""
    _, calls = made_in_a_world_of(64, BACKENDS[0], (8,), bound=True, **STAGE_3)
    assert {call["use_local_synchronization"] for call in calls if call["backend"] == "gloo"} == {True}
    assert {call["use_local_synchronization"] for call in calls if call["backend"] != "gloo"} == {False}


def test_gloo_connects_on_demand_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    with gloo_connects_on_demand():
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    with gloo_connects_on_demand():
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"
