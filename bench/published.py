"""What `plan` says of runs on GPUs that others have published, beside what they measured.

    python -m bench.published                       # the table
    python -m bench.published --rows compared       # without the runs that are held out
    python -m bench.published --write               # into docs/planning.md

`published.json` has the runs: where each is published, its model, machine and settings as a ds.json, and what was
measured. A lot with a fixed seed holds half of them out: no formula or constant is chosen by them, so that their errors
are those that another run will have.

Programs measure different things, which is said of each run as its `meter`: what tensors take (`allocated`), what the
allocator has taken for them (`reserved`), or what the driver shows (`device`). The last two are more than a plan's sum
by what a plan leaves free (`hf_zero.planning.machine`). A run whose checkpointing is `selective`, which hf_zero does not
have, must lie between a plan with and one without.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.surroundings import ROOT
from hf_zero.planning.candidates import Training, training_of
from hf_zero.planning.choose import Estimate, given_estimates, optimizer_size
from hf_zero.planning.machine import CONTEXT_BYTES, FRAGMENTS, Hardware, hardware
from hf_zero.planning.model import PlannedModel, load_model

RUNS = Path(__file__).with_name("published.json")
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- begin: python -m bench.published --write -->\n", "<!-- end -->\n"
SEED = 20261125  # of the lot
UNITS = {"GB": 1e9, "GiB": float(2**30)}
CLOSE = 0.10
RATE_DIFFERS = 1.10  # runs of a source whose published rates are closer than that have no order to predict


@dataclass(frozen=True)
class Compared:
    """A published run and what is predicted of it; of `selective` checkpointing the least and the most.

    Attributes:
        peaks: bytes, as the run's meter has them.
        rates: updates per second of a rank's micro-batches, in the tokens of all ranks per second.
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


def held_out(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Half of the runs, by lot."""
    names = sorted(run["id"] for run in runs)
    return set(random.Random(SEED).sample(names, len(names) // 2))


def compared(rows: str = "all") -> Iterator[Compared]:
    """`rows`: all, compared (which are not held out), or held-out."""
    found = contents()
    chosen = held_out(found["runs"])
    for run in found["runs"]:
        is_held_out = run["id"] in chosen
        if rows == "all" or is_held_out == (rows == "held-out"):
            yield _compared(run, found["models"][run["model"]], is_held_out)


def _compared(run: Mapping[str, Any], config: Mapping[str, Any], is_held_out: bool) -> Compared:
    machine = hardware({"gpu": run["gpu"], "gpus_per_node": run["gpus_per_node"], "nodes": run["nodes"]})
    training = training_of(run["ds"], _training(run), machine.ranks)
    model = _model(json.dumps(config), run["lora_rank"])
    estimates = _estimates(run, model, machine, training)
    peaks = sorted(metered(each.memory.device_total, run["meter"]) for each in estimates)
    rates = sorted(each.tokens_per_s(training, machine.ranks) for each in estimates)
    return Compared(run, is_held_out, (peaks[0], peaks[-1]), (rates[0], rates[-1]))


def _estimates(
    run: Mapping[str, Any], model: PlannedModel, machine: Hardware, training: Training
) -> tuple[Estimate, ...]:
    config = {**run["ds"], **({} if "bf16" in run["ds"] else {"bf16": {"enabled": True}})}
    return tuple(given_estimates(model, machine, training, config, optimizer_size(training)))


def _training(run: Mapping[str, Any]) -> Training:
    checkpointing = None if run["checkpointing"] == "selective" else run["checkpointing"]
    return Training(
        length=max(1, run["length"]),
        micro_batch=run["micro_batch"],
        accumulation=run["accumulation"],
        checkpointing=checkpointing,
    )


@lru_cache(maxsize=4)
def _model(config: str, lora_rank: int) -> PlannedModel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(config, encoding="utf-8")
        return load_model(str(path), "bf16", lora_rank)


def metered(num_bytes: float, meter: str) -> float:
    """What a program would have seen of so many bytes of tensors."""
    if meter == "allocated":
        return num_bytes
    reserved = num_bytes / (1 - FRAGMENTS)
    return reserved if meter == "reserved" else reserved + CONTEXT_BYTES
