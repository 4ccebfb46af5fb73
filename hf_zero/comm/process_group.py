"""Joins the process group that a launcher describes, or runs as world size one without a launcher."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from hf_zero.device.kinds import (
    current_device,
    default_backend,
    index_of_rank,
    kind_of_backend,
    set_current_device,
    synchronize,
)
from hf_zero.network import name_gloo_interface
from hf_zero.rank_environment import find_rank_environment, set_rank_environment

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT_VARIABLE = "DEEPSPEED_TIMEOUT"  # in minutes


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
    """Join the process group of this job, or prepare the one that the program has joined for engines.

    The arguments are DeepSpeed's. RANK and WORLD_SIZE come from the arguments or from the launcher's environment, with
    `auto_mpi_discovery` also from the variables of MPI's mpirun or Slurm's srun (without mpi4py). Without any of these
    the world size is one and no port is opened. This rank's accelerator becomes the current device (`local_device`).
    `verbose` and `config` are accepted because callers pass them.

    Args:
        timeout: how long ranks wait for each other; default: DEEPSPEED_TIMEOUT minutes, or 30 minutes.

    Raises:
        ValueError: if the launcher's variables contradict each other, or this rank has no accelerator.
    """
    if is_initialized():
        prepare_process_group()
        return
    if dist_init_required is False:
        return
    if auto_mpi_discovery and rank < 0 and world_size < 1 and init_method is None:
        set_rank_environment(os.environ, distributed_port)
    rank, world_size = _place_in_world(rank, world_size)
    backend, timeout = dist_backend or default_backend(), timeout or _default_timeout()
    kind = kind_of_backend(backend)
    if kind is not None:
        # NCCL uses the current device, also for small Python objects.
        set_current_device(_device_of_rank(kind, world_size).index)
    if world_size == 1 and init_method is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        name_gloo_interface()
        with gloo_connects_on_demand() if kind_of_backend(backend) is not None else nullcontext():
            dist.init_process_group(
                backend,
                init_method=init_method,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                pg_options=first_on_device(backend, timeout),
            )
    _leave_at_exit()


def first_on_device(backend: str, timeout: timedelta) -> Any:
    """Options of a group whose collectives precede other kernels that wait for the device, as later work waits for
    them; None without NCCL."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None or "nccl" not in backend:
        return None
    options = nccl.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout
    return options


def prepare_process_group() -> None:
    """Do what engines need besides a process group, whoever has joined it. Further calls have no effect."""
    device = local_device()
    if device.type != "cpu":
        set_current_device(device.index)  # kernels are launched there
    name_gloo_interface()  # for groups that engines create, whatever the backend of all ranks
    _leave_at_exit()


def _default_timeout() -> timedelta:
    given = os.environ.get(_TIMEOUT_VARIABLE, "").strip()
    if not given:
        return dist.default_pg_timeout
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"{_TIMEOUT_VARIABLE}={given!r} is not a whole number of minutes, at least 1")
    return timedelta(minutes=int(given))


class HoldsGroups(Protocol):
    """An object that keeps references to process groups."""

    def release_groups(self) -> None:
        """Release all process groups, because the process is exiting."""


_HOLDERS: WeakSet[HoldsGroups] = WeakSet()


def releases_groups_at_exit(holder: HoldsGroups) -> None:
    _HOLDERS.add(holder)


def _leave_at_exit() -> None:
    atexit.unregister(_leave)
    atexit.register(_leave)


# Leaving at exit. Destroying a group of NCCL waits for its collectives and for the other ranks on this machine, which
# have to destroy it, too. A rank that ends alone would wait forever, and its launcher would not learn of its end:
#
#     how a rank ends                       its groups
#     by an uncaught exception              aborted at once: collectives in flight end, wherever the other ranks are
#     otherwise, together with all others   destroyed
#     otherwise, alone                      aborted once its own collectives are complete
#
# A program may exit alone with any status (Python does not tell exit handlers which): after `sys.exit(3)`, or because
# other ranks save or evaluate longer. Destroying a group of gloo waits for nobody.

_HOW = "hf_zero/leave"  # store key: how all ranks leave, `_TOGETHER` or `_ALONE`
_TOGETHER, _ALONE = b"together", b"alone"
_NUM_LEAVING, _NUM_INFORMED = "hf_zero/num_leaving", "hf_zero/num_informed"
ENDED = "hf_zero/ended"  # store key: the latest rank that has begun to leave
FAILED = "hf_zero/failed"  # store key: the latest rank with an error of its own, and the error's first line
_OTHERS_S = 3.0  # how long a rank waits for others to leave, too
_ABORT_S = 2.0  # limit for aborting groups, which may not return while collectives are in flight (seen with NCCL 2.28)
_TICK_S = 0.02


def _leave() -> None:
    if get_world_size() > 1 and not _has_failed():
        _record(ENDED, str(get_rank()))  # before connections close, so that other ranks can name this one
    # The threads of a gloo group end with the last reference to it, not when it is destroyed, and an engine that a
    # program has not destroyed outlives the interpreter. A thread that still runs while the process is being torn down
    # may abort it, if it needs the interpreter or sees a peer's connection close.
    for holder in list(_HOLDERS):
        holder.release_groups()
    _forget_default_arguments()
    if not is_initialized():
        return
    is_ours = "gloo" in backend_name()  # other programs join with NCCL only, and may still use their groups
    if not _waits_for_others():
        if is_ours:
            destroy_process_group()  # also destroys groups of other libraries, such as accelerate's
    elif _has_failed():
        _record(_HOW, _ALONE.decode())
        with _time_limit(_ABORT_S):
            _abort()
    elif is_ours:
        if _leave_together():
            destroy_process_group()
        else:
            _abort()


def _waits_for_others() -> bool:
    """Whether destroying a group waits for other ranks."""
    return kind_of_backend(backend_name()) is not None and get_world_size() > 1


def _has_failed() -> bool:
    """Whether an uncaught exception ends this process. The interpreter sets this before it calls `sys.excepthook`."""
    return getattr(sys, "last_value", None) is not None


def _leave_together() -> bool:
    """Complete this rank's collectives, then wait until all ranks leave or one decides not to wait longer. Returns
    whether all leave, which is the same on all ranks."""
    try:
        synchronize()  # slower ranks may still have to join in
        store = store_of_job()
        num_leaving, deadline = store.add(_NUM_LEAVING, 1), time.monotonic() + _OTHERS_S
        while not store.check([_HOW]):
            if num_leaving == get_world_size():
                store.compare_set(_HOW, "", _TOGETHER.decode())
            elif time.monotonic() > deadline:
                store.compare_set(_HOW, "", _ALONE.decode())
            else:
                time.sleep(_TICK_S)
                num_leaving = store.add(_NUM_LEAVING, 0)
        is_together = bool(store.get(_HOW) == _TOGETHER)
        num_informed = store.add(_NUM_INFORMED, 1)
        # The store is part of rank 0's process, so it stays until the others have read the decision.
        deadline = time.monotonic() + _OTHERS_S
        while is_together and get_rank() == 0 and num_informed < get_world_size() and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            num_informed = store.add(_NUM_INFORMED, 0)
    except RuntimeError:  # the device has failed, or rank 0 has exited
        return False
    return is_together


def _abort() -> None:
    # All groups in one call: aborting one after the other may wait for each other's kernels.
    with suppress(RuntimeError):  # the device may have failed
        dist.distributed_c10d._abort_process_group()


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Context in which this process exits with status 1 after `seconds`, even if it waits in a library."""
    with open(os.devnull, "w") as nowhere:  # stacks say nothing about the error that ends this process
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _record(key: str, value: str) -> None:
    """Tell the other ranks, without waiting for an answer: rank 0, which may hold the store, may have exited."""
    store = store_of_job()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.FileStore) and not os.path.exists(store.path):  # type: ignore[attr-defined]
        return  # it would wait for the folder to appear
    with suppress(RuntimeError):
        store_of_job().set(key, value)


def store_of_job() -> dist.Store:
    """The store of all ranks, which exists as long as their process group."""
    return dist.distributed_c10d._get_default_store()


def _forget_default_arguments() -> None:
    """Drop default arguments of torch.distributed.nn.functional that reference the group of all ranks."""
    for function in vars(sys.modules.get("torch.distributed.nn.functional", object)).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            kept = (None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__)
            function.__defaults__ = tuple(kept)


def _place_in_world(rank: int, world_size: int) -> tuple[int, int]:
    environment = {name: os.environ[name] for name in _LAUNCHER_VARIABLES if os.environ.get(name)}
    rank = rank if rank >= 0 else int(environment.get("RANK", -1))
    world_size = world_size if world_size > 0 else int(environment.get("WORLD_SIZE", -1))
    if rank < 0 and world_size in (-1, 1):
        return 0, 1
    if rank < 0 or world_size < 1 or rank >= world_size:
        raise ValueError(
            f"RANK={environment.get('RANK', 'unset')} and WORLD_SIZE={environment.get('WORLD_SIZE', 'unset')} do not "
            "describe a rank of a process group: a launcher sets both, with 0 <= RANK < WORLD_SIZE. Start the script "
            "with torchrun or accelerate launch, or unset both to run as one process."
        )
    return rank, world_size


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


@dataclass(frozen=True, slots=True)
class Process:
    """This process's rank and the world size."""

    rank: int
    size: int


def this_process() -> Process:
    """Rank and world size for programs without an engine."""
    return Process(get_rank(), get_world_size())


def get_local_rank() -> int:
    """Index of this process on its machine, from the launcher; 0 without a launcher."""
    return _given_local_rank(get_world_size()) or 0


def _given_local_rank(world_size: int) -> int | None:
    """The local rank from torchrun's variables, or from those of the mpirun or srun that has started all ranks."""
    if os.environ.get("LOCAL_RANK"):
        return int(os.environ["LOCAL_RANK"])
    found = find_rank_environment(os.environ)
    return found.local_rank if found is not None and found.world_size == world_size else None


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all ranks; None before the process group exists."""
    return dist.group.WORLD


def barrier(
    group: dist.ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None
) -> dist.Work | None:
    return dist.barrier(group, async_op, device_ids) if is_initialized() else None


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    if is_initialized():
        dist.destroy_process_group(group)


def local_device() -> torch.device:
    """The device of this rank: its accelerator if the process group can use it, else the CPU.

    The accelerator is the one that the process group is bound to, else that of the launcher's local rank, else the
    current one.

    Raises:
        ValueError: if there is no accelerator for this local rank.
    """
    kind = kind_of_backend(backend_name())
    if kind is None:
        return torch.device("cpu")
    return current_device(kind) if get_world_size() == 1 else _device_of_rank(kind, get_world_size())


def _device_of_rank(kind: str, world_size: int) -> torch.device:
    bound = getattr(dist.group.WORLD, "bound_device_id", None) if is_initialized() else None
    if bound is not None and bound.type == kind and bound.index is not None:
        return torch.device(bound)
    local_rank = _given_local_rank(world_size)
    return current_device(kind) if local_rank is None else torch.device(kind, index_of_rank(local_rank))


def common_timeout() -> timedelta:
    """The timeout of the group of all ranks, which derived groups do not inherit by themselves."""
    backend = dist.group.WORLD._get_backend(local_device()) if dist.group.WORLD is not None else None
    timeout: timedelta = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    return timeout


def backend_name() -> str:
    # The configuration string has both halves of "cpu:gloo,...:nccl"; get_backend only reports one of them.
    return str(dist.get_backend_config()) if is_initialized() else default_backend()


def backend_of(kind: str) -> str:
    """The backend for a device type in "cpu:gloo,cuda:nccl", or the only one."""
    names = dict(part.rpartition(":")[::2] for part in backend_name().split(","))
    return names.get(kind) or names.get("", backend_name())


def has_host_half() -> bool:
    """Whether the group of all ranks also exchanges tensors and objects in host memory."""
    return "gloo" in backend_name()


_GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"


@contextmanager
def gloo_connects_on_demand() -> Iterator[None]:
    """Context in which new gloo groups connect two ranks when one first sends to the other.

    Otherwise every group connects all pairs at once, and some 180 ranks with five groups reach the usual limit of 1,024
    open files. A small sum or a gather of objects runs around a ring and needs two connections. Versions of torch
    without this variable connect all pairs; a value that the user set applies.

    Groups of CPU ranks exchange gradients from rank to rank and cannot do this: the first send of a pair waits for the
    other rank to send, too, which may be waiting for this one in another group.
    """
    before = os.environ.get(_GLOO_LAZY)
    os.environ.setdefault(_GLOO_LAZY, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_GLOO_LAZY, None)
