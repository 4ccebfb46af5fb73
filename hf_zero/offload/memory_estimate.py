"""Compares the memory that an engine with offload needs with what is available, before allocation."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_zero.comm import MAX_SEND_BUFFERS, Collectives
from hf_zero.config import ZeroPolicy
from hf_zero.device.host_memory import disk_available, host_available
from hf_zero.device.registry import runtime_of
from hf_zero.layout import ParameterSpec
from hf_zero.layout.memory import (
    DEVICE,
    DISK,
    FP32_BYTES,
    HOST,
    PARAMETERS,
    STREAMED_NUMEL,
    BucketSizes,
    RankSizes,
    Sizes,
    UnitSizes,
    buffer_sizes,
    gradient_sizes,
    optimizer_sizes,
    parameter_sizes,
    place_of,
    update_buffers,
    within,
)
from hf_zero.layout.sharding import Sharding
from hf_zero.log import log_dist
from hf_zero.precision import Precision

_HINTS = {
    "host memory": "use more ranks, device nvme, a smaller sub_group_size, or a larger limit of memory",
    "device memory": "use more ranks, a ratio nearer to 1, or offload_param",
    "disk": "free some space, name another nvme_path, or use more ranks",
}


class DoesNotFit(RuntimeError):
    """Raised if the states do not fit in the memory that the config assigns to them."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that one rank needs in addition to the existing model."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes that determine the memory needs, besides the parameters.

    Attributes:
        num_states: state values of the optimizer per element.
        stored_bytes: bytes per element of states with their own storage format.
        longest: elements of the largest bucket that is reduced (and at stage 3 gathered) in one collective.
        accumulates: whether an update has several micro-batches.
        keeps_gradients: whether all gradients are kept until the step; otherwise updates during backward free them.
    """

    num_states: int
    longest: int
    precision: Precision
    stored_bytes: float = 0.0
    accumulates: bool = False
    keeps_gradients: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesByPolicy:
    """Converts what is known of buckets and units to `hf_zero.layout.memory`, by an engine's policies.

    Attributes:
        separate: whether the device has its own memory.
        num_states, stored_bytes: as in `StateSizes`.
    """

    zero: ZeroPolicy
    precision: Precision
    separate: bool
    num_states: int
    stored_bytes: float

    @property
    def far(self) -> str:
        """The place of offloaded masters, states and reduced gradients."""
        policy = self.zero.offload_optimizer
        return DEVICE if policy is None else place_of(policy.device, self.separate)

    def places(self, owned: Sequence[int], *, is_flat: bool) -> list[str]:
        """The place of each bucket's states, by the elements that this rank owns (`Placements.next`).

        Args:
            is_flat: whether the buckets are those of flat parameters, which are in the order of backward.
        """
        policy = self.zero.offload_optimizer
        ratio = 0.0 if policy is None else policy.first_ratio
        in_order = slice(None, None, -1 if is_flat else 1)
        stay = within(owned[in_order], sum(owned) - round(sum(owned) * ratio))
        return [DEVICE if stays else self.far for stays in stay[in_order]]

    def row_places(self, numels: Sequence[int]) -> list[str]:
        """The place of each part's rows, by their elements (`CappedStore`)."""
        policy = self.zero.offload_param
        if policy is None or policy.device != "nvme":
            return [DEVICE if policy is None else place_of(policy.device, self.separate)] * len(numels)
        return [place_of("cpu" if is_in else "nvme", self.separate) for is_in in within(numels, policy.max_in_cpu)]

    def needs_master(self, dtype: str, weights_at: str, place: str) -> bool:
        """Whether masters are separate: of another dtype, or because the update cannot reach the weights."""
        own = getattr(torch, dtype)
        return self.precision.master_dtype(own) != own or any(weights_at != each for each in self._works_at(place))

    def _works_at(self, place: str) -> list[str]:
        """Where states at `place` are updated. Which of several it will be is not known beforehand."""
        on_host = place_of("cpu", self.separate)
        if place == DEVICE or not self.separate:
            return [on_host if place == DISK else place]
        return {"cpu": [on_host], "device": [DEVICE], "both": [on_host, DEVICE]}[self.zero.offload_update]

    def bucket(self, dtype: str, numel: int, owned: int, *, place: str, has_master: bool) -> BucketSizes:
        """A bucket of parameters of `dtype`."""
        own, streaming = getattr(torch, dtype), self.zero.streaming
        master = self.precision.master_dtype(own).itemsize
        state = master if self.precision.low_precision_states else FP32_BYTES
        if streaming is not None:
            master, state = streaming.master_bytes(own.itemsize, master), streaming.state_bytes(state)
        return BucketSizes(
            numel=numel,
            owned=owned,
            weight=own.itemsize,
            master=master if has_master else 0,
            states=self.num_states * state + self.stored_bytes,
            summed=self.precision.accumulation_dtype(own).itemsize,
            sent=self.precision.communication_dtype(own).itemsize,
            place=place,
        )

    def rank(
        self,
        buckets: Sequence[BucketSizes],
        units: Sequence[UnitSizes],
        sharding: Sharding,
        *,
        accumulates: bool,
        keeps_sums: bool,
        other_weights: int = 0,
        ahead: int = 0,
        is_limit: bool = False,
    ) -> RankSizes:
        """`is_limit`: count the buffers that a slow drive may need; otherwise those of an update."""
        states, rows, streaming = self.zero.offload_optimizer, self.zero.offload_param, self.zero.streaming
        vectors = 0
        if states is not None and states.device == "nvme":
            asked = states.buffer_count if is_limit else min(states.buffer_count, 1 + self.num_states)
            vectors = asked * (1 + states.reads_ahead + states.writes_behind)
        joins = streaming is not None and streaming.masters == "split"
        streams = self.separate and states is not None and self.zero.offload_update != "cpu"
        chunk = min(self.zero.sub_group_numel or STREAMED_NUMEL, STREAMED_NUMEL)
        return RankSizes(
            buckets=buckets,
            units=units,
            other_weights=other_weights,
            ranks=sharding.world,
            separate=self.separate,
            shards_states=sharding.shards_optimizer,
            keeps_local=accumulates and not sharding.shards_gradients,
            accumulates=accumulates,
            keeps_sums=keeps_sums,
            send_buffers=MAX_SEND_BUFFERS,
            sub_group_numel=self.zero.sub_group_numel,
            state_vectors=vectors,
            streamed_numel=chunk if streams else 0,
            joined_numel=chunk if joins else 0,
            row_buffers=0 if rows is None else rows.buffer_count,
            row_buffer_numel=0 if rows is None else rows.buffer_numel,
            ahead=ahead,
        )


def estimate_memory(
    specs: Sequence[ParameterSpec], zero: ZeroPolicy, sharding: Sharding, device: torch.device, sizes: StateSizes
) -> MemoryEstimate:
    """Estimate masters, optimizer states, gradients and buffers; at stage 3 also parameters that are not stored on the
    device, and second shards of trained parameters."""
    separate = runtime_of(device).has_own_memory
    policies = SizesByPolicy(
        zero=zero,
        precision=sizes.precision,
        separate=separate,
        num_states=sizes.num_states,
        stored_bytes=sizes.stored_bytes,
    )
    parts = list(_cut(specs, sharding, sizes.longest))
    places = policies.places([owned for *_, owned in parts], is_flat=not sharding.shards_parameters)
    rows_at = [DEVICE] * len(parts)
    if sharding.shards_parameters:
        rows_at = policies.row_places([owned * sharding.kept_rows for *_, owned in parts])
    buckets, units = [], []
    for (dtype, numel, owned), place, row_at in zip(parts, places, rows_at, strict=True):
        has_master = policies.needs_master(dtype, row_at, place)
        bucket = policies.bucket(dtype, numel, owned, place=place, has_master=has_master)
        row = owned * bucket.weight
        buckets.append(bucket)
        units.append(UnitSizes(row=row, stored={row_at: row * sharding.kept_rows}, whole=numel * bucket.weight))
    rank = policies.rank(
        buckets,
        units if sharding.shards_parameters else (),
        sharding,
        accumulates=sizes.accumulates,
        keeps_sums=sizes.keeps_gradients,
        is_limit=True,
    )
    needed = parameter_sizes(rank) + optimizer_sizes(rank) + gradient_sizes(rank) + buffer_sizes(rank)
    exists = sum(unit.row for unit in rank.units if DEVICE in unit.stored)
    needed[PARAMETERS, DEVICE] -= exists if rank.units else needed[PARAMETERS, DEVICE]
    needed += update_buffers(rank)
    device_total, host, disk = (_total(needed, place) for place in (DEVICE, HOST, DISK))
    return MemoryEstimate(device_total if separate else 0, host if separate else device_total, disk)


def _cut(specs: Sequence[ParameterSpec], sharding: Sharding, longest: int) -> Iterator[tuple[str, int, int]]:
    """Yield (dtype, elements, owned elements) of buckets of up to `longest` elements, without padding."""
    totals = Counter[tuple[str, int]]()
    for spec in specs:
        totals[spec.dtype, spec.world or sharding.world] += spec.numel
    for (dtype, world), left in totals.items():
        parts = world if sharding.shards_optimizer else 1
        for start in range(0, left, max(1, longest)):
            numel = min(max(1, longest), left - start)
            yield dtype, numel, -(-numel // parts)


def _total(sizes: Sizes, place: str) -> int:
    return sum(num_bytes for (_, where), num_bytes in sizes.items() if where == place)


def check_memory(estimate: MemoryEstimate, zero: ZeroPolicy, device: torch.device, collectives: Collectives) -> None:
    """Log what each rank needs, and raise on all ranks if some machine cannot provide it. Collective.

    Raises:
        DoesNotFit: with both numbers.
    """
    folders = [place.nvme_path for place in (zero.offload_optimizer, zero.offload_param) if place is not None]
    folder = next((name for name in folders if name is not None), None)
    available = MemoryEstimate(
        device=runtime_of(device).available() if estimate.device else 0,
        host=host_available(),
        disk=disk_available(folder) if folder is not None and estimate.disk else 0,
    )
    log_dist(f"offload: this rank needs {_sentence(estimate, available)}")
    everyone = collectives.gather_objects((os.uname().nodename, estimate, available))
    problems = list(_problems(everyone))  # type: ignore[arg-type]
    if problems:
        raise DoesNotFit("; ".join(problems))


def _problems(everyone: Sequence[tuple[str, MemoryEstimate, MemoryEstimate]]) -> Iterator[str]:
    for node in dict.fromkeys(name for name, _, _ in everyone):
        estimate = [needed for name, needed, _ in everyone if name == node]
        there = [available for name, _, available in everyone if name == node]
        host, disk = sum(one.host for one in estimate), sum(one.disk for one in estimate)
        have_host, have_disk = min(one.host for one in there), min(one.disk for one in there)
        for kind, needed, available, ranks in (
            ("host memory", host, have_host, len(estimate)),
            ("disk", disk, have_disk, len(estimate)),
            *(("device memory", one.device, has.device, 1) for one, has in zip(estimate, there, strict=True)),
        ):
            if needed > available:
                yield (
                    f"{node}: {ranks} rank(s) need {amount(needed)} of {kind} for masters, optimizer states, "
                    f"gradients and buffers, and {amount(available)} are available: {_HINTS[kind]}"
                )


def _sentence(estimate: MemoryEstimate, available: MemoryEstimate) -> str:
    parts = [
        f"{amount(needed)} of {kind} ({amount(there)} available)"
        for kind, needed, there in (
            ("device memory", estimate.device, available.device),
            ("host memory", estimate.host, available.host),
            ("disk", estimate.disk, available.disk),
        )
        if needed
    ]
    return (", ".join(parts) or "no memory") + "; activations and gathered parameters come on top"


def amount(num_bytes: int) -> str:
    """Format bytes in the largest suitable unit, because small models are offloaded, too."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size / 10:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
