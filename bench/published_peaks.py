"""Peak memory of other programs, derived from a plan: what they keep at other times than hf_zero.

Each rule is documented with the source code that it comes from (`_deepspeed`, `_torch`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.allocator import Kept, holes, recording
from hf_zero.planning.candidates import Training
from hf_zero.planning.estimate import Estimate, traced
from hf_zero.planning.machine import CONTEXT_BYTES, Hardware
from hf_zero.planning.memory import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    PlannedUnits,
    plan_units,
    trained_specs,
)
from hf_zero.planning.model import PlannedModel

SUB_GROUP_NUMEL = 10**9  # DeepSpeed's default; Lightning's is 10**12
# Copies of all second moments that torch's Adam has at once: its `foreach` form, the default on GPUs, has their square
# root (`_multi_tensor_adam` in torch/optim/adam.py), and before PyTorch 2.1 a second copy, with epsilon added.
_TEMPORARY = {"foreach": 1, "foreach 2.0": 2}


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank at a moment of the step.

    Attributes:
        kept: persistent memory: weights, states, reduced gradients.
        passing: temporary memory.
        waiting: freed memory that cannot be reused yet.
        apart: freed memory that only another stream can reuse: the allocator has separate blocks for each stream.
    """

    kept: float
    passing: float
    waiting: float = 0.0
    apart: float = 0.0

    @property
    def total(self) -> float:
        return self.kept + self.passing


@dataclass(frozen=True)
class Moment:
    """A moment of a step.

    Attributes:
        activations, gathered: bytes.
        unreduced: bytes of unreduced gradients of FSDP1's current units, and of the flat gradients created from them.
        done: fraction of the gradients that are complete.
    """

    activations: int
    gathered: int
    unreduced: int
    done: float
    is_forward: bool

    @property
    def passing(self) -> int:
        return self.activations + self.gathered + self.unreduced


def peaks_of(
    run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, machine: Hardware, training: Training
) -> Iterator[Peak]:
    """Yield the memory of another program at each moment of the step.

    - `deepspeed`: see `_deepspeed`.
    - `torch` (FSDP, Trainer without an engine, torchtune), `autocast`: see `_torch`.
    """
    moments = list(_moments(run, estimate, model, machine, training))
    yield from (_deepspeed if run["program"] == "deepspeed" else _torch)(run, estimate, model, machine.ranks, moments)


def _moments(
    run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, machine: Hardware, training: Training
) -> Iterator[Moment]:
    """Yield all moments of a step; the estimate itself only has the peak with hf_zero's gradients.

    - FSDP's backward begins with a gather of the last layer (its root has a hook on the loss), while hf_zero waits
      until the backward of the loss is complete.
    - FSDP1's modules have views of a flat parameter. Their gradients are kept until those of a unit are complete, and
      autograd then creates the flat gradient (the backward of `torch.split` in `_get_unflat_views_unaligned` in
      _flat_param.py concatenates); for frozen weights in the same unit as adapters it creates zeros.
    """
    seen = estimate.seen
    gathered, ahead = [0] * len(seen.segments), 0
    unit_of: dict[str, int] = {}
    sizes: list[int] = []
    if estimate.candidate.stage == 3:
        setting = estimate.setting
        specs, policy = trained_specs(model.module), estimate.answers.zero.keys
        units = plan_units(model, specs, setting.shard_ranks, policy, looks_far=setting.looks_far)
        gathered = units.live(seen)
        ahead = max((unit.whole_bytes for unit in units.units), default=0) if "fsdp" in run else 0
        unit_of, sizes = _flat_units(run, model, units) if run.get("fsdp") in (0, 1) else (unit_of, sizes)
    away = estimate.inputs_on_host
    numels = {name: parameter.numel() for name, parameter in model.module.named_parameters()}
    done, is_forward, at_loss = 0, True, -1
    left = Counter(unit_of.values())
    held: Counter[int] = Counter()
    for segment, whole in zip(seen.segments, gathered, strict=True):
        is_forward = is_forward and segment.event != "loss"
        at_loss = whole if segment.event == "loss" else at_loss if at_loss == whole else -1
        unit, flat = -1, 0
        if segment.event == "gradient":
            done += numels.get(segment.name, 0)
            unit = unit_of.get(segment.name, -1)
        if unit >= 0:
            left[unit] -= 1
            held[unit] += numels[segment.name] * model.dtype.itemsize
            flat = 0 if left[unit] else sizes[unit]
        share = min(1.0, done / max(1, model.num_trained))
        here = whole + (ahead if at_loss == whole else 0)
        yield Moment(max(0, segment.peak - away), here, held.total() + flat, share, is_forward)
        if flat:
            del held[unit]


def _flat_units(run: Mapping[str, Any], model: PlannedModel, units: PlannedUnits) -> tuple[dict[str, int], list[int]]:
    """Return the unit of each trained parameter by name, and the bytes of each unit's flat gradient. Without `no_sync`
    adapters have their own units (peft's `fsdp_auto_wrap_policy`), separate from frozen weights."""
    chosen = [[parameter for _, members in unit.parts for parameter in members] for unit in units.units]
    if run.get("units") == "matrix":
        chosen = [[parameter] for members in chosen for parameter in members]
    if run.get("root_unit"):
        ends = {id(end.weight): end.weight for end in _embeddings(model) if end is not None}
        chosen = [[each for each in members if id(each) not in ends] for members in chosen] + [list(ends.values())]
    index_of = {id(parameter): index for index, members in enumerate(chosen) for parameter in members}
    trained = [(name, each) for name, each in model.module.named_parameters() if each.requires_grad]
    all_are_in = not model.lora_rank or run.get("no_sync")
    sizes = [sum(each.nbytes for each in members if all_are_in or each.requires_grad) for members in chosen]
    return {name: index_of[id(each)] for name, each in trained if id(each) in index_of}, sizes


def _sums(run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, ranks: int) -> float:
    """Return the bytes of all reduced gradients that a rank owns. With one micro-batch, hf_zero's estimate only has
    those that exist at the peak."""
    if run["accumulation"] > 1 and estimate.candidate.optimizer is None:
        return float(estimate.memory.device.get(GRADIENTS, 0))
    if estimate.candidate.optimizer is not None and run.get("fsdp") != 1:
        return float(estimate.memory.device.get(GRADIENTS, 0))
    return model.dtype.itemsize * model.num_trained / (ranks if estimate.candidate.stage else 1)


def _deepspeed(
    run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, ranks: int, moments: Sequence[Moment]
) -> Iterator[Peak]:
    """Yield the memory in forward and backward, and in the update.

    - Reduced gradients keep their buffer between steps at stage 3 (`grad_partitions_flat_buffer` in its stage3.py); at
      other stages they are freed after the update (`averaged_gradients` in its stage_1_and_2.py, `grad` of parameters
      at stage 0).
    - An update begins with a copy of gradients in fp32: of all that a rank owns at stages 1 and 2, of a sub-group at
      stage 3 (`_prepare_fp32_grad_for_sub_group` in its stage3.py), and at stage 0 of each and then of all together
      (`step` in its fused_optimizer.py). Activations have been freed.
    - At stages 1 and 2 backward has a buffer of `reduce_bucket_size` elements, two with `overlap_comm`, which is off by
      default there (`setup_buckets` in its stage_1_and_2.py).
    - Masters are copies, even if they have the weights' dtype (`_create_fp32_partitions` clones them); hf_zero uses the
      weights in that case.
    - A model that was not created under `zero.Init` uses torch's `linear`, for which autograd keeps a transposed view
      of each gathered weight, so that it stays whole until backward. Under zero.Init, `linear` is replaced by one that
      only keeps the parameter (`LinearFunctionForZeroStage3` in linear.py). Versions 0.3.12 and 0.3.13 restored torch's
      own when the model had been created (`__exit__` in their partition_parameters.py). Checkpointed layers are
      gathered again.
    """
    device, total, weight = estimate.memory.device, estimate.memory.device_total, model.dtype.itemsize
    worst = device.get(ACTIVATIONS, 0) + device.get(GATHERED, 0)
    gradients = _sums(run, estimate, model, ranks)
    kept_in_16_bits = (estimate.config.get("bf16") or {}).get("bf16_master_weights_and_grads")
    on_device = estimate.candidate.optimizer is None
    kept = total - worst - device.get(GRADIENTS, 0) + gradients
    kept += gradients if on_device and kept_in_16_bits and estimate.candidate.stage == 3 else 0
    whole, bucket = 0, 0
    if estimate.candidate.stage in (1, 2) and on_device:
        kept += model.buffer_bytes(shards_scales=False) - device.get(BUFFERS, 0)
        keys = estimate.answers.zero.keys
        bucket = weight * keys.reduce_bucket_size * (2 if keys.overlap_comm else 1)
    if estimate.candidate.stage == 3 and not run.get("zero_init", True) and not run["checkpointing"]:
        whole = weight * model.num_parameters - _embedding_bytes(model)
    stay = run["accumulation"] > 1 or estimate.candidate.stage == 3 or not on_device
    for moment in moments:
        passing = moment.activations + max(moment.gathered, whole) + (0 if moment.is_forward else bucket)
        yield Peak(kept - (0 if stay else (1 - moment.done) * gradients), passing)
    group = run["ds"]["zero_optimization"].get("sub_group_size", SUB_GROUP_NUMEL)
    owned = min(group, gradients / 2) if estimate.candidate.stage == 3 else gradients / 2
    copies = 1 if estimate.candidate.stage else 2
    yield Peak(kept, 4 * copies * owned if on_device and not kept_in_16_bits else 0)


def _torch(
    run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, ranks: int, moments: Sequence[Moment]
) -> Iterator[Peak]:
    """Yield the memory in forward and backward, and in the update.

    - Gradients are created by backward and freed after the update; in forward, those of earlier micro-batches exist.
    - torch's Adam has as many copies of all second moments at once as `_TEMPORARY` says.
    - Before PyTorch 2.0, `zero_grad` set gradients to zero and kept them.
    - FSDP1 gathers into the flat parameter and reduces from the flat gradient, without buffers; FSDP2 has buffers
      (`as_it_ran`). Embedding and output are in the root's unit, which stays whole between forward and backward.
    - FSDP with mixed precision only has fp32 shards of trained parameters, which are cast for gathering. InternEvo
      keeps fp32 masters in addition to 16-bit shards, and creates fp32 gradients for an update.
    - FSDP's gradients have the dtype of its shards (`_cast_grad_to_param_dtype` in _runtime_utils.py of FSDP1).
    - FSDP1 with the optimizer on the host copies each reduced shard there, but keeps it until the end of backward
      (`_saved_grad_shard`, which `prepare_gradient_for_optim` in _flat_param.py deletes).
    - FSDP1 under `no_sync` does not reduce gradients: they stay whole between the micro-batches of an update. They are
      gradients of flat parameters, including frozen weights in the same unit as adapters (`_validate_frozen_params` in
      _wrap_utils.py warns about this).
    - DistributedDataParallel copies gradients to buckets, which are kept (`gradient_as_bucket_view`, off by default).
    - Before FSDP1 enabled `limit_all_gathers` by default (PyTorch 2.1, pull request 104900), the host ran ahead and
      gathered further units; their memory is freed when the device has used them, and until then counts as reserved.
    - A loop that frees gradients between forward and backward still has those of the previous step in forward.
    - A model with `use_cache` caches keys and values as in generation; they are freed with its output.
    - PEFT 0.12 and later keep adapters in fp32 (`autocast_adapter_dtype`).
    """
    device, weight = estimate.memory.device, model.dtype.itemsize
    gradients, shards = _sums(run, estimate, model, ranks), ranks if estimate.candidate.stage == 3 else 1
    root, kept = 0.0, float(device.get(PARAMETERS, 0) + device.get(OPTIMIZER, 0))
    bf16 = estimate.config.get("bf16") or {}
    if "fsdp" in run:
        if bf16.get("enabled") and not (bf16.get("bf16_master_weights_and_grads") or "masters" in run):
            kept, gradients = kept - weight * model.num_trained / shards, 2 * gradients
        root = run["root_unit"] * _embedding_bytes(model) if "root_unit" in run else 0
        kept += device.get(BUFFERS, 0) if run["fsdp"] == 2 else 0
    else:
        kept += device.get(BUFFERS, 0)
    if run.get("adapter_dtype") == "fp32":
        trained = model.num_trained / shards
        gradients, kept = gradients + round(2 * trained), kept + (2 + 4) * trained
    kept += gradients if run.get("ddp") else 0
    summed = _unreduced_bytes(model) if run.get("no_sync") else gradients
    gathered = max(moment.gathered for moment in moments)
    on_host, cached = estimate.candidate.optimizer is not None, _cache_bytes(run, model) if run.get("use_cache") else 0
    for moment in moments:
        is_late = bool(run.get("late_zero_grad")) and moment.is_forward and not on_host
        stays = run["accumulation"] > 1 and not on_host or run.get("zeroes_grad")
        here = summed if stays else gradients if is_late else moment.done * gradients
        waiting = weight * model.num_parameters - moment.gathered if run.get("limit_all_gathers") is False else 0
        apart = gradients - here + gathered - moment.gathered if run.get("fsdp") == 1 and not (stays or waiting) else 0
        passing = moment.passing + root + (cached if moment.is_forward or run.get("loss") == "kept" else 0)
        yield Peak(kept + here, passing, waiting, apart)
    if not on_host:
        wide, copies = 2 * gradients if "masters" in run else 0, _TEMPORARY.get(run.get("update", ""), 0)
        yield Peak(kept + gradients, wide + copies * (wide or gradients), apart=gathered if run.get("fsdp") == 1 else 0)


def _cache_bytes(run: Mapping[str, Any], model: PlannedModel) -> int:
    """Return the bytes of cached keys and values of all layers."""
    _, key_heads, extent = model.heads
    return 2 * model.layers * run["micro_batch"] * run["length"] * key_heads * extent * model.dtype.itemsize


def _unreduced_bytes(model: PlannedModel) -> float:
    """Return the bytes of gradients of all flat parameters with adapters: all units except the root's."""
    if not model.lora_rank:
        return model.dtype.itemsize * model.num_trained
    ends = {id(end.weight): end.weight for end in _embeddings(model)}
    return model.dtype.itemsize * (model.num_parameters - sum(weight.numel() for weight in ends.values()))


def _embedding_bytes(model: PlannedModel) -> int:
    """Return the bytes of the input embedding, unless it is tied to the output, which is in use at the peak."""
    first, last = _embeddings(model)
    return 0 if last is None or last.weight is first.weight else int(first.weight.nbytes)


def _embeddings(model: PlannedModel) -> tuple[Any, Any]:
    """Return the input embedding and the output layer, if there is one."""
    base: Any = model.module.get_base_model() if model.lora_rank else model.module  # type: ignore[operator]
    return base.get_input_embeddings(), base.get_output_embeddings()


def left_over(
    run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, machine: Hardware, training: Training
) -> float:
    """Return the bytes that torch's allocator has reserved but cannot use, if the run's meter includes them."""
    if run["meter"] not in ("reserved", "device"):
        return 0.0
    checkpointing, tiling = estimate.candidate.checkpointing, estimate.tiling
    with recording() as events:
        traced.__wrapped__(model, training, checkpointing=checkpointing, tiling=tiling, on_cpu=False)
    kept = _kept(run, estimate, model, machine.ranks)
    return float(holes(events, kept, expandable=run.get("segments") == "expandable"))


def _kept(run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, ranks: int) -> Kept:
    """Return what the program keeps between steps. DeepSpeed's shards, states and gradients are flat, and allocated at
    the start."""
    device, is_deepspeed = estimate.memory.device, run["program"] == "deepspeed"
    shards = ranks if estimate.candidate.stage == 3 else 1
    parameters = list(model.module.parameters())
    trained = [each.nbytes // shards for each in parameters if each.requires_grad]
    is_on_host = estimate.candidate.optimizer is not None
    if is_deepspeed:
        return Kept([round(sum(device.get(kind, 0) for kind in (PARAMETERS, OPTIMIZER)))], keeps_gradients=False)
    share = device.get(OPTIMIZER, 0) / max(1, sum(trained)) / 2
    states = [] if is_on_host else [round(size * share) for size in trained for _ in range(2)]
    copies = _TEMPORARY.get(run.get("update", ""), 0)
    return Kept(
        [] if is_on_host else [each.nbytes // shards for each in parameters],
        states,
        states[::2] * copies,
        keeps_gradients="fsdp" not in run,
        zeroes_gradients=bool(run.get("zeroes_grad")),
        micro_batches=run["accumulation"],
    )


def metered(peak: Peak, meter: str, left: float = 0.0, limit: float = math.inf) -> float:
    """Return the bytes that the run's meter would have shown.

    Args:
        left: bytes that the allocator has reserved but cannot use.
        limit: bytes of a device available to the allocator, which frees unused segments before it fails.
    """
    if meter == "allocated":
        return peak.total
    if meter == "active":  # in use, or freed but still used by another stream
        return max(peak.total, min(peak.total + peak.waiting, limit))
    reserved = max(peak.total, min(peak.total + left + peak.waiting + peak.apart, limit))
    return reserved + (CONTEXT_BYTES if meter == "device" else 0)
