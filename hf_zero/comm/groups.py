"""The groups of ranks of an engine, created once, and the fastest collectives over them.

Calls on different channels need not have the same order on all ranks.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.collectives import Channel, Collectives, LoneCollectives
from hf_zero.comm.mesh import Dimension, Hosts, Mesh, Partition, ShardSize, across, agreeing, consecutive, group_of
from hf_zero.comm.parts import held_part
from hf_zero.comm.process_group import get_rank, get_world_size, is_initialized, releases_groups_at_exit, this_process
from hf_zero.comm.torch_backend import NativeCollectives
from hf_zero.errors import WrongArgument

if TYPE_CHECKING:
    from hf_zero.comm.known_groups import KnownGroups
    from hf_zero.config import Resolved


def collectives_for(
    device: torch.device,
    channel: Channel = Channel.REDUCE,
    partition: Partition | None = None,
    reduced_over: Partition | None = None,
) -> Collectives:
    """The fastest collectives on `device` over this rank's group of `partition`; default: over all ranks.

    Collective at first use.

    Args:
        reduced_over: for gathers around use: the groups of concurrent gradient reductions; default: the same groups.
    """
    rank = get_rank()
    if partition is None:
        partition = (tuple(range(get_world_size())),)
    ranks = group_of(rank, partition)
    if len(ranks) == 1:
        return LoneCollectives(rank)
    known = _known()
    number = known.number_of(partition)
    collectives = known.collectives(device, channel, ranks, number)
    collectives.num_beside = sum(known.hosts.of_rank[each] == known.hosts.of_rank[rank] for each in ranks)
    if channel is Channel.GATHER:
        crosses = any(known.hosts.crossed_by(group) for group in reduced_over or partition)
        collectives.negotiation = known.negotiation(collectives, ranks, number, can_attend=not crosses)
    return collectives


def torch_group(partition: Partition) -> dist.ProcessGroup | None:
    """torch's process group of the ranks that share this rank's sequences or matrices, for programs that use it
    directly; None without a process group. Collective at first use.

    Args:
        partition: the ranks of every such group.
    """
    if not is_initialized():
        return None
    return _known().native_group(_known().number_of(partition), Channel.LAYERS)


def adopt(group: dist.ProcessGroup) -> Partition:
    """Use an existing group as the one of `torch_group`. Returns the groups of all ranks. Collective."""
    ranks = tuple(dist.get_process_group_ranks(group))
    groups = NativeCollectives().gather_objects(ranks)
    partition: Partition = tuple(dict.fromkeys(cast("list[tuple[int, ...]]", groups)))
    if sorted(rank for ranks in partition for rank in ranks) != list(range(get_world_size())):
        raise ValueError(f"groups of ranks that share sequences must be disjoint: {list(partition)}")
    known = _known()
    known.adopt(known.number_of(partition), group)
    return partition


def hosts() -> Hosts:
    """The ranks of each host. Collective at first use."""
    return Hosts.one(1) if get_world_size() == 1 else _known().hosts


def background_collectives() -> Collectives:
    """A separate group for a background thread, for small objects. Collective at first use."""
    if get_world_size() == 1:
        return LoneCollectives()
    return NativeCollectives(_known().gloo_group(0, "background"))


def watching_collectives() -> Collectives:
    """A separate group for reports about a run, whose gathers no rank waits for.
    Collective at first use."""
    if get_world_size() == 1:
        return LoneCollectives()
    return NativeCollectives(_known().gloo_group(0, "watching"))


_worlds: dict[int, KnownGroups] = {}


def _known() -> KnownGroups:
    """Groups derived from the process group of all ranks. Collective at first use."""
    from hf_zero.comm.known_groups import KnownGroups  # imported here because one rank does not need it

    key = id(dist.group.WORLD)
    if key not in _worlds:
        for replaced in _worlds.values():
            replaced.close()
        _worlds.clear()
        _worlds[key] = KnownGroups()
    return _worlds[key]


def set_timeout(timeout: timedelta) -> None:
    """Set how long ranks wait for each other, in the existing group of all ranks and in groups derived from it."""
    if not is_initialized():
        return
    change = getattr(dist.group.WORLD, "set_timeout", None)  # not in older versions of torch
    if change is not None:
        change(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout)
    for known in _worlds.values():
        if known._link is not None and known._link[0] is not None:
            known._link[0].timeout_s = timeout.total_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """The groups of a `Mesh` that this rank is in. Each is a `Collectives` with its rank and size, even for a single
    rank.

        world 8, shard 4, two hosts       rank 0 1 2 3 | 4 5 6 7
            shard of rank 1                    0 1 2 3              four shards of the states
            replicate of rank 1                  1         5        two copies of each shard

    In plain ZeRO `shard` is `world`, and `replicate` a group of one. Code queries other dimensions of the mesh by their
    properties, not by name.

    Attributes:
        mesh: of all ranks.
        world: all ranks, for agreements between all of them.
        same_weights: ranks that hold the same parts of all weights: all ranks, if none holds parts.
        shard: ranks that shard the same states; gradients are reduced and updated weights gathered here.
        replicate: ranks that hold copies of this rank's shard; reduced gradients are summed here.
        gather: ranks among which stage 3 gathers around use, on a separate channel: those of `shard` or, with hpZ,
            consecutive ranks of these, which keep all rows of a unit between them. This rank has shard number
            `across_gather.rank * gather.size + gather.rank`.
        across_gather: the ranks of `shard` with the same number in their `gather` groups, which keep the same rows:
            updated rows are gathered here. A group of one without hpZ.
        access: the ranks of `shard` on another channel, for parameters that the user gathers.
        access_copies: the ranks of `same_weights` on that channel.
        data: ranks that see different samples, which count for the batch size.
        sample: ranks that see parts of this rank's samples; a group of one if each sees whole samples.
        host, across_hosts: the ranks of `shard` on this host, and those with the same number on its other hosts. This
            rank has shard number `across_hosts.rank * host.size + host.rank`. If ranks are not ordered by host, or
            hosts have different numbers of ranks, these are `shard` itself and a group of one.
        dimensions: groups along the other dimensions, by name; see `along`.
        of_parts: the groups of parameters with separate groups, see `of`; None: no parameter has them.
    """

    mesh: Mesh
    world: Collectives
    same_weights: Collectives
    shard: Collectives
    replicate: Collectives
    gather: Collectives
    across_gather: Collectives
    access: Collectives
    access_copies: Collectives
    data: Collectives
    sample: Collectives
    host: Collectives
    across_hosts: Collectives
    dimensions: Mapping[str, Collectives] = field(default_factory=dict)
    of_parts: ParallelGroups | None = None

    def of(self, parameter: Tensor) -> ParallelGroups:
        """The groups in which the states of `parameter` are sharded, reduced and gathered."""
        part = held_part(parameter) if self.of_parts is not None else None
        return self.of_parts if self.of_parts is not None and part is not None and part.is_mixed else self

    def place_of(self, rank: int) -> tuple[int, int]:
        """(shard, part) that a global rank holds of parameters with separate groups."""
        assert self.of_parts is not None, "only called if there are some"
        return group_of(rank, self.of_parts.mesh.shard).index(rank), group_of(rank, self.mesh.mixed).index(rank)

    def along(self, name: str) -> Collectives:
        """The ranks that differ from this one along a dimension; only itself if the mesh does not have it."""
        return self.dimensions.get(name) or LoneCollectives(self._rank)

    @property
    def _rank(self) -> int:
        return self.world.ranks[self.world.rank]

    @property
    def model_rank(self) -> int:
        """The index of this rank's parts of the weights: its number among the ranks that hold all parts together."""
        return group_of(self._rank, self.mesh.whole_model).index(self._rank)

    @property
    def model_size(self) -> int:
        """Number of ranks that hold all parts of the weights together; 1: each has all."""
        return len(self.mesh.whole_model[0])

    @property
    def holds_parts(self) -> bool:
        """Whether ranks only hold parts of some parameters, at any stage."""
        return self.model_size > 1 or self.of_parts is not None

    @property
    def ranks_per_sample(self) -> int:
        """Number of ranks that see the same whole samples."""
        return self.world.size // (self.data.size * self.sample.size)

    @property
    def replica(self) -> int:
        """The index of this rank's replica."""
        copies = self.mesh.copies_beside(self._rank)
        return next(number for number, ranks in enumerate(copies) if self._rank in ranks)

    def place_beside(self, rank: int) -> int:
        """The number in `same_weights` of the rank that completes the weights of global rank `rank`."""
        beside = group_of(rank, self.mesh.whole_model)
        return next(place for place, own in enumerate(self.same_weights.ranks) if own in beside)

    def is_first_beside(self, *, per_host: bool) -> bool:
        """Whether this is the first rank with its weights, or with `per_host` the first on its host."""
        host_of = self.mesh.hosts.of_rank
        return not any(
            rank < self._rank and not (per_host and host_of[rank] != host_of[self._rank])
            for rank in self.same_weights.ranks
        )

    def is_first_copy(self, *, per_host: bool) -> bool:
        """Whether this rank's replica is the first, or with `per_host` the first on its hosts; the same on all ranks of
        a shard group."""
        if not per_host:
            return self.replica == 0
        host_of = self.mesh.hosts.of_rank
        places = [{host_of[rank] for rank in ranks} for ranks in self.mesh.copies_beside(self._rank)]
        return places[self.replica] not in places[: self.replica]


def parallel_groups(
    device: torch.device,
    shard_size: ShardSize = None,
    gather_size: ShardSize = None,
    dimensions: Sequence[Dimension] = (),
    *,
    shards_parameters: bool = True,
    by_host: bool = True,
) -> ParallelGroups:
    """Create this rank's groups for collectives on `device`, and connect those that every run of the engine uses.
    Collective. See `Mesh.of` for `shard_size`, `gather_size` and `dimensions`.

    Args:
        shards_parameters: whether the engine gathers parameters around their use (stage 3); otherwise `gather` is
            `shard`, and `access` is connected when a program first uses it.
        by_host: whether something reduces or gathers within hosts first; otherwise `host` is `shard`.

    Raises:
        ValueError: if the ranks cannot be divided like that.
    """
    mesh = Mesh.of(hosts(), shard_size, gather_size, dimensions)
    whole: Partition = (tuple(range(len(mesh.hosts.of_rank))),)
    made: dict[tuple[Partition, Channel], Collectives] = {}

    def group(partition: Partition, channel: Channel = Channel.REDUCE) -> Collectives:
        if (partition, channel) not in made:
            made[partition, channel] = collectives_for(device, channel, partition)
        return made[partition, channel]

    def apart(partition: Partition, channel: Channel = Channel.REDUCE) -> Collectives:
        """A separate group with its own send buffers."""
        return collectives_for(device, channel, partition, mesh.shard if channel is Channel.GATHER else None)

    world, shard, lone = group(whole), apart(mesh.shard), LoneCollectives(get_rank())
    groups = ParallelGroups(
        mesh=mesh,
        world=world,
        shard=shard,
        replicate=apart(mesh.replicate),
        gather=apart(mesh.gather, Channel.GATHER) if shards_parameters else shard,
        across_gather=apart(mesh.across_gather) if shards_parameters else lone,
        access=apart(mesh.shard, Channel.ACCESS),
        access_copies=apart(mesh.same_weights, Channel.ACCESS),
        dimensions={each.name: group(each.groups, Channel.LAYERS) for each in dimensions},
        sample=group(mesh.sample, Channel.LAYERS),
        same_weights=group(mesh.same_weights),
        data=group(mesh.data),
        host=apart(mesh.host) if by_host else shard,
        across_hosts=apart(mesh.across_hosts) if by_host else lone,
    )
    inner = mesh.of_parts()
    used = _used(mesh, inner, dimensions, shards_parameters=shards_parameters, by_host=by_host)
    if inner is None:
        _connect(device, whole, used)
        return groups
    assert set(inner.replicate) == set(mesh.replicate), "each replica has all parts"
    shard, across = apart(inner.shard), group(agreeing(len(whole[0]), inner.dimensions))
    of_parts = replace(
        groups,
        mesh=inner,
        same_weights=shard if inner.same_weights == inner.shard else group(inner.same_weights),
        shard=shard,
        gather=shard,
        across_gather=across,
        access=apart(inner.shard, Channel.ACCESS),
        access_copies=apart(inner.same_weights, Channel.ACCESS),
        host=shard,
        across_hosts=across,
    )
    _connect(device, whole, used)
    return replace(groups, of_parts=of_parts)


def _used(
    mesh: Mesh, inner: Mesh | None, dimensions: Sequence[Dimension], *, shards_parameters: bool, by_host: bool
) -> list[tuple[Partition, Channel]]:
    """What an engine uses in every run, in the order in which it is connected."""
    reduced = [mesh.shard, mesh.replicate, mesh.same_weights]
    reduced += [mesh.across_gather] * shards_parameters + [mesh.host, mesh.across_hosts] * by_host
    accessed = [mesh.shard, mesh.same_weights]
    if inner is not None:
        reduced += [inner.shard, inner.same_weights]
        accessed += [inner.shard, inner.same_weights]
    used = [(partition, Channel.REDUCE) for partition in reduced]
    used += [(partition, Channel.LAYERS) for partition in (*(each.groups for each in dimensions), mesh.sample)]
    if shards_parameters:
        used += [(mesh.gather, Channel.GATHER), *((partition, Channel.ACCESS) for partition in accessed)]
    return used


def _connect(device: torch.device, whole: Partition, used: Sequence[tuple[Partition, Channel]]) -> None:
    # Ranks on CPUs of one host exchange everything through shared memory, and connecting others takes no memory.
    if device.type != "cpu" and len(whole[0]) > 1:
        _known().connect(device, [(whole, Channel.REDUCE), *used])


Self = TypeVar("Self", bound="ProgramGroups")


def takes_hops(hops: Literal["auto", 1, 2], device: torch.device) -> bool:
    """Whether `in_hops` may use two; "auto": on CPUs, where they are faster for large messages."""
    return hops == 2 or (hops == "auto" and device.type == "cpu")


def in_hops(groups: ParallelGroups, hops: Literal["auto", 1, 2], device: torch.device) -> ParallelGroups:
    """`groups` with the requested number of hops in `shard`; "auto": the faster number on CPUs, else one."""
    if not takes_hops(hops, device) or groups.host.size == 1 or groups.across_hosts.size == 1:
        return groups
    from hf_zero.comm.hops import LinkSpeed, TwoHops  # only needed for several hosts

    links = None if hops == 2 else LinkSpeed()
    return replace(groups, shard=TwoHops(groups.shard, groups.host, groups.across_hosts, links))


class ProgramGroups(ABC):
    """The groups along one mesh dimension, as programs request and query them; registered in
    `hf_zero.features.DIMENSIONS`. An engine has one object per dimension.

    Attributes:
        partition: the ranks of every group.
    """

    name: ClassVar[str]  # name of the dimension
    samples: ClassVar[Literal["own", "parts", "same"]]  # see `Dimension`
    weights: ClassVar[Literal["copies", "parts", "mixed"]] = "copies"
    group_name: ClassVar[str]  # name of a group, for messages
    size_name: ClassVar[str]  # the setting of the size, for messages
    resolved_size: ClassVar[str | None] = None  # name of the size in `resolve` and `Resolved`
    _of_engines: ClassVar[list[tuple[weakref.ref[Any], ProgramGroups]]] = []

    def __init__(self, partition: Partition) -> None:
        """Collective."""
        self.partition = partition
        self._process = this_process()
        self._ranks = group_of(self._process.rank, partition)
        self._group = torch_group(partition)
        self._see_other_samples(across(partition))
        self._beside: Sequence[ProgramGroups] = (self,)
        releases_groups_at_exit(self)

    def _see_other_samples(self, partition: Partition) -> None:
        self._data_partition = partition
        self._data_ranks = group_of(self._process.rank, partition)
        self._data_group = torch_group(partition)

    def release_groups(self) -> None:
        self._group = self._data_group = None

    @classmethod
    @abstractmethod
    def given(cls: type[Self], model: Any, mpu: Any, mesh_param: Any) -> Self | None:
        """Groups of this dimension that a program passed to `initialize` or set before; None: none.
        Collective."""

    @classmethod
    def of_size(cls: type[Self], size: int, others: Sequence[Dimension] = ()) -> Self:
        """Groups of `size` consecutive ranks among those with the same place along `others`. Collective.

        Raises:
            WrongArgument: if the number of ranks is not a multiple of `size`.
        """
        world = this_process().size
        beside = agreeing(world, others)
        if size < 1 or len(beside[0]) % size:
            sizes = [size, *(len(each.groups[0]) for each in others)]
            names = [f"ranks per {cls.group_name}", *(f"ranks along {each.name}" for each in others)]
            equation = " x ".join(["data ranks", *(names if others else [cls.size_name])])
            raise WrongArgument(
                f"world size = {equation} does not hold: {world} != {' x '.join(['n', *map(str, sizes)])}; start a "
                f"multiple of {math.prod(sizes)} ranks, or give {cls.size_name} such that it holds"
            )
        return cls(tuple(group for ranks in beside for group in consecutive(ranks, size)))

    @classmethod
    def size_in(cls, resolved: Resolved) -> int:
        """The size in the config."""
        return 1 if cls.resolved_size is None else int(getattr(resolved, cls.resolved_size))

    @property
    def dimension(self) -> Dimension:
        return Dimension(name=self.name, groups=self.partition, samples=self.samples, weights=self.weights)

    @property
    def size(self) -> int:
        return len(self._ranks)

    # Queries of programs, under the names that a subclass gives to these three.

    def own_group(self) -> Any:
        """torch's process group along this dimension."""
        return self._group

    def own_size(self) -> int:
        return self.size

    def own_rank(self) -> int:
        """This rank's number in its group."""
        return self._ranks.index(self._process.rank)

    @classmethod
    @abstractmethod
    def prepare(cls: type[Self], model: Any, groups: ParallelGroups, asked: Self | None) -> None:
        """Prepare `model` for training with `asked`; None: the model does not use this dimension.
        Collective."""

    def own_part(self, batch: Any, group: Collectives) -> Any:
        """This rank's part of a loader's batch in `group`."""
        return batch

    def belong_to(self, engine: Any, beside: Sequence[ProgramGroups], mesh: Mesh) -> None:
        """Assign these groups to an engine, together with the groups `beside` (including itself). Collective."""
        self._beside = beside
        if mesh.data != self._data_partition:
            self._see_other_samples(mesh.data)
        self._of_engines.append((weakref.ref(engine), self))

    @property
    def of_all_dimensions(self) -> ProgramGroups:
        """The object of this engine that answers queries about all dimensions."""
        return self._beside[0]

    @classmethod
    def current(cls: type[Self]) -> Self | None:
        """The groups of the latest engine with this dimension; None if there is none."""
        alive = [(engine, groups) for engine, groups in ProgramGroups._of_engines if engine() is not None]
        ProgramGroups._of_engines[:] = alive
        return next((groups for _, groups in reversed(alive) if isinstance(groups, cls)), None)

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute in the other dimensions of the same engine."""
        for other in () if name.startswith("_") else self._beside:
            if hasattr(type(other), name):
                return getattr(other, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def get_data_parallel_group(self) -> Any:
        return self._data_group

    def get_data_parallel_world_size(self) -> int:
        return len(self._data_ranks)

    def get_data_parallel_rank(self) -> int:
        return self._data_ranks.index(self._process.rank)
