"""Compares predictions of `plan` with measurements that others have published for runs on GPUs.

    python -m bench.published                       # the table
    python -m bench.published --rows compared       # without held-out runs
    python -m bench.published --held-out            # with held-out runs of sealed sets: once, at the end
    python -m bench.published --write               # into docs/published_runs.md

`published.json` has the runs: where each is published, its model, machine and settings as a ds.json, and what was
measured. Sets are collected one after another, each before any of its runs is predicted. A random half of each set,
with a fixed seed, is held out: no formula or constant is chosen by these runs, so their errors are representative of
other runs.

Programs measure different things, which is given for each run as its `meter`: memory of tensors (`allocated`), memory
that the allocator has reserved (`reserved`), or memory that the driver reports (`device`); `active` is memory of
tensors, including blocks that wait for another stream. The difference between reserved and allocated memory comes from
a replay (`bench/allocator.py`). A run with `selective` checkpointing, which hf_zero does not have, must lie between the
plans with and without checkpointing.
"""

from __future__ import annotations

import argparse
import json
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

from bench.published_peaks import left_over, metered, peaks_of
from bench.published_surroundings import SHAPES, as_it_ran
from bench.surroundings import ROOT, page_with
from hf_zero.planning.candidates import Training, training_of
from hf_zero.planning.choose import ALIKE, given_estimates
from hf_zero.planning.estimate import Estimate
from hf_zero.planning.machine import CONTEXT_BYTES, Hardware, hardware
from hf_zero.planning.model import PlannedModel, load_model

RUNS = Path(__file__).with_name("published.json")
PAGE = ROOT / "docs" / "published_runs.md"
SEEDS = {1: 20261125, 2: 20261126, 3: 20261127, 4: 20261128}  # set -> seed that selects its held-out half
# Sets whose held-out runs are only predicted with --held-out: a new set, as long as rules are being changed.
SEALED: frozenset[int] = frozenset()
UNITS = {"B": 1.0, "MiB": float(2**20), "GB": 1e9, "GiB": float(2**30)}
CLOSE = 0.10
RATE_DIFFERS = 1.10  # the order of two runs is only compared if their published rates differ by this ratio


@dataclass(frozen=True)
class Compared:
    """A published run and its predictions: minimum and maximum if its checkpointing is `selective`.

    Attributes:
        peaks: bytes as the run's meter measures them.
        rates: tokens per second of all ranks.
    """

    run: Mapping[str, Any]
    is_held_out: bool
    peaks: tuple[float, float]
    rates: tuple[float, float]

    @property
    def published(self) -> float | None:
        """Published peak in bytes."""
        return self.run["peak"] * UNITS[self.run["unit"]] if "peak" in self.run else None

    @property
    def off(self) -> float | None:
        """Relative error of the prediction; 0 between the two of a pair."""
        if self.published is None:
            return None
        nearest = min(max(self.published, self.peaks[0]), self.peaks[1])
        return nearest / self.published - 1


def contents() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(RUNS.read_text(encoding="utf-8"))
    return values


def set_of(run: Mapping[str, Any]) -> int:
    """Return the number of the set that a run belongs to."""
    return int(run.get("set", 1))


def held_out(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the ids of the held-out runs: a random half of each set."""
    chosen: set[str] = set()
    for number, seed in SEEDS.items():
        names = sorted(run["id"] for run in runs if set_of(run) == number)
        chosen.update(random.Random(seed).sample(names, len(names) // 2))
    return chosen


def compared(rows: str = "all", *, opened: bool = False) -> Iterator[Compared]:
    """Yield predictions for all runs, for those that are not held out ("compared"), or for held-out ones.

    Args:
        opened: include held-out runs of sealed sets.
    """
    published = contents()
    chosen = held_out(published["runs"])
    for run in published["runs"]:
        is_held_out = run["id"] in chosen
        if is_held_out and set_of(run) in SEALED and not opened:
            continue
        if rows == "all" or is_held_out == (rows == "held-out"):
            yield _compared(run, published["models"][run["model"]], is_held_out)


def _compared(run: Mapping[str, Any], config: Mapping[str, Any], is_held_out: bool) -> Compared:
    machine = hardware({key: run[key] for key in ("gpu", "gpus_per_node", "nodes", "device_memory") if key in run})
    training = training_of(_ds_config(run), _training(run), machine.ranks)
    with as_it_ran(run):
        shape, surroundings = json.dumps(_shape(run, config)), json.dumps(_surroundings(run))
        model = _model(shape, training.precision, run["lora_rank"], surroundings)
        estimates = _estimates(run, model, machine, training)
        seen = [list(peaks_of(run, each, model, machine, training)) for each in estimates]
        left = [left_over(run, each, model, machine, training) for each in estimates]
    limit = machine.device_memory / UNITS["GB"] * UNITS["GiB"] - CONTEXT_BYTES  # a GPU of 80 "GB" has 80 GiB
    peaks = sorted(max(metered(peak, run["meter"], some, limit) for peak in each) for each, some in zip(seen, left))
    rates = sorted(each.tokens_per_s for each in estimates)
    return Compared(run, is_held_out, (peaks[0], peaks[-1]), (rates[0], rates[-1]))


def _estimates(
    run: Mapping[str, Any], model: PlannedModel, machine: Hardware, training: Training
) -> tuple[Estimate, ...]:
    return tuple(given_estimates(model, machine, training, _ds_config(run)))


def _shape(run: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's config with the attention implementation of the run."""
    return {**config, **({"attn_implementation": run["attention"]} if "attention" in run else {})}


def _surroundings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what traces of a model depend on, in addition to `Training`."""
    keys = (
        "program",
        "autocast",
        "loss",
        "softmax",
        "lora_targets",
        "lora_form",
        "lora_dropout",
        "copies_attention",
        "clamps_scores",
        *SHAPES,
    )
    return {key: run[key] for key in keys if key in run}


def _ds_config(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's ds.json, with batch sizes "auto"; under autocast weights are in fp32; FSDP keeps no unit
    gathered from forward to backward, unless it is configured to; offloaded states are updated in step()."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    ds = {"bf16": {"enabled": True}, **run["ds"], **dict.fromkeys(keys, "auto")}
    if "fsdp" in run:
        reuse = 0 if run.get("reshard_after_forward", True) else 10**15
        live = {"stage3_max_live_parameters": 10**15} if reuse else {}
        ds["zero_optimization"] = {**ds["zero_optimization"], "stage3_max_reuse_distance": reuse, **live}
    if "offload_optimizer" in ds.get("zero_optimization", {}):
        ds["hf_zero"] = {**ds.get("hf_zero", {}), "overlap_step": False}
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
    """Load a model. `surroundings` is a part of the cache key, because a model's traces depend on `as_it_ran`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(config, encoding="utf-8")
        return load_model(str(path), precision, lora_rank)


def published_rate(run: Mapping[str, Any]) -> float | None:
    """Return tokens per second and GPU, from the unit of the source."""
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
    """Return tokens per second and GPU."""
    return sum(each.rates) / 2 / (each.run["gpus_per_node"] * each.run["nodes"])


def orders(compared_runs: Sequence[Compared]) -> Iterator[tuple[Compared, Compared, str]]:
    """Yield pairs of runs of one source that differ in rate, and whether the faster one is predicted to be faster
    ("right"), slower ("wrong"), or about as fast ("alike")."""
    for first, second in combinations(compared_runs, 2):
        rates = published_rate(first.run), published_rate(second.run)
        if first.run["address"] != second.run["address"] or rates[0] is None or rates[1] is None:
            continue
        slow, fast = (first, second) if rates[0] < rates[1] else (second, first)
        if max(rates[0], rates[1]) < RATE_DIFFERS * min(rates[0], rates[1]):
            continue
        ratio = predicted_rate(fast) / predicted_rate(slow)
        yield slow, fast, "right" if ratio > ALIKE else "wrong" if ratio < 1 / ALIKE else "alike"


def within(compared_runs: Sequence[Compared], bound: float = CLOSE) -> tuple[int, int]:
    """Return (number of runs whose error is within `bound`, number of runs with a peak), without `selective` runs."""
    offs = _offs(compared_runs)
    return sum(abs(off) <= bound for off in offs), len(offs)


def _offs(compared_runs: Sequence[Compared]) -> list[float]:
    return [each.off for each in compared_runs if each.off is not None and each.peaks[0] == each.peaks[1]]


def section(compared_runs: Sequence[Compared]) -> str:
    """Return the summary and the table."""
    lines = ["| run | published | predicted | | tokens/s of a GPU | predicted |", "|" + " --- |" * 6]
    lines += [f"| {' | '.join(_cells(each))} |" for each in compared_runs]
    return "\n".join([_words(compared_runs), *lines]) + "\n"


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


def _words(compared_runs: Sequence[Compared]) -> str:
    lines = []
    for number in SEEDS:
        for name, is_held_out in (("not held out", False), ("held out", True)):
            rows = [each for each in compared_runs if set_of(each.run) == number and each.is_held_out == is_held_out]
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
    """Return the page with its section replaced."""
    return page_with(text, inside, "python -m bench.published --write")


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", choices=["all", "compared", "held-out"], default="all")
    parser.add_argument("--held-out", action="store_true", help="with held-out runs of sealed sets")
    parser.add_argument("--write", action="store_true", help="into docs/published_runs.md")
    arguments = parser.parse_args()
    rows = "all" if arguments.write else arguments.rows
    inside = section(list(compared(rows, opened=arguments.held_out)))
    if arguments.write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), inside), encoding="utf-8")
    else:
        sys.stdout.write(inside)


if __name__ == "__main__":
    main()
