"""Bytes of one rank by kind and place, except activations. Integers only, no torch.

    kind         bytes                                                          place
    parameters   stages 0-2: whole buckets                                      device
                 stage 3: rows; persistent units also whole                     that of the rows; device
    optimizer    owned * (master + states)                                      that of the bucket
    gradients    owned sums                                                     that of the bucket
                 stages 0 and 1 with accumulation: whole local gradients too    device
    gathered     stage 3: units in use, prefetched or kept                      device
    buffers      reductions, gathers, copies between device and host, drives    device or host

The start block describes the existing store of an engine, the check before allocation the specs of parameters, and
`plan` the layout of a model without weights. All are read here. On a device without its own memory, `HOST` is `DEVICE`
(`place_of`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, BUFFERS = "gathered", "buffers"
DEVICE, HOST, DISK = "device", "host", "disk"

Sizes = Counter[tuple[str, str]]
"""(kind, place) -> bytes of one rank."""

FP32_BYTES = 4
GRADIENT_BUFFERS = 3  # bucket buffers with a drive: two being reduced, one being written
STREAMED_NUMEL = 1 << 23  # maximum sub-group whose masters are joined for the update, or stream through the device
AT_ONCE = 3  # minimum parameter shards in memory: one in use, one being fetched, one being written
STAGING_BUFFERS = 3  # for rows, and for weights updated on the host
STREAMED_SUB_GROUPS = 3  # during an update on the device: one coming, one in use, one leaving
SUMS_IN_FLIGHT = 2  # while updates run during backward: one being reduced, one being applied
RESULTS = 2  # reduced buckets that are being copied from the device to host memory
SPARE = 0.05  # fraction of a device that "auto" leaves free: for larger batches than the first, and fragments
OWN_STEP_BYTES = 12  # per element of a device's update by the optimizer's own step: scaled gradient, two temporaries


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSizes:
    """One bucket of trained parameters.

    Attributes:
        numel, owned: elements, and those that this rank updates.
        weight: bytes per element of the weights.
        master: bytes per element of separate masters; 0: the weights are the masters.
        states: bytes per element of all optimizer states together; a fraction with scales per block.
        summed, sent: bytes per element of a reduced gradient, and of the gradient in a collective.
        place: place of masters, states and reduced gradients.
    """

    numel: int
    owned: int
    weight: int
    master: int
    states: float
    summed: int
    sent: int
    place: str = DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """One unit of stage 3, in bytes.

    Attributes:
        row: this rank's shard.
        stored: place -> bytes of the rows that the rank keeps (with hpZ more than its own).
        whole: the gathered unit.
        is_persistent: it stays gathered.
        is_direct: gathers write it where it is used.
    """

    row: int
    stored: Mapping[str, int]
    whole: int
    is_persistent: bool = False
    is_direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """What one rank stores and sends.

    Attributes:
        other_weights: bytes of weights in no bucket or unit: frozen ones below stage 3.
        ranks: number of ranks that share the states.
        separate: the device has its own memory; otherwise it uses the host's.
        shards_states: ranks own a part of each bucket.
        keeps_local: whole gradients of a rank are accumulated before their reduction.
        accumulates: an update has several micro-batches.
        keeps_sums: reduced gradients are kept until the step; otherwise updates during backward free them.
        send_buffers: maximum number of buffers of reductions in flight.
        sub_group_numel: maximum elements of a sub-group; 0: the whole bucket.
        state_vectors: vectors of a sub-group's length in host memory, for states on a drive.
        streamed_numel: maximum elements of a sub-group that streams through the device for its update; 0: none does.
        joined_numel: maximum elements of a sub-group whose masters are joined for its update; 0: masters are whole.
        row_buffers: number of buffers for rows on a drive, unless these exceed `row_buffer_numel` elements in total.
        ahead: bytes of receive buffers filled by gathers ahead; at least one unit's, if that needs one.
    """

    buckets: Sequence[BucketSizes]
    units: Sequence[UnitSizes] = ()
    other_weights: int = 0
    ranks: int = 1
    separate: bool = True
    shards_states: bool = False
    keeps_local: bool = False
    accumulates: bool = False
    keeps_sums: bool = True
    send_buffers: int = 0
    sub_group_numel: int = 0
    state_vectors: int = 0
    streamed_numel: int = 0
    joined_numel: int = 0
    row_buffers: int = 0
    row_buffer_numel: int = 0
    ahead: int = 0

    @property
    def host(self) -> str:
        return place_of("cpu", self.separate)


def place_of(device: str | None, separate: bool) -> str:
    """The place that a config's `device` names; None or "none": the model's device."""
    if device == "nvme":
        return DISK
    return HOST if device == "cpu" and separate else DEVICE


def within(numels: Iterable[int], limit: int) -> list[bool]:
    """Which vectors a store capped at `limit` elements has: each for which there is still room."""
    chosen, left = [], limit
    for numel in numels:
        chosen.append(numel <= left)
        left -= numel if chosen[-1] else 0
    return chosen


def parameter_sizes(rank: RankSizes) -> Sizes:
    sizes = Sizes({(PARAMETERS, DEVICE): rank.other_weights})
    if not rank.units:
        sizes[PARAMETERS, DEVICE] += sum(bucket.numel * bucket.weight for bucket in rank.buckets)
    for unit in rank.units:
        for place, num_bytes in unit.stored.items():
            sizes[PARAMETERS, place] += num_bytes
        sizes[PARAMETERS, DEVICE] += unit.whole if unit.is_persistent else 0
    return +sizes


def optimizer_sizes(rank: RankSizes) -> Sizes:
    sizes = Sizes()
    for bucket in rank.buckets:
        sizes[OPTIMIZER, bucket.place] += round(bucket.owned * (bucket.master + bucket.states))
    return +sizes


def gradient_sizes(rank: RankSizes) -> Sizes:
    """Gradients at the end of backward. On the device a sum and the local gradients that it is made of take turns."""
    sizes = Sizes()
    for bucket in rank.buckets if rank.keeps_sums else ():
        if rank.keeps_local:
            sizes[GRADIENTS, DEVICE] += bucket.numel * bucket.summed
        if not rank.keeps_local or bucket.place != DEVICE:
            sizes[GRADIENTS, bucket.place] += bucket.owned * bucket.summed
    return +sizes


def bytes_near(bucket: BucketSizes, *, in_update: int = 0) -> int:
    """Bytes of a bucket's masters, states and gradients in the memory of its update.

    Args:
        in_update: further bytes per element that the update needs.
    """
    return math.ceil(bucket.owned * (bucket.master + bucket.states + bucket.summed + in_update))


def room_beside(total: int, peak: int) -> int:
    """Bytes of a device of `total` bytes that are left beside the peak of training so far."""
    return total - peak - math.ceil(total * SPARE)


def near_on_all(everyone: Iterable[tuple[int, Sequence[int]]]) -> list[bool]:
    """Which buckets stay on the device of every rank, first come, first served.

    Args:
        everyone: for each rank its room, and the bytes of each bucket.
    """
    rooms, sizes = zip(*everyone, strict=True)
    return within((max(each) for each in zip(*sizes, strict=True)), min(rooms))


def gathered_at_most(rank: RankSizes, kept_bytes: int) -> int:
    """Bytes of gathered units: the one in use, the next, and those kept or prefetched within `kept_bytes`."""
    whole = [unit.whole for unit in rank.units if not unit.is_persistent]
    return min(sum(whole), 2 * max(whole, default=0) + kept_bytes)


def buffer_sizes(rank: RankSizes) -> Sizes:
    """Buffers in forward and backward, except receive buffers of gathers."""
    sizes = Sizes()
    far = [bucket for bucket in rank.buckets if bucket.place != DEVICE]
    if rank.ranks > 1:
        sent = (bucket.numel * bucket.sent for bucket in rank.buckets if not _is_reduced_in_place(bucket, rank))
        sizes[BUFFERS, DEVICE] += rank.send_buffers * max(sent, default=0)
    if rank.ranks > 1 and rank.shards_states and not (rank.units or rank.separate):  # gathers from shared memory
        sizes[BUFFERS, DEVICE] += max((bucket.owned * bucket.sent for bucket in rank.buckets), default=0)
    if rank.separate:
        leaving = max((bucket.owned * bucket.sent for bucket in far), default=0)
        on_drive = any(bucket.place == DISK for bucket in far)
        one_by_one = rank.units and rank.ranks == 1 and not rank.accumulates and not on_drive  # no copy of the bucket
        sizes[BUFFERS, DEVICE] += 0 if one_by_one else RESULTS * leaving
        sizes[BUFFERS, rank.host] += (RESULTS + STAGING_BUFFERS) * leaving
        elsewhere = (sum(n for place, n in unit.stored.items() if place != DEVICE) for unit in rank.units)
        sizes[BUFFERS, DEVICE] += STAGING_BUFFERS * max(elsewhere, default=0)
    written = max((bucket.owned * bucket.summed for bucket in far if bucket.place == DISK), default=0)
    sizes[BUFFERS, rank.host] += GRADIENT_BUFFERS * written
    if not rank.keeps_sums:
        for place in {bucket.place for bucket in rank.buckets}:
            sums = [bucket.owned * bucket.summed for bucket in rank.buckets if bucket.place == place]
            sizes[BUFFERS, place] += SUMS_IN_FLIGHT * max(sums)
    joined = max((min(bucket.owned, rank.joined_numel) for bucket in rank.buckets), default=0)
    sizes[BUFFERS, rank.host] += FP32_BYTES * joined  # `SplitMaster.take`: not before the update
    sizes[BUFFERS, rank.host] += _row_buffers(rank)
    return +sizes


def _is_reduced_in_place(bucket: BucketSizes, rank: RankSizes) -> bool:
    """On CPUs gradients that are reduced in place also go through shared memory."""
    return rank.separate and bucket.sent == bucket.summed and (rank.keeps_local or not rank.shards_states)


def _row_buffers(rank: RankSizes) -> int:
    if not any(DISK in unit.stored for unit in rank.units):
        return 0
    longest = max(unit.stored.get(DISK, 0) for unit in rank.units)
    itemsize = max(bucket.weight for bucket in rank.buckets) if rank.buckets else FP32_BYTES
    return max(min(rank.row_buffer_numel * itemsize, rank.row_buffers * longest), AT_ONCE * longest)


def receive_buffers(rank: RankSizes) -> int:
    """Bytes of buffers on the device that gathers write to, for the current unit and those ahead; on CPUs in shared
    memory."""
    row = max((unit.row for unit in rank.units if not (unit.is_persistent or unit.is_direct)), default=0)
    if rank.ranks == 1 or not row:
        return 0
    return rank.ranks * row + max(rank.ranks * row, rank.ahead) if rank.separate else 2 * row


def update_buffers(rank: RankSizes) -> Sizes:
    """Buffers that only an update has: in host memory for masters and states on a drive, and on the device for masters,
    states and gradients that stream through it."""
    longest = max((bucket.owned for bucket in rank.buckets if bucket.place == DISK), default=0)
    sizes = Sizes()
    sizes[BUFFERS, rank.host] = FP32_BYTES * min(rank.sub_group_numel or longest, longest) * rank.state_vectors
    # Weights that are stored elsewhere come and leave, too.
    is_stored_elsewhere = any(place != DEVICE for unit in rank.units for place in unit.stored)
    streamed = (
        min(bucket.owned, rank.streamed_numel)
        * (bucket.master + bucket.states + bucket.summed + is_stored_elsewhere * bucket.weight)
        for bucket in rank.buckets
        if bucket.place != DEVICE
    )
    sizes[BUFFERS, DEVICE] += round(STREAMED_SUB_GROUPS * max(streamed, default=0))
    return +sizes
