"""Turns offload policies into placements, and gives the updater a stager that fetches its inputs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hf_zero.comm import Collectives, Hosts
from hf_zero.config import ConfigError, OffloadOptimizer, Problem, ZeroPolicy
from hf_zero.device.cores import Cores
from hf_zero.device.registry import runtime_of
from hf_zero.grads.reducer import GradientReducer
from hf_zero.layout import ParameterSpec
from hf_zero.layout.memory import GRADIENT_BUFFERS, STREAMED_NUMEL
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.placement import (
    Placement,
    Placements,
    host_placement,
    in_memory_placement,
    pins,
    store_of_parameters,
    streamed_placement,
)
from hf_zero.offload.vector import MemoryStore, all_or_none
from hf_zero.optim import Updater
from hf_zero.optim.stager import OffloadStager

if TYPE_CHECKING:
    from hf_zero.offload.swap_store import Drive


def is_kept_elsewhere(zero: ZeroPolicy, device: torch.device) -> bool:
    """Whether parameters are offloaded, so that even a single rank gathers them in units."""
    placement = zero.offload_param
    if placement is None:
        return False
    return placement.device == "nvme" or zero.streaming is not None or runtime_of(device).has_own_memory


def trained_numel(specs: Sequence[ParameterSpec], sharding: Sharding) -> int:
    """Number of elements that a rank updates, without padding."""
    if not sharding.shards_optimizer:
        return sum(spec.numel for spec in specs)
    return sum(-(-spec.numel // (spec.world or sharding.world)) for spec in specs)


def placements_for(
    zero: ZeroPolicy, device: torch.device, collectives: Collectives, owned_numel: int, *, cuts: bool, hosts: Hosts
) -> Placements:
    """Create the placements of an engine. Collective: an unusable drive raises on all ranks.

    Args:
        collectives: of all ranks.
        owned_numel: elements that this rank updates.
        cuts: whether the optimizer can update a rank's part of a bucket in sub-groups.
        hosts: of all ranks.

    Raises:
        StorageError: on every rank, if a drive cannot be used.
    """
    threads = _update_threads(zero, device, collectives, hosts)
    on_device = _share_of_device(zero, device, collectives, threads)
    return all_or_none(lambda: _placements(zero, device, owned_numel, threads, on_device, cuts=cuts), collectives)


def _update_threads(zero: ZeroPolicy, device: torch.device, collectives: Collectives, hosts: Hosts) -> int | None:
    """Threads of an offloaded update; None: those of PyTorch.

    On a rank without an accelerator the user's number (OMP_NUM_THREADS) applies to forward, backward and the update
    alike. Otherwise it is not a choice: torchrun and `accelerate launch` set it to 1 for all ranks.
    """
    if zero.offload_optimizer is None or not runtime_of(device).has_own_memory:
        return None
    if zero.offload_threads != "auto":
        return None if zero.offload_threads == "unchanged" else zero.offload_threads
    own, host_of = Cores.here(), hosts.of_rank
    everyone = zip(collectives.gather_objects(own), collectives.ranks, strict=True)
    here = host_of[collectives.ranks[collectives.rank]]
    return own.share([cores for cores, rank in everyone if isinstance(cores, Cores) and host_of[rank] == here])


def _share_of_device(zero: ZeroPolicy, device: torch.device, collectives: Collectives, threads: int | None) -> float:
    """The share of offloaded elements that the device updates, equal on all ranks, whose buckets then complete in the
    same order. Collective if it is measured."""
    if zero.offload_optimizer is None or not runtime_of(device).has_own_memory or zero.offload_update == "cpu":
        return 0.0
    if zero.offload_update == "device":
        return 1.0
    from hf_zero.offload.update_speed import measure  # few configs need it

    own = measure(device, threads, pinned=pins(zero.offload_optimizer, device)).share_of_device
    return statistics.fmean(share for share in collectives.gather_objects(own) if isinstance(share, float))


def _placements(
    zero: ZeroPolicy,
    device: torch.device,
    owned_numel: int,
    update_threads: int | None,
    on_device: float,
    *,
    cuts: bool,
) -> Placements:
    drives, policy, rest = _open_drives(zero), zero.offload_optimizer, zero.offload_param
    longest = zero.sub_group_numel or None
    if zero.streaming is not None or on_device:
        longest = min(longest or STREAMED_NUMEL, STREAMED_NUMEL)
    far = [] if policy is None else [(_far_placement(zero, policy, device, drives), 1 - on_device)]
    if on_device:
        far.append((streamed_placement(far[0][0], device), on_device))
    return Placements(
        device,
        in_memory_placement(device),
        [(placement, share) for placement, share in far if share],
        parameters=store_of_parameters(rest, device, None if rest is None else drives.get(rest.nvme_path)),
        near_numel=0 if policy is None else owned_numel - round(owned_numel * policy.first_ratio),
        sub_group_numel=longest if cuts and policy is not None else None,
        drives=tuple(drives.values()),
        update_threads=update_threads,
    )


def _open_drives(zero: ZeroPolicy) -> dict[str | None, Drive]:
    """One drive per folder in the config."""
    drives: dict[str | None, Drive] = {}
    for policy in (zero.offload_optimizer, zero.offload_param):
        folder = None if policy is None or policy.device != "nvme" else policy.nvme_path
        if folder is not None and folder not in drives:
            from hf_zero.offload.swap_store import Drive

            drives[folder] = Drive(folder, zero.files)
    return drives


def _far_placement(
    zero: ZeroPolicy, policy: OffloadOptimizer, device: torch.device, drives: Mapping[str | None, Drive]
) -> Placement:
    drive, pinned = drives.get(policy.nvme_path), pins(policy, device)
    if zero.streaming is not None:
        from hf_zero.offload.split_masters import Recycled, SplitMasters  # few configs need it

        masters = SplitMasters() if zero.streaming.masters == "split" else MemoryStore()
        short_lived = Recycled(MemoryStore(pinned=pinned))  # gradients, which updates during backward free
        return host_placement(device, masters, None, short_lived, pinned=pinned)
    if policy.device == "cpu" or drive is None:
        store = MemoryStore(pinned=pinned)
        return host_placement(device, store, None, store, pinned=pinned)
    from hf_zero.offload.swap_store import BufferPool

    stages = 1 + policy.reads_ahead + policy.writes_behind
    sub_groups = BufferPool(limit=policy.buffer_count * stages, pinned=pinned)
    states = drive.store(drive.file("optimizer"), sub_groups, writes_first=not policy.fast_init)
    gradients = drive.store(drive.file("gradients"), BufferPool(limit=GRADIENT_BUFFERS, pinned=pinned))
    return host_placement(device, states, states, gradients, pinned=pinned)


def attach_offload(updater: Updater, reducer: GradientReducer, policy: OffloadOptimizer | None) -> None:
    """Give `updater` a stager, if anything has to be fetched, or may move to the device later.

    Raises:
        ConfigError: if buffer_count is too small for the optimizer.
    """
    is_at_hand = all(sub_group.stored is None or sub_group.stored.is_at_hand for sub_group in updater.sub_groups)
    if is_at_hand and (policy is None or policy.ratio != "auto"):
        return
    if updater.stays is not None:
        path, rule = "zero_optimization.offload_optimizer.device", f"{type(updater.optimizer).__name__} {updater.stays}"
        raise ConfigError(Problem(path, policy and policy.device, rule, 'use AdamW, or set the device to "none"'))
    updater.stager = OffloadStager(
        updater.optimizer,
        updater.sub_groups,
        lambda sub_group: reducer.buckets[sub_group.bucket].reduced.for_update(sub_group.part),
        reads_ahead=policy is None or policy.reads_ahead,
        writes_behind=policy is None or policy.writes_behind,
    )
    for sub_group in updater.sub_groups:
        names = updater.state_names(updater.optimizer.param_groups[sub_group.group]) or ()
        states = None if sub_group.stored is None else sub_group.stored.states
        if policy is not None and states is not None and states.can_fail:  # on a drive
            _check_buffers(policy, type(updater.optimizer).__name__, 1 + len(names))
        updater.stager.reserve(sub_group, names, getattr(updater.optimizer, "state_dtype", None), updater.form_of)
    for bucket in reducer.buckets:
        bucket.reduced.reserve()


def _check_buffers(policy: OffloadOptimizer, name: str, needed: int) -> None:
    if policy.buffer_count < needed:
        rule = f"{name} works on {needed} vectors at once (masters and states)"
        path = "zero_optimization.offload_optimizer.buffer_count"
        raise ConfigError(Problem(path, policy.buffer_count, rule, f"set it to {needed} or more"))
