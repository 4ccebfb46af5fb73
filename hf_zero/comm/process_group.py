"""Joins the process group that a launcher describes, or makes a world of one where there is no launcher."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from hf_zero.comm.collectives import Collectives, LoneCollectives
from hf_zero.comm.cpu.host import HostCollectives
from hf_zero.comm.cpu.meeting import connect
from hf_zero.comm.cpu.negotiation import HostNegotiation
from hf_zero.comm.cpu.point_to_point import ExchangeCollectives
from hf_zero.comm.cpu.shared_memory import SharedMemoryLink
from hf_zero.comm.dead_ranks import remember_ranks
from hf_zero.comm.lockstep import LockstepNegotiation
from hf_zero.comm.negotiation import Negotiation
from hf_zero.comm.torch_backend import NativeCollectives
from hf_zero.device.kinds import current_device, default_backend, kind_of_backend, set_current_device
from hf_zero.network import name_gloo_interface
from hf_zero.rank_environment import set_rank_environment

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of this job; does nothing when torch.distributed is already initialised.

    The arguments are DeepSpeed's. RANK and WORLD_SIZE come from the arguments or from the launcher's environment, with
    `auto_mpi_discovery` also from what MPI's mpirun or Slurm's srun have set (without mpi4py); without any of these
    this process is a world of one and opens no port. `verbose` and `config` are accepted because callers pass them.

    Raises:
        ValueError: when the launcher's variables contradict one another.
    """
    if is_initialized():
        _leave_at_exit()
        return
    if dist_init_required is False:
        return
    if auto_mpi_discovery and rank < 0 and world_size < 1 and init_method is None:
        set_rank_environment(os.environ, distributed_port)
    rank, world_size = _place_in_world(rank, world_size)
    backend = dist_backend or default_backend()
    if kind_of_backend(backend) is not None:
        set_current_device(get_local_rank())  # NCCL takes its device from here, also for small Python objects
    if world_size == 1 and init_method is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        name_gloo_interface()
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    _leave_at_exit()


def _leave_at_exit() -> None:
    # A gloo group that is still alive at exit can abort the interpreter from one of its threads; accelerate makes such
    # groups under use_cpu and leaves them.
    if "gloo" in _backend_name():
        atexit.unregister(destroy_process_group)
        atexit.register(destroy_process_group)


def _place_in_world(rank: int, world_size: int) -> tuple[int, int]:
    environment = {name: os.environ[name] for name in _LAUNCHER_VARIABLES if os.environ.get(name)}
    rank = rank if rank >= 0 else int(environment.get("RANK", -1))
    world_size = world_size if world_size > 0 else int(environment.get("WORLD_SIZE", -1))
    if rank < 0 and world_size in (-1, 1):
        return 0, 1
    if rank < 0 or world_size < 1 or rank >= world_size:
        raise ValueError(
            f"RANK={environment.get('RANK', 'unset')} and WORLD_SIZE={environment.get('WORLD_SIZE', 'unset')} do not "
            "describe a place in a process group: a launcher sets both, with 0 <= RANK < WORLD_SIZE. Start the script "
            "with torchrun or accelerate launch, or unset both to run as one process."
        )
    return rank, world_size


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """Index of this process on its machine, as the launcher gave it; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", 0))


def barrier(group: dist.ProcessGroup | None = None) -> None:
    if is_initialized():
        dist.barrier(group)


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    if is_initialized():
        dist.destroy_process_group(group)


def local_device() -> torch.device:
    """The device this rank computes on: its accelerator when the process group can use one, else the CPU."""
    kind = kind_of_backend(_backend_name())
    if kind is None:
        return torch.device("cpu")
    return current_device(kind) if get_world_size() == 1 else torch.device(kind, get_local_rank())


class Channel(IntEnum):
    """Streams of collectives that may interleave differently on different ranks; within one the order is the same."""

    REDUCE = 0  # gradients, the step, set-up
    GATHER = 1  # parameters of stage 3, gathered around their use
    ACCESS = 2  # parameters that the user gathers


def collectives_for(device: torch.device, channel: Channel = Channel.REDUCE) -> Collectives:
    """The cheapest way to do collectives on `device` over the whole world. Collective at a channel's first use."""
    if get_world_size() == 1:
        return LoneCollectives()
    remember_ranks(NativeCollectives().gather_objects)
    collectives, link = _unnegotiated(device, channel)
    if channel is Channel.GATHER:
        collectives.negotiation = _negotiation(collectives, link, host_waits=device.type == "cpu")
    return collectives


def _unnegotiated(device: torch.device, channel: Channel) -> tuple[Collectives, SharedMemoryLink | None]:
    if device.type == "cpu" and "gloo" in _backend_name():
        link = _shared_memory_link()
        return (ExchangeCollectives(channel=channel) if link is None else HostCollectives(link, channel)), link
    is_needed = channel is Channel.REDUCE and device.type != "cpu"
    hosts = _gloo_group(_host_groups) if is_needed else None
    return NativeCollectives(_native_group(channel), hosts), None


# One per process group: all engines of a process take turns in it.
_negotiations: dict[int, Negotiation] = {}


def _negotiation(collectives: Collectives, link: SharedMemoryLink | None, *, host_waits: bool) -> Negotiation:
    """What all engines on this process group share. Collective at first use."""
    key = id(dist.group.WORLD)
    if key not in _negotiations:
        _negotiations.clear()
        if link is not None:
            _negotiations[key] = HostNegotiation(get_rank(), get_world_size(), link)
        else:
            hosts = NativeCollectives(_gloo_group(_negotiation_groups))
            _negotiations[key] = LockstepNegotiation(collectives, hosts, host_waits=host_waits)
    return _negotiations[key]


# One per process group, which stays alive here so that no other one can get its id.
_links: dict[int, tuple[dist.ProcessGroup | None, SharedMemoryLink | None]] = {}


def _shared_memory_link() -> SharedMemoryLink | None:
    """The link to all ranks where they share a machine. Collective at first use."""
    world = dist.group.WORLD
    if id(world) not in _links:
        for _, link in _links.values():
            if link is not None:
                link.close()  # of a process group that has been replaced
        _links.clear()
        gather_objects = NativeCollectives().gather_objects
        timeout_s = _timeout().total_seconds()
        _links[id(world)] = world, connect(get_rank(), get_world_size(), gather_objects, timeout_s)
    return _links[id(world)][1]


def set_timeout(timeout: timedelta) -> None:
    """How long ranks wait for one another: in the group of all ranks, which exists, and in what is made of it."""
    if not is_initialized():
        return
    _set_pg_timeout(timeout)
    for _, link in _links.values():
        if link is not None:
            link.timeout_s = timeout.total_seconds()


def _timeout() -> timedelta:
    """How long the group of all ranks waits for a rank. Groups made of it would not take that over by themselves."""
    backend = dist.group.WORLD._get_backend(local_device()) if dist.group.WORLD is not None else None
    timeout: timedelta = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    return timeout


_native_groups: dict[tuple[int, Channel], dist.ProcessGroup] = {}


def _native_group(channel: Channel) -> dist.ProcessGroup | None:
    """The world for the first channel, and for each other one a group of its own with its own order of calls."""
    if channel is Channel.REDUCE:
        return None
    key = (id(dist.group.WORLD), channel)
    if key not in _native_groups:
        _native_groups[key] = dist.new_group(timeout=_timeout())
    return _native_groups[key]


def background_collectives() -> Collectives:
    """For a thread beside training: a group that nobody else calls on, for small objects. Collective at first use."""
    if get_world_size() == 1:
        return LoneCollectives()
    return NativeCollectives(_gloo_group(_background_groups))


def watching_collectives() -> Collectives:
    """For what ranks tell one another about a run: a group that nobody else calls on, whose gathers nobody waits for.
    Collective at first use."""
    if get_world_size() == 1:
        return LoneCollectives()
    return NativeCollectives(_gloo_group(_watching_groups))


def _gloo_group(known: dict[int, dist.ProcessGroup]) -> dist.ProcessGroup:
    """The one of `known` for this world. Collective at first use."""
    key = id(dist.group.WORLD)
    if key not in known:
        known[key] = dist.new_group(backend="gloo", timeout=_timeout())
        atexit.register(_end, known[key])
    return known[key]


def _end(group: dist.ProcessGroup) -> None:
    """Leave a group at exit, whatever the world's backend is: see `_leave_at_exit`."""
    if is_initialized():
        with suppress(ValueError):  # of a world that has been left already
            dist.destroy_process_group(group)


_background_groups: dict[int, dist.ProcessGroup] = {}
_negotiation_groups: dict[int, dist.ProcessGroup] = {}
_watching_groups: dict[int, dist.ProcessGroup] = {}
_host_groups: dict[int, dist.ProcessGroup] = {}  # what hosts tell each other in a step, without asking their devices


def _backend_name() -> str:
    # The configuration string keeps both halves of "cpu:gloo,...:nccl"; get_backend reports one of them only.
    return str(dist.get_backend_config()) if is_initialized() else default_backend()
