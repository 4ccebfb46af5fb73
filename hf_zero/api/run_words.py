"""A run's log lines: a block when an engine is created, and one line after training."""

from __future__ import annotations

import resource
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from hf_zero.api.engine import ZeroEngine
from hf_zero.comm import MAX_SEND_BUFFERS
from hf_zero.comm.process_group import backend_of
from hf_zero.deepspeed_version import announcement
from hf_zero.device.registry import runtime_of
from hf_zero.log import log_dist
from hf_zero.optim.registry import states_per_element, stored_bytes_per_element
from hf_zero.optim.updater import OwnStepUpdater, Updater
from hf_zero.precision import explain_dtypes, precision_from
from hf_zero.spans import SPANS

WEIGHTS, GRADIENTS, STATES, PASSING = "weights", "gradients", "optimizer states", "gathered weights and buffers"
_PLACES = {None: "device", "none": "device", "cpu": "host", "nvme": "disk"}
_SHARDED_FROM = {WEIGHTS: 3, GRADIENTS: 2, STATES: 1}  # stage
_PARTS = (("gather", "gathers"), ("reduce", "reductions"), ("step", "updates"), ("save", "saves"))
NOT_GATHERED = (
    "save_model() and save_16bit_model() write no model file, as stage3_gather_16bit_weights_on_model_save is false: "
    "set it to true, or make one of a checkpoint with python -m hf_zero zero_to_fp32"
)
_WRITTEN = ("file", "text", "dict", "default", "derived")  # sources other than filled "auto" values

Sizes = Counter[tuple[str, str]]
"""(kind, place) -> bytes of one rank; place is "device", "host" or "disk"."""


def start(engine: ZeroEngine) -> None:
    version = sys.modules[__name__.partition(".")[0]].__version__
    log_dist("\n  ".join([f"{announcement()}, by hf_zero {version}", *_lines(engine)]))


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
    """Memory per rank without activations, by the rules of `hf_zero.planning.memory` applied to the existing layout.
    Temporary buffers count at their peak."""
    assembly, sizes = engine.gradients.assembly, Sizes()
    zero, precision = engine.settings.resolved.zero, precision_from(engine.settings.resolved.precision)
    units: Any = getattr(engine.module_view.store, "units", ())
    if not units:
        sizes[WEIGHTS, "device"] = sum(parameter.nbytes for parameter in engine.module.parameters())
    whole = longest = itemsize = 0
    for unit in units:
        num_bytes = sum(part.layout.full_numel * part.dtype.itemsize for part in unit.parts)
        whole, longest = whole + num_bytes, max(longest, num_bytes)
        itemsize = max(itemsize, *(part.dtype.itemsize for part in unit.parts))
        place = "device" if zero.offload_param is None else _PLACES[zero.offload_param.device]
        sizes[WEIGHTS, place] += sum(part.stored.num_bytes for part in unit.parts)
        sizes[WEIGHTS, "device"] += num_bytes if unit.is_persistent else 0
    kept = zero.keys.stage3_max_live_parameters + zero.keys.stage3_prefetch_bucket_size
    sizes[PASSING, "device"] = min(whole, 2 * longest + kept * itemsize)  # the unit in use, the next, and kept ones
    if assembly is None:
        return +sizes
    optimizer, sharding = assembly.optimizer.optimizer, assembly.optimizer.sharding
    per_state = 2 if precision.low_precision_states else 4
    if zero.streaming is not None:
        per_state = zero.streaming.state_bytes(per_state)
    states = states_per_element(optimizer) * per_state + stored_bytes_per_element(optimizer)
    is_whole = not sharding.shards_gradients and engine.settings.gradient_accumulation_steps() > 1
    largest = 0
    for bucket in assembly.store.buckets:
        is_far = bucket.placement.work != runtime_of(engine.device).own or bucket.placement.gradients.can_fail
        place = _PLACES[zero.offload_optimizer.device] if is_far and zero.offload_optimizer is not None else "device"
        master = precision.master_dtype(bucket.dtype).itemsize if bucket.has_masters else 0
        if zero.streaming is not None:
            master = zero.streaming.master_bytes(bucket.dtype.itemsize, master)
        sizes[STATES, place] += round(bucket.owned.numel * (master + states))
        summed, owned = precision.accumulation_dtype(bucket.dtype).itemsize, bucket.owned.numel
        if assembly.step.keeps_gradients or engine.settings.gradient_accumulation_steps() > 1:
            sizes[GRADIENTS, "device" if is_whole else place] += summed * (bucket.bucket.numel if is_whole else owned)
        largest = max(largest, bucket.bucket.numel * precision.communication_dtype(bucket.dtype).itemsize)
    if engine.groups.shard.size > 1:
        sizes[PASSING, "device"] += MAX_SEND_BUFFERS * largest
    return +sizes


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
        f"ZeRO stage {stage} by hf_zero, {resolved.precision.model}, {count(ranks, 'rank')}, "
        f"{batch.micro_batch_size} x {batch.accumulation_steps} x {counted} = {resolved.samples_per_update} samples "
        "per update"
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
        yield f"optimizer: {type(assembly.optimizer.optimizer).__name__}{_sees(assembly.optimizer.updater)}"
    sizes = expected_sizes(engine)
    for what, from_stage in _SHARDED_FROM.items():
        there = [(where, num_bytes) for (kind, where), num_bytes in sizes.items() if kind == what]
        how = f"1/{shard}" if stage >= from_stage and shard > 1 else "whole"
        if there:
            yield f"{what}: {how} on each rank, " + ", ".join(f"{size(n)} {_words(engine, w)}" for w, n in there)
    threads = None if assembly is None else assembly.placements.update_threads
    if threads is not None:
        yield f"updates in host memory: {count(threads, 'thread')} of this rank (hf_zero.offload_threads)"
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
    yield from (f"remark: {note}" for note in resolved.notes)


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
