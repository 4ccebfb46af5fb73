"""A run's log lines: a block when an engine is created, and one line after training."""

from __future__ import annotations

import resource
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_zero.api.engine import ZeroEngine
from hf_zero.comm.process_group import backend_of
from hf_zero.deepspeed_version import announcement
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Runtime
from hf_zero.layout.memory import (
    BUFFERS,
    DEVICE,
    DISK,
    GATHERED,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PARAMETERS,
    RankSizes,
    Sizes,
    UnitSizes,
    buffer_sizes,
    gathered_at_most,
    gradient_sizes,
    optimizer_sizes,
    parameter_sizes,
    receive_buffers,
    update_buffers,
)
from hf_zero.layout.sharding import Sharding
from hf_zero.log import log_dist
from hf_zero.offload.memory_estimate import SizesByPolicy
from hf_zero.optim.registry import states_per_element, stored_bytes_per_element
from hf_zero.optim.updater import OwnStepUpdater, Updater
from hf_zero.params.store import of
from hf_zero.precision import explain_dtypes, precision_from
from hf_zero.spans import SPANS
from hf_zero.step.assemble import Assembly

if TYPE_CHECKING:
    from hf_zero.params.unit import Unit

_SHARDED = {PARAMETERS: ("weights", 3), GRADIENTS: ("gradients", 2), OPTIMIZER: ("optimizer states", 1)}  # from stage
_PARTS = (("gather", "gathers"), ("reduce", "reductions"), ("step", "updates"), ("save", "saves"))
NOT_GATHERED = (
    "save_model() and save_16bit_model() write no model file, as stage3_gather_16bit_weights_on_model_save is false: "
    "set it to true, or make one of a checkpoint with python -m hf_zero zero_to_fp32"
)
_WRITTEN = ("file", "text", "dict", "default", "derived")  # sources other than filled "auto" values


def start(engine: ZeroEngine) -> None:
    version = sys.modules[__name__.partition(".")[0]].__version__
    log_dist("\n  ".join([f"hf_zero {version} ({announcement()})", *_lines(engine)]))


def end(engine: ZeroEngine) -> None:
    """Log the summary of training now."""
    _RUNS[engine].tell()


class RunSummary:
    """Logs a summary of an engine's updates, at the latest when it is freed; explains out-of-memory errors."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._begin, self._told, self._phases = time.perf_counter(), 0, engine.phases
        self._seconds, self._runtime = dict(SPANS.seconds), runtime_of(engine.device)
        self._phases.explain = partial(_explain, weakref.proxy(engine))
        _RUNS[engine] = self
        weakref.finalize(engine, self.tell)

    def tell(self) -> None:
        """Log one line, if there were updates since the last one."""
        updates = self._phases.num_done["step"]
        if updates == self._told:
            return
        self._told, seconds = updates, time.perf_counter() - self._begin
        parts = [f"{name} {SPANS.seconds[kind] - self._seconds.get(kind, 0.0):.1f} s" for kind, name in _PARTS]
        peak = f"{size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)} of host memory"
        if self._runtime.has_own_memory:
            peak = f"{size(self._runtime.allocated()[1])} of the device's memory, {peak}"
        done = f"{count(updates, 'update')} in {seconds:.1f} s, of these {', '.join(parts)}"
        log_dist(f"{done}; peak of this rank: {peak}")


_RUNS: weakref.WeakKeyDictionary[ZeroEngine, RunSummary] = weakref.WeakKeyDictionary()


def _explain(engine: Any, phase: str, error: Exception) -> None:
    if isinstance(error, RuntimeError):
        engine.gradients.progress.explain(error)
        explain_dtypes(engine.module, engine.settings.resolved.precision.model, error)
    if isinstance(error, (RuntimeError, MemoryError)):
        from hf_zero.profiling.out_of_memory import explain  # only needed on failure

        explain(engine, phase, error)


def expected_sizes(engine: ZeroEngine) -> Sizes:
    """Memory of this rank without activations, by `hf_zero.layout.memory`. Temporary buffers count at their peak."""
    rank, keys = _rank_sizes(engine), engine.settings.resolved.zero.keys
    sizes = parameter_sizes(rank) + optimizer_sizes(rank) + gradient_sizes(rank) + buffer_sizes(rank)
    units = getattr(engine.module_view.store, "units", ())
    itemsize = max((part.dtype.itemsize for unit in units for part in unit.parts), default=0)
    kept = (keys.stage3_max_live_parameters + keys.stage3_prefetch_bucket_size) * itemsize
    sizes[GATHERED, DEVICE] += gathered_at_most(rank, kept)
    sizes[BUFFERS, DEVICE] += receive_buffers(rank)
    return sizes + update_buffers(rank)


def _rank_sizes(engine: ZeroEngine) -> RankSizes:
    """Describe the existing store."""
    resolved, assembly, store = engine.settings.resolved, engine.gradients.assembly, engine.module_view.store
    own, accumulates = runtime_of(engine.device), resolved.accumulates
    sharding = Sharding(resolved.zero.stage, engine.groups.shard.rank, engine.groups.shard.size)
    optimizer = None if assembly is None else assembly.optimizer.optimizer
    policies = SizesByPolicy(
        zero=resolved.zero,
        precision=precision_from(resolved.precision),
        separate=own.has_own_memory,
        num_states=0 if optimizer is None else states_per_element(optimizer),
        stored_bytes=0.0 if optimizer is None else stored_bytes_per_element(optimizer),
    )
    units = [_unit_sizes(unit, own) for unit in getattr(store, "units", ())]
    buckets = []
    far = [] if assembly is None else [placement for placement, _ in assembly.placements.far]
    for trained in () if assembly is None else assembly.store.buckets:
        bucket, placement = trained.bucket, trained.placement
        is_far = any(placement is each for each in far)
        buckets.append(
            policies.bucket(
                bucket.dtype,
                bucket.numel,
                trained.owned.numel,
                place=policies.far if is_far else DEVICE,
                has_master=trained.has_masters,
            )
        )
    held = set() if assembly is None or units else {id(parameter) for parameter in assembly.store.parameters}
    others = [p for p in engine.module.parameters() if id(p) not in held and of(p) is None]
    return policies.rank(
        buckets,
        units,
        sharding if assembly is None else assembly.optimizer.sharding,
        accumulates=accumulates,
        keeps_sums=assembly is None or assembly.step.keeps_gradients or accumulates,
        other_weights=sum(parameter.nbytes for parameter in others),
    )


def _unit_sizes(unit: Unit, runtime: Runtime) -> UnitSizes:
    stored = Counter[str]()
    for part in unit.parts:
        on_drive = part.stored.tensor is None
        stored[DISK if on_drive else DEVICE if part.stored.memory == runtime.own else HOST] += part.stored.num_bytes
    return UnitSizes(
        row=sum(part.stored.num_bytes // part.rows.count for part in unit.parts),
        stored=stored,
        whole=sum(part.layout.full_numel * part.dtype.itemsize for part in unit.parts),
        is_persistent=unit.is_persistent,
        is_direct=all(part.is_direct for part in unit.parts),
    )


def size(num_bytes: float) -> str:
    """1.25 GB, 35.0 MB, 40 bytes: powers of 1000."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= power / 10:
            return f"{num_bytes / power:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _lines(engine: ZeroEngine) -> Iterator[str]:
    resolved, groups, assembly = engine.settings.resolved, engine.groups, engine.gradients.assembly
    batch, zero, ranks, stage = resolved.batch, resolved.zero, groups.world.size, resolved.zero.stage
    per_group = "".join(f", {each.size} per {each.group_name}" for each in engine.parallelism)
    counted = f"{groups.data.size} ({ranks} ranks{per_group})" if per_group else f"{ranks}"
    yield (
        f"ZeRO stage {stage}, {resolved.precision.model}, {count(ranks, 'rank')}, "
        f"{batch.micro_batch_size} x {batch.accumulation_steps} x {counted} = "
        f"{count(resolved.samples_per_update, 'sample')} per update"
    )
    hosts, shard, copies = groups.mesh.hosts.num_hosts, groups.shard.size, groups.replicate.size
    beside = f" in {copies} copies" if copies > 1 else ""
    share = f", states shared by {shard}{beside}" if ranks > 1 else ""
    yield f"ranks: {ranks} on {count(hosts, 'host')}{share}"
    yield f"device: {engine.device}, collectives by {backend_of(engine.device.type)}"
    numels = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters()]
    trained = sum(spec.numel for spec in assembly.store.layout.specs) if assembly is not None else 0
    yield f"model: {type(engine.module).__name__}, {sum(numels):,} parameters, {trained:,} trained"
    if assembly is not None:
        yield f"optimizer: {_optimizer_words(engine)}{_sees(assembly.optimizer.updater)}"
    sizes = expected_sizes(engine)
    whole = sum(unit.whole for unit in _rank_sizes(engine).units if unit.is_persistent)
    for kind, (what, from_stage) in _SHARDED.items():
        gathered = whole if kind == PARAMETERS and shard > 1 else 0
        there = [(place, num_bytes) for (each, place), num_bytes in sizes.items() if each == kind]
        places = [(place, num_bytes - gathered * (place == DEVICE)) for place, num_bytes in there]
        how = f"1/{shard}" if stage >= from_stage and shard > 1 else "whole"
        if there:
            stored = ", ".join(f"{size(n)} {_words(engine, place)}" for place, n in places if n)
            small = f"; small ones also whole, {size(gathered)} {_words(engine, DEVICE)}" if gathered else ""
            yield f"{what}: {how} on each rank, {stored}{small}"
    yield from () if assembly is None else _offloaded_updates(assembly)
    gathers = zero.keys.stage3_gather_16bit_weights_on_model_save
    if stage == 3 and not gathers and not hasattr(engine.module, "peft_config"):  # adapters are written
        yield f"whole weights: {NOT_GATHERED}"
    totals = Counter[str]()
    for (_, where), num_bytes in sizes.items():
        totals[_words(engine, where)] += num_bytes
    on_top = "activations" if runtime_of(engine.device).has_own_memory else "activations, Python and libraries"
    peak = ", ".join(f"{size(n)} {w}" for w, n in totals.items())
    yield f"expected peak of this rank: {peak}; {on_top} come on top"
    filled = sum(entry.source.kind not in _WRITTEN for entry in resolved.provenance.values())
    if filled:
        values = count(filled, "value")
        yield f'"auto": {values} filled in (python -m hf_zero explain ds.json shows each and its source)'
    yield from (f"remark: {remark}" for remark in resolved.remarks if not (remark.ignored or remark.idle))


def _offloaded_updates(assembly: Assembly) -> Iterator[str]:
    """What updates, and when, if anything is offloaded from an accelerator."""
    placements = assembly.placements
    shares = {placement.streams: share for placement, share in placements.far}
    auto = assembly.step.auto_ratio
    if auto is not None:
        text = 'offload_optimizer.ratio "auto": after the first update, as many buckets move to the device as fit'
        yield text if auto.chosen is None else str(auto.chosen)
    if shares.get(True):
        yield f"updates of offloaded states on the device: {shares[True]:.0%} (hf_zero.offload_update)"
    if assembly.step.ends_later:
        yield "updates: beside the next forward (hf_zero.overlap_step)"
    if placements.update_threads is not None and shares.get(False):
        threads = count(placements.update_threads, "thread")
        yield f"updates in host memory: {threads} of this rank (hf_zero.offload_threads)"


def _optimizer_words(engine: ZeroEngine) -> str:
    """The optimizer as ds.json or the caller names it, with the class that updates if that is another."""
    assembly, policy = engine.gradients.assembly, engine.settings.resolved.optimizer
    assert assembly is not None
    kind = type(assembly.optimizer.optimizer).__name__
    return kind if policy is None or policy.type == kind else f"{policy.type} ({kind})"


def _sees(updater: Updater) -> str:
    """What an optimizer whose own step runs is given."""
    if not isinstance(updater, OwnStepUpdater):
        return ""
    return ", sees whole tensors" if updater.keeps_everything_whole else ", sees flat shards (hf_zero.optimizer_sees)"


def count(number: int, thing: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number:,} {thing}{'s' if number != 1 else ''}"


def _words(engine: ZeroEngine, where: str) -> str:
    if where == "device" and runtime_of(engine.device).has_own_memory:
        return "on the device"
    return "on the drive" if where == "disk" else "in host memory"
