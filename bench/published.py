"""What `plan` says of runs on GPUs that others have published, beside what they measured.

    python -m bench.published                       # the table
    python -m bench.published --rows compared       # without the runs that are held out
    python -m bench.published --held-out            # with those of a lot that is still sealed: once, at the end
    python -m bench.published --write               # into docs/planning.md

`published.json` has the runs: where each is published, its model, machine and settings as a ds.json, and what was
measured. Sets are collected one after the other, each before any of its runs is predicted. Of each a lot with a fixed
seed holds half of the runs out: no formula or constant is chosen by them, so that their errors are those that another
run will have.

Programs measure different things, which is said of each run as its `meter`: what tensors take (`allocated`), what the
allocator has taken for them (`reserved`), or what the driver shows (`device`). The last two are more than a plan's sum
by what a plan leaves free (`hf_zero.planning.machine`). A run whose checkpointing is `selective`, which hf_zero does
not have, must lie between a plan with and one without.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from bench.published_surroundings import as_it_ran
from bench.surroundings import ROOT, page_with
from hf_zero.config import resolve
from hf_zero.config.features.long_sequences import ActivationCheckpointing
from hf_zero.config.features.long_sequences import Tiling as TilingKeys
from hf_zero.planning.candidates import Training, training_of
from hf_zero.planning.choose import (
    ALIKE,
    Estimate,
    given_estimates,
    kept_by_layers,
    optimizer_size,
    setting_of,
    traced,
)
from hf_zero.planning.machine import CONTEXT_BYTES, FRAGMENTS, Hardware, hardware
from hf_zero.planning.memory import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    plan_units,
    trained_specs,
)
from hf_zero.planning.model import PlannedModel, Tiling, load_model

RUNS = Path(__file__).with_name("published.json")
PAGE = ROOT / "docs" / "planning.md"
SEEDS = {1: 20261125, 2: 20261126, 3: 20261127, 4: 20261128}  # of the lot of each set of runs
# Sets whose held-out runs are not predicted unless asked for: a new set, as long as rules are changed.
SEALED: frozenset[int] = frozenset({4})
UNITS = {"B": 1.0, "MiB": float(2**20), "GB": 1e9, "GiB": float(2**30)}
CLOSE = 0.10
SUB_GROUP_NUMEL = 10**9  # DeepSpeed's default; Lightning's is 10**12
# Holes that PyTorch's allocator has between tensors, as a share of those that come and go: reserved (or the driver's
# count, less CONTEXT_BYTES) less allocated, over what is allocated beyond weights and states, of runs that give both:
# nine of fms-acceleration and one of fsdp_qlora that are not held out; 0.21 to 0.68.
SCATTERED = 0.32
RATE_DIFFERS = 1.10  # runs of a source whose published rates are closer than that have no order to predict


@dataclass(frozen=True)
class Compared:
    """A published run and what is predicted of it: the least and the most where its checkpointing is `selective`.

    Attributes:
        peaks: bytes, as the run's meter has them.
        rates: tokens per second of all ranks.
    """

    run: Mapping[str, Any]
    is_held_out: bool
    peaks: tuple[float, float]
    rates: tuple[float, float]

    @property
    def published(self) -> float | None:
        """Bytes."""
        return self.run["peak"] * UNITS[self.run["unit"]] if "peak" in self.run else None

    @property
    def off(self) -> float | None:
        """Predicted over published, less one; 0 between the two of a pair."""
        if self.published is None:
            return None
        nearest = min(max(self.published, self.peaks[0]), self.peaks[1])
        return nearest / self.published - 1


def contents() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RUNS.read_text(encoding="utf-8"))
    return found


def set_of(run: Mapping[str, Any]) -> int:
    """Which collection it belongs to."""
    return int(run.get("set", 1))


def held_out(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Half of the runs of each set, by lot."""
    chosen: set[str] = set()
    for number, seed in SEEDS.items():
        names = sorted(run["id"] for run in runs if set_of(run) == number)
        chosen.update(random.Random(seed).sample(names, len(names) // 2))
    return chosen


def compared(rows: str = "all", *, opened: bool = False) -> Iterator[Compared]:
    """`rows`: all, compared (which are not held out), or held-out.

    Args:
        opened: with those of sealed lots.
    """
    found = contents()
    chosen = held_out(found["runs"])
    for run in found["runs"]:
        is_held_out = run["id"] in chosen
        if is_held_out and set_of(run) in SEALED and not opened:
            continue
        if rows == "all" or is_held_out == (rows == "held-out"):
            yield _compared(run, found["models"][run["model"]], is_held_out)


def _compared(run: Mapping[str, Any], config: Mapping[str, Any], is_held_out: bool) -> Compared:
    machine = hardware({key: run[key] for key in ("gpu", "gpus_per_node", "nodes", "device_memory") if key in run})
    training = training_of(_ds_config(run), _training(run), machine.ranks)
    with as_it_ran(run):
        shape, surroundings = json.dumps(_shape(run, config)), json.dumps(_surroundings(run))
        model = _model(shape, training.precision, run["lora_rank"], surroundings)
        estimates = _estimates(run, model, machine, training)
        seen = [peak_of(run, each, model, machine, training) for each in estimates]
    limit = machine.device_memory / UNITS["GB"] * UNITS["GiB"] - CONTEXT_BYTES  # cards of 80 "GB" have as many GiB
    peaks = sorted(metered(peak, run["meter"], run.get("segments", "fixed"), limit) for peak in seen)
    rates = sorted(each.tokens_per_s(training, machine.ranks) for each in estimates)
    return Compared(run, is_held_out, (peaks[0], peaks[-1]), (rates[0], rates[-1]))


def _estimates(
    run: Mapping[str, Any], model: PlannedModel, machine: Hardware, training: Training
) -> tuple[Estimate, ...]:
    return tuple(given_estimates(model, machine, training, _ds_config(run), optimizer_size(training)))


def _shape(run: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration, with the attention that the run had."""
    return {**config, **({"attn_implementation": run["attention"]} if "attention" in run else {})}


def _surroundings(run: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two traces of one model different, beside what a `Training` says."""
    keys = ("program", "autocast", "loss", "softmax", "lora_targets", "lora_form", "lora_dropout")
    return {key: run[key] for key in keys if key in run}


def _ds_config(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run's, with batch sizes as a Trainer fills them in; under autocast weights are in fp32; FSDP keeps no unit
    from forward to backward."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    ds = {"bf16": {"enabled": True}, **run["ds"], **dict.fromkeys(keys, "auto")}
    if "fsdp" in run:
        ds["zero_optimization"] = {**ds["zero_optimization"], "stage3_max_reuse_distance": 0}
    if run["program"] == "autocast":
        autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        ds = {**ds, "bf16": {"enabled": False}, "fp16": {"enabled": False}, **autocast}
    return ds


def _training(run: Mapping[str, Any]) -> Training:
    checkpointing = None if run["checkpointing"] == "selective" else run["checkpointing"]
    return Training(
        length=max(1, run["length"]),
        micro_batch=run["micro_batch"],
        accumulation=run["accumulation"],
        checkpointing=checkpointing,
    )


@lru_cache(maxsize=4)
def _model(config: str, precision: str, lora_rank: int, surroundings: str) -> PlannedModel:
    """`surroundings`: of which `as_it_ran` is on; a model's traces are kept with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(config, encoding="utf-8")
        return load_model(str(path), precision, lora_rank)


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank at the worst moment.

    Attributes:
        kept: what lies where it lay in the step before: weights, states, sums of gradients.
        passing: what comes and goes.
        waiting: what is free, but not for use yet.
    """

    kept: float
    passing: float
    waiting: float = 0.0

    @property
    def total(self) -> float:
        return self.kept + self.passing


@dataclass(frozen=True)
class Moment:
    """Of a step.

    Attributes:
        activations, gathered: bytes.
        done: share of the gradients that are complete.
    """

    activations: int
    gathered: int
    done: float
    is_forward: bool

    @property
    def passing(self) -> int:
        return self.activations + self.gathered


def peak_of(
    run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, machine: Hardware, training: Training
) -> Peak:
    """What the plan's kinds come to in another program, which keeps some of them at other times.

    - `deepspeed`: see `_deepspeed`.
    - `torch` (FSDP, Trainer without an engine, torchtune), `autocast`: see `_torch`.
    """
    moments = list(_moments(estimate, model, machine, training, prefetches="fsdp" in run))
    peaks = (_deepspeed if run["program"] == "deepspeed" else _torch)(run, estimate, model, machine.ranks, moments)
    return max(peaks, key=lambda peak: peak.total)


def _moments(
    estimate: Estimate, model: PlannedModel, machine: Hardware, training: Training, *, prefetches: bool
) -> Iterator[Moment]:
    """All of them: an estimate has the one that is the worst with hf_zero's gradients.

    Args:
        prefetches: backward begins with a gather of the last layer (FSDP's root has a hook on the loss), where hf_zero
            waits until the loss's own backward has passed.
    """
    answers = resolve(estimate.config, model=model.view, world_size=machine.ranks)
    keys, checkpointing = answers.section(TilingKeys), estimate.candidate.checkpointing
    tiling = Tiling(mlp=keys.tiled_mlp, loss=keys.tiled_loss)
    seen = traced(model, training, checkpointing=checkpointing, tiling=tiling, on_cpu=not machine.separate)
    gathered, ahead = [0] * len(seen.segments), 0
    if estimate.candidate.stage == 3:
        setting = setting_of(answers, optimizer_size(training), machine)
        specs, policy = trained_specs(model.module), answers.zero.keys
        units = plan_units(model, specs, setting.shard_ranks, policy, looks_far=setting.looks_far)
        gathered = units.live(seen)
        ahead = max((unit.whole_bytes for unit in units.units), default=0) if prefetches else 0
    goes_out = checkpointing and answers.section(ActivationCheckpointing).cpu_checkpointing
    away = kept_by_layers(model, training) if goes_out else 0
    numels = {name: parameter.numel() for name, parameter in model.module.named_parameters()}
    done, is_forward, at_loss = 0, True, -1
    for segment, whole in zip(seen.segments, gathered, strict=True):
        is_forward = is_forward and segment.event != "loss"
        at_loss = whole if segment.event == "loss" else at_loss if at_loss == whole else -1
        done += numels.get(segment.name, 0) if segment.event == "gradient" else 0
        share = min(1.0, done / max(1, model.num_trained))
        yield Moment(max(0, segment.peak - away), whole + (ahead if at_loss == whole else 0), share, is_forward)


def _sums(run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, ranks: int) -> float:
    """Bytes of the sums of gradients that a rank owns when all are there. Of one micro-batch's hf_zero's kinds have as
    many as are there when most is taken."""
    if run["accumulation"] > 1 or estimate.candidate.optimizer is not None:
        return float(estimate.memory.device.get(GRADIENTS, 0))
    return model.dtype.itemsize * model.num_trained / (ranks if estimate.candidate.stage else 1)


def _deepspeed(
    run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, ranks: int, moments: Sequence[Moment]
) -> Iterator[Peak]:
    """Two moments.

    - Sums of gradients keep their room between steps (`grad_partitions_flat_buffer` in its stage3.py).

    - An update begins with a copy of gradients in the masters' fp32: of all that a rank owns at stages 1 and 2, of a
      sub-group at stage 3 (`_prepare_fp32_grad_for_sub_group` in its stage3.py). Activations have gone.
    - Masters are copies, even if they have the weights' dtype (`_create_fp32_partitions` clones them); hf_zero's are
      then the weights.
    - A model that is not made under `zero.Init` has torch's own `linear`, for which autograd keeps a transposed view of
      each gathered weight: until backward has passed, it stays whole. Under zero.Init `linear` is one that keeps the
      parameter alone (`LinearFunctionForZeroStage3` in linear.py). Checkpointed layers are gathered anew.
    """
    device, total, weight = estimate.memory.device, estimate.memory.device_total, model.dtype.itemsize
    worst = device.get(ACTIVATIONS, 0) + device.get(GATHERED, 0)
    gradients = _sums(run, estimate, model, ranks)
    kept_in_16_bits = (estimate.config.get("bf16") or {}).get("bf16_master_weights_and_grads")
    on_device = estimate.candidate.optimizer is None
    kept = total - worst - device.get(GRADIENTS, 0) + gradients
    kept += gradients if on_device and kept_in_16_bits and estimate.candidate.stage == 3 else 0
    whole = 0
    if estimate.candidate.stage == 3 and not run.get("zero_init", True) and not run["checkpointing"]:
        whole = weight * model.num_parameters - _embedding_bytes(model)
    yield Peak(kept, max(moment.activations + max(moment.gathered, whole) for moment in moments))
    group = run["ds"]["zero_optimization"].get("sub_group_size", SUB_GROUP_NUMEL)
    owned = min(group, gradients / 2) if estimate.candidate.stage == 3 else gradients / 2
    yield Peak(kept, 4 * owned if on_device and not kept_in_16_bits else 0)


def _torch(
    run: Mapping[str, Any], estimate: Estimate, model: PlannedModel, ranks: int, moments: Sequence[Moment]
) -> Iterator[Peak]:
    """Those of forward and backward, and the update.

    - Gradients are made by backward and given up after the update: in forward there are those of the micro-batches
      before, if there are any.
    - torch's Adam in its `foreach` form, its default on GPUs, makes a square root of all second moments at once
      (`_multi_tensor_adam` in torch/optim/adam.py): as much as gradients take.
    - FSDP1 gathers into the flat parameter and reduces from the flat gradient, where hf_zero has buffers; FSDP2 copies,
      as hf_zero does. Embedding and output are in the root's unit, which stays whole between forward and backward.
    - FSDP with mixed precision has fp32 shards alone of what is trained, which are cast as they are gathered.
    - FSDP's gradients have the dtype of its shards (`_cast_grad_to_param_dtype` in _runtime_utils.py of FSDP1).
    - FSDP1 under `no_sync` reduces no gradients: between an update's micro-batches they stay whole. They are of flat
      parameters: those of frozen weights beside adapters too (`_validate_frozen_params` in _wrap_utils.py warns of it).
    - DistributedDataParallel copies gradients to buckets, which stay (`gradient_as_bucket_view`, off by default).
    - Before FSDP1 had `limit_all_gathers` on by default (PyTorch 2.1, pull request 104900) the host asked for as many
      units as it came to; they are free when the device has used them, and until then take room of the allocator's.
    - A loop that gives up gradients between forward and backward has those of the step before in the forward.
    - PEFT 0.12 and later keep adapters in fp32 (`autocast_adapter_dtype`).
    """
    device, weight = estimate.memory.device, model.dtype.itemsize
    gradients, shards = _sums(run, estimate, model, ranks), ranks if estimate.candidate.stage == 3 else 1
    root, kept = 0.0, float(device.get(PARAMETERS, 0) + device.get(OPTIMIZER, 0))
    bf16 = estimate.config.get("bf16") or {}
    if "fsdp" in run:
        if bf16.get("enabled") and not bf16.get("bf16_master_weights_and_grads"):
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
    for moment in moments:
        is_late = bool(run.get("late_zero_grad")) and moment.is_forward
        here = summed if run["accumulation"] > 1 else gradients if is_late else moment.done * gradients
        waiting = weight * model.num_parameters - moment.gathered if run.get("limit_all_gathers") is False else 0
        yield Peak(kept + here, moment.passing + root, waiting)
    yield Peak(kept + gradients, gradients if run.get("update") == "foreach" else 0)


def _unreduced_bytes(model: PlannedModel) -> float:
    """Of gradients of all flat parameters: adapters are in the layers' units, and none in the root's."""
    if not model.lora_rank:
        return model.dtype.itemsize * model.num_trained
    base: Any = model.module.get_base_model()  # type: ignore[operator]
    ends = {id(end.weight): end.weight for end in (base.get_input_embeddings(), base.get_output_embeddings())}
    return model.dtype.itemsize * (model.num_parameters - sum(weight.numel() for weight in ends.values()))


def _embedding_bytes(model: PlannedModel) -> int:
    """Of the input's, if it is not the output's too: that is in use where most is."""
    base: Any = model.module.get_base_model() if model.lora_rank else model.module  # type: ignore[operator]
    first, last = base.get_input_embeddings(), base.get_output_embeddings()
    tied = last is None or bool(getattr(model.config, "tie_word_embeddings", False))
    return 0 if tied else int(first.weight.numel() * first.weight.itemsize)


def metered(peak: Peak, meter: str, segments: str = "fixed", limit: float = math.inf) -> float:
    """What a program would have seen of its tensors.

    Args:
        segments: "expandable" where the allocator may grow them, as torchtune and torchtitan have it: few holes.
        limit: bytes of a device that the allocator can have; before it fails it gives back what nothing uses.
    """
    if meter == "allocated":
        return peak.total
    holes = SCATTERED * peak.passing if segments == "fixed" else peak.total * FRAGMENTS / (1 - FRAGMENTS)
    reserved = max(peak.total, min(peak.total + holes + peak.waiting, limit))
    return reserved + (CONTEXT_BYTES if meter == "device" else 0)


def published_rate(run: Mapping[str, Any]) -> float | None:
    """Tokens per second of one GPU, from whatever the source counts."""
    if "rate" not in run:
        return None
    ranks, rate = run["gpus_per_node"] * run["nodes"], float(run["rate"])
    update = run["length"] * run["micro_batch"] * run["accumulation"]  # of one rank
    rates = {
        "samples/s": rate * run["length"] / ranks,
        "s/update": update / rate,
        "tokens/s": rate / ranks,
        "tokens/s/GPU": rate,
    }
    return rates[run["rate_unit"]]


def predicted_rate(each: Compared) -> float:
    """Tokens per second of one GPU."""
    return sum(each.rates) / 2 / (each.run["gpus_per_node"] * each.run["nodes"])


def orders(found: Sequence[Compared]) -> Iterator[tuple[Compared, Compared, str]]:
    """Pairs of runs of one source that differ in rate: whether the faster one is predicted to be faster ("right"),
    slower ("wrong"), or as fast as a plan can tell ("alike")."""
    for first, second in combinations(found, 2):
        rates = published_rate(first.run), published_rate(second.run)
        if first.run["address"] != second.run["address"] or rates[0] is None or rates[1] is None:
            continue
        slow, fast = (first, second) if rates[0] < rates[1] else (second, first)
        if max(rates[0], rates[1]) < RATE_DIFFERS * min(rates[0], rates[1]):
            continue
        ratio = predicted_rate(fast) / predicted_rate(slow)
        yield slow, fast, "right" if ratio > ALIKE else "wrong" if ratio < 1 / ALIKE else "alike"


def within(found: Sequence[Compared], bound: float = CLOSE) -> tuple[int, int]:
    """(runs whose peak is predicted as closely as that, runs with a peak); none that must only lie between two."""
    offs = _offs(found)
    return sum(abs(off) <= bound for off in offs), len(offs)


def _offs(found: Sequence[Compared]) -> list[float]:
    return [each.off for each in found if each.off is not None and each.peaks[0] == each.peaks[1]]


def section(found: Sequence[Compared]) -> str:
    """The table, and what it comes to."""
    lines = ["| run | published | predicted | | tokens/s of a GPU | predicted |", "|" + " --- |" * 6]
    lines += [f"| {' | '.join(_cells(each))} |" for each in found]
    return "\n".join([_words(found), *lines]) + "\n"


def _cells(each: Compared) -> Iterator[str]:
    run = each.run
    held = f" **(held out, set {set_of(run)})**" if each.is_held_out else f" (set {set_of(run)})"
    differs = f" ({run['differs']})" if "differs" in run else ""
    yield f"[{run['model']}]({run['address']}): {run['settings']}{differs}{held}"
    least, most = (f"{size / 1e9:.1f}" for size in each.peaks)
    between = least if each.peaks[0] == each.peaks[1] else f"{least} to {most}"
    if each.published is None or each.off is None:
        yield from ("", "", "")
    else:
        yield from (f"{each.published / 1e9:.1f} GB", f"{between} GB", f"{each.off:+.1%}" if each.off else "between")
    rate = published_rate(run)
    yield from ("", "") if rate is None or not run["length"] else (f"{rate:,.0f}", f"{predicted_rate(each):,.0f}")


def _words(found: Sequence[Compared]) -> str:
    lines = []
    for number in SEEDS:
        for name, is_held_out in (("not held out", False), ("held out", True)):
            rows = [each for each in found if set_of(each.run) == number and each.is_held_out == is_held_out]
            lines += [f"- Set {number}, {name}: {_outcome(rows)}"] if rows else []
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    return "\n".join([*lines, f"- Traced with {versions}.", ""])


def _outcome(rows: Sequence[Compared]) -> str:
    (close, peaks), told = within(rows), Counter(verdict for _, _, verdict in orders(rows))
    tensors = within([each for each in rows if each.run["meter"] == "allocated"])
    middle = f"{median(abs(each) for each in _offs(rows)):.1%}" if peaks else "none"
    seen = f"{tensors[0]} of {tensors[1]} of what tensors take"
    reserved = f"{close - tensors[0]} of {peaks - tensors[1]} of what the allocator or the driver shows"
    words = f"of {len(rows)} runs, {close} of {peaks} predicted peaks are within {CLOSE:.0%} ({seen}; {reserved}), "
    words += f"the median error is {middle}"
    if not told:
        return f"{words}."
    return (
        f"{words}; of {told.total()} pairs of one source that differ by more than a tenth in rate the order is right "
        f"for {told['right']}, wrong for {told['wrong']}, and not told apart for {told['alike']}."
    )


def page(text: str, inside: str) -> str:
    """The page with its section replaced."""
    return page_with(text, inside, "python -m bench.published --write")


def main() -> None:
    """Print the table, or put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", choices=["all", "compared", "held-out"], default="all")
    parser.add_argument("--held-out", action="store_true", help="with held-out runs of sealed lots")
    parser.add_argument("--write", action="store_true", help="into docs/planning.md")
    arguments = parser.parse_args()
    rows = "all" if arguments.write else arguments.rows
    inside = section(list(compared(rows, opened=arguments.held_out)))
    if arguments.write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), inside), encoding="utf-8")
    else:
        sys.stdout.write(inside)


if __name__ == "__main__":
    main()
