"""Groups of ranks, made once for an engine, and collectives over them, the cheapest way there is.

On channels, the orders of calls need not agree.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

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
    """The cheapest way to do collectives on `device` over this rank's group of `partition`, by default over all ranks.

    Collective at first use.

    Args:
        reduced_over: of gathers around use: the groups that gradients are reduced over meanwhile; default the same.
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
        collectives.negotiation = known.negotiation(
            collectives, ranks, number, host_waits=device.type == "cpu", can_attend=not crosses
        )
    return collectives


def torch_group(partition: Partition) -> dist.ProcessGroup | None:
    """torch's own group of those that share this rank's sequences or matrices, for programs that call it themselves;
    None without a process group. Collective at first use.

    Args:
        partition: the ranks of every such group.
    """
    if not is_initialized():
        return None
    return _known().native_group(_known().number_of(partition), Channel.LAYERS)


def adopt(group: dist.ProcessGroup) -> Partition:
    """Take a group that exists as the one of `torch_group`; returns those of all ranks. Collective."""
    ranks = tuple(dist.get_process_group_ranks(group))
    groups = NativeCollectives().gather_objects(ranks)
    partition: Partition = tuple(dict.fromkeys(cast("list[tuple[int, ...]]", groups)))
    if sorted(rank for ranks in partition for rank in ranks) != list(range(get_world_size())):
        raise ValueError(f"groups of ranks that share sequences must be disjoint: {list(partition)}")
    known = _known()
    known.adopt(known.number_of(partition), group)
    return partition


def hosts() -> Hosts:
    """Which ranks share a host. Collective at first use."""
    return Hosts.one(1) if get_world_size() == 1 else _known().hosts


def background_collectives() -> Collectives:
    """A group for a background thread alone, for small objects. Collective at first use."""
    if get_world_size() == 1:
        return LoneCollectives()
    return NativeCollectives(_known().gloo_group(0, "background"))


def watching_collectives() -> Collectives:
    """A group for reports about a run alone, whose gathers no rank waits for.
    Collective at first use."""
    if get_world_size() == 1:
        return LoneCollectives()
    return NativeCollectives(_known().gloo_group(0, "watching"))


_worlds: dict[int, KnownGroups] = {}


def _known() -> KnownGroups:
    """Groups made of the process group of all ranks. Collective at first use."""
    from hf_zero.comm.known_groups import KnownGroups  # here: one rank alone needs nothing of it

    key = id(dist.group.WORLD)
    if key not in _worlds:
        for replaced in _worlds.values():
            replaced.close()
        _worlds.clear()
        _worlds[key] = KnownGroups()
    return _worlds[key]


def set_timeout(timeout: timedelta) -> None:
    """How long ranks wait for one another: in the group of all ranks, which exists, and in what is made of it."""
    if not is_initialized():
        return
    _set_pg_timeout(timeout)
    for known in _worlds.values():
        if known._link is not None and known._link[0] is not None:
            known._link[0].timeout_s = timeout.total_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """The groups of a `Mesh` that this rank is in. Each is a `Collectives` with its rank and size, also one of a single
    rank.

        world 8, shard 4, two hosts       rank 0 1 2 3 | 4 5 6 7
            shard of rank 1                    0 1 2 3              four shards of the states
            replicate of rank 1                  1         5        two copies of each shard

    Plain ZeRO is shard = world, with groups of one to replicate in. What other dimensions the mesh has is asked by what
    is true of their ranks.

    Attributes:
        mesh: of all ranks.
        world: all ranks: what must be the same everywhere is agreed on here.
        same_weights: ranks that hold the same parts of all weights: all, where none holds parts.
        shard: ranks that hold shards of the same states; gradients are reduced here, updated weights gathered.
        replicate: ranks that hold copies of this rank's shard; reduced gradients are summed here.
        gather: ranks among which stage 3 gathers around use, on a channel of their own: those of `shard`, or with hpZ
            consecutive ones of these, which keep all rows of a unit between them. Shard number
            `across_gather.rank * gather.size + gather.rank` is this rank's.
        across_gather: the ranks of `shard` with the same place in their `gather` groups, which keep the same rows:
            updated ones are gathered here. A group of one without hpZ.
        access: the ranks of `shard` on another channel, for parameters that the user gathers.
        access_copies: those of `same_weights` on that channel.
        data: ranks of which each sees other samples: these count for the batch size.
        sample: ranks that see parts of this one's samples; a group of one where each sees whole ones.
        host, across_hosts: the ranks of `shard` on this host, and those with the same place on its other hosts: shard
            number `across_hosts.rank * host.size + host.rank` is this rank's. Where ranks do not stand host by host, or
            hosts have different numbers of them, `shard` itself and a group of one.
        dimensions: along the dimensions beside those of the states, by name; see `along`.
        of_parts: those of the parameters that have groups of their own, see `of`; None: no parameter has.
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
        """Which shard, and of which part, a rank of the world holds of parameters with groups of their own."""
        assert self.of_parts is not None, "only asked where there are some"
        mesh = self.of_parts.mesh
        return group_of(rank, mesh.shard).index(rank), group_of(rank, mesh.whole_model).index(rank)

    def along(self, name: str) -> Collectives:
        """The ranks that differ from this one along a dimension; itself alone where the mesh has none of that name."""
        return self.dimensions.get(name) or LoneCollectives(self._rank)

    @property
    def _rank(self) -> int:
        return self.world.ranks[self.world.rank]

    @property
    def model_rank(self) -> int:
        """Which parts of the weights this rank holds: its number among the ranks that hold all of them together."""
        return group_of(self._rank, self.mesh.whole_model).index(self._rank)

    @property
    def model_size(self) -> int:
        """Ranks that hold all parts of the weights together; 1: each has all."""
        return len(self.mesh.whole_model[0])

    @property
    def holds_parts(self) -> bool:
        """Whether there are parameters of which a rank holds a part at most, at any stage."""
        return self.model_size > 1 or self.of_parts is not None

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that see the same samples, whole."""
        return self.world.size // (self.data.size * self.sample.size)

    @property
    def replica(self) -> int:
        """Number of this rank's copy of the states."""
        copies = self.mesh.copies_beside(self._rank)
        return next(number for number, ranks in enumerate(copies) if self._rank in ranks)

    def place_beside(self, rank: int) -> int:
        """In `same_weights`, that of the one which holds the rest of the weights together with `rank` of the world."""
        beside = group_of(rank, self.mesh.whole_model)
        return next(place for place, own in enumerate(self.same_weights.ranks) if own in beside)

    def is_first_beside(self, *, per_host: bool) -> bool:
        """Whether no rank before this one has the same weights, or with `per_host` none on its host."""
        host_of = self.mesh.hosts.of_rank
        return not any(
            rank < self._rank and not (per_host and host_of[rank] != host_of[self._rank])
            for rank in self.same_weights.ranks
        )

    def is_first_copy(self, *, per_host: bool) -> bool:
        """Whether this rank's copy of the states is the first, or with `per_host` the first that lies on its hosts;
        the same on all ranks of a shard group."""
        if not per_host:
            return self.replica == 0
        host_of = self.mesh.hosts.of_rank
        places = [{host_of[rank] for rank in ranks} for ranks in self.mesh.copies_beside(self._rank)]
        return places[self.replica] not in places[: self.replica]

    @classmethod
    def plain(cls, channels: Mapping[Channel, Collectives], hosts: Hosts | None = None) -> ParallelGroups:
        """All ranks hold shards of the same states. `channels`: all ranks; `hosts`: default, all on one."""
        world, access = channels[Channel.REDUCE], channels[Channel.ACCESS]
        lone = LoneCollectives(world.ranks[world.rank])
        return cls(
            mesh=Mesh.of(hosts or Hosts.one(world.size)),
            world=world,
            same_weights=world,
            shard=world,
            replicate=lone,
            gather=channels[Channel.GATHER],
            across_gather=lone,
            access=access,
            access_copies=access,
            data=world,
            sample=lone,
            host=world,
            across_hosts=lone,
        )


def parallel_groups(
    device: torch.device,
    shard_size: ShardSize = None,
    gather_size: ShardSize = None,
    dimensions: Sequence[Dimension] = (),
) -> ParallelGroups:
    """The groups of this rank, for collectives on `device`. Collective. The other arguments are those of `Mesh.of`.

    Raises:
        ValueError: when the ranks cannot be cut like that.
    """
    mesh = Mesh.of(hosts(), shard_size, gather_size, dimensions)
    whole: Partition = (tuple(range(len(mesh.hosts.of_rank))),)
    made: dict[tuple[Partition, Channel], Collectives] = {}

    def group(partition: Partition, channel: Channel = Channel.REDUCE) -> Collectives:
        if (partition, channel) not in made:
            made[partition, channel] = collectives_for(device, channel, partition)
        return made[partition, channel]

    def apart(partition: Partition, channel: Channel = Channel.REDUCE) -> Collectives:
        """A separate group, with send buffers of its own."""
        return collectives_for(device, channel, partition, mesh.shard if channel is Channel.GATHER else None)

    groups = ParallelGroups(
        mesh=mesh,
        world=group(whole),
        shard=apart(mesh.shard),
        replicate=apart(mesh.replicate),
        gather=apart(mesh.gather, Channel.GATHER),
        across_gather=apart(mesh.across_gather),
        access=apart(mesh.shard, Channel.ACCESS),
        access_copies=apart(mesh.same_weights, Channel.ACCESS),
        dimensions={each.name: group(each.groups, Channel.LAYERS) for each in dimensions},
        sample=group(mesh.sample, Channel.LAYERS),
        same_weights=group(mesh.same_weights),
        data=group(mesh.data),
        host=apart(mesh.host),
        across_hosts=apart(mesh.across_hosts),
    )
    inner = mesh.of_parts()
    if inner is None:
        return groups
    assert set(inner.replicate) == set(mesh.replicate), "each copy of the states has all parts"
    shard, lone = apart(inner.shard), group(agreeing(len(whole[0]), inner.dimensions))
    of_parts = replace(
        groups,
        mesh=inner,
        same_weights=shard if inner.same_weights == inner.shard else group(inner.same_weights),
        shard=shard,
        gather=shard,
        across_gather=lone,
        access=apart(inner.shard, Channel.ACCESS),
        access_copies=apart(inner.same_weights, Channel.ACCESS),
        host=shard,
        across_hosts=lone,
    )
    return replace(groups, of_parts=of_parts)


Self = TypeVar("Self", bound="ProgramGroups")


def in_hops(groups: ParallelGroups, hops: Literal["auto", 1, 2], device: torch.device) -> ParallelGroups:
    """`groups`, whose `shard` takes as many hops as are wanted; "auto": on CPUs as many as are faster, else one."""
    if hops == 1 or groups.host.size == 1 or groups.across_hosts.size == 1 or (hops == "auto" and device.type != "cpu"):
        return groups
    from hf_zero.comm.hops import Links, TwoHops  # for several hosts alone

    links = None if hops == 2 else Links()
    return replace(groups, shard=TwoHops(groups.shard, groups.host, groups.across_hosts, links))


class ProgramGroups(ABC):
    """Ranks along one dimension of a mesh, as programs ask for them and query them; registered in
    `hf_zero.features.DIMENSIONS`. An engine with several has one object of each.

    Attributes:
        partition: the ranks of every group.
    """

    name: ClassVar[str]  # of the dimension
    samples: ClassVar[Literal["own", "parts", "same"]]  # see `Dimension`
    weights: ClassVar[Literal["copies", "parts", "mixed"]] = "copies"
    group_name: ClassVar[str]  # of ranks along it, for people
    size_name: ClassVar[str]  # where a program sets the size, for messages
    resolved_size: ClassVar[str | None] = None  # what the config calls the size, in `resolve` and `Resolved`
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
        """Groups of this dimension from a program, in the arguments of `initialize` or before; None: none.
        Collective."""

    @classmethod
    def of_size(cls: type[Self], size: int, others: Sequence[Dimension] = ()) -> Self:
        """Groups of `size` consecutive ranks of those that have the same place along `others`. Collective.

        Raises:
            WrongArgument: the number of ranks is no multiple of `size`.
        """
        world = this_process().size
        beside = agreeing(world, others)
        if size < 1 or len(beside[0]) % size:
            raise WrongArgument(
                f"world size = data ranks x {cls.size_name} does not hold: {world} != n x {size}; start a multiple of "
                f"{size} ranks, or take a size that divides {world}"
            )
        return cls(tuple(group for ranks in beside for group in consecutive(ranks, size)))

    @classmethod
    def size_in(cls, resolved: Resolved) -> int:
        """What the config says."""
        return 1 if cls.resolved_size is None else int(getattr(resolved, cls.resolved_size))

    @property
    def dimension(self) -> Dimension:
        return Dimension(name=self.name, groups=self.partition, samples=self.samples, weights=self.weights)

    @property
    def size(self) -> int:
        return len(self._ranks)

    # What programs ask for, by the names that a subclass gives these three.

    def own_group(self) -> Any:
        """torch's group of the ranks along it."""
        return self._group

    def own_size(self) -> int:
        return self.size

    def own_rank(self) -> int:
        """This rank's place among them."""
        return self._ranks.index(self._process.rank)

    @classmethod
    @abstractmethod
    def prepare(cls: type[Self], model: Any, groups: ParallelGroups, asked: Self | None) -> None:
        """Make `model`, which is about to train, what `asked` says; None: it has nothing to do with this dimension.
        Collective."""

    def own_part(self, batch: Any, group: Collectives) -> Any:
        """The part of a loader's batch that this rank of `group` sees."""
        return batch

    def belong_to(self, engine: Any, beside: Sequence[ProgramGroups], mesh: Mesh) -> None:
        """Belong to this engine, with the groups `beside`, itself among them. Collective."""
        self._beside = beside
        if mesh.data != self._data_partition:
            self._see_other_samples(mesh.data)
        self._of_engines.append((weakref.ref(engine), self))

    @property
    def of_all_dimensions(self) -> ProgramGroups:
        """The one of this engine's that answers for all."""
        return self._beside[0]

    @classmethod
    def current(cls: type[Self]) -> Self | None:
        """Those of the latest engine that has some; None: there is none."""
        alive = [(engine, groups) for engine, groups in ProgramGroups._of_engines if engine() is not None]
        ProgramGroups._of_engines[:] = alive
        return next((groups for _, groups in reversed(alive) if isinstance(groups, cls)), None)

    def __getattr__(self, name: str) -> Any:
        """An attribute of another dimension of the same engine."""
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
