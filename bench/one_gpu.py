"""The largest model of each way that one GPU and its host memory can train, and its speed by the event model.

    python -m bench.one_gpu             # the tables
    python -m bench.one_gpu --write     # write the tables of docs/offload.md

Nothing here is measured: tokens per second are those of the schedule at a machine's usual speeds (`plan` computes the
same). One row has figures published by others, with their sources.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bench.surroundings import ROOT, page_with
from hf_zero.planning.candidates import Training, training_of
from hf_zero.planning.choose import given_estimates
from hf_zero.planning.estimate import Estimate
from hf_zero.planning.event_model import LANES
from hf_zero.planning.machine import hardware
from hf_zero.planning.model import PlannedModel, load_model

PAGE = ROOT / "docs" / "offload.md"
COMMAND = "python -m bench.one_gpu --write"
MODELS = ("120b", "70b", "32b", "14b", "7b", "3b", "1b")
MACHINES = (
    *(("4090", memory) for memory in (64, 128, 256)),
    *(("h100-pcie", memory) for memory in (128, 256)),
    ("h200", 256),
    ("gh200", 480),
)
LENGTH = 4096
MICRO_BATCHES = (16, 8, 4, 2, 1)
_PLACE = {"device": "cpu", "pin_memory": True}
_STREAMED: dict[str, Any] = {
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "offload_param": _PLACE},
}
WAYS: dict[str, dict[str, Any]] = {
    "both offloads": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": _PLACE, "offload_optimizer": _PLACE},
    },
    "streaming": _STREAMED | {"hf_zero": {"streaming": {"enabled": True}}},
    'with `"states": "bf16"`': _STREAMED | {"hf_zero": {"streaming": {"enabled": True, "states": "bf16"}}},
    "with `AdamW8bit`": _STREAMED
    | {"hf_zero": {"streaming": {"enabled": True}}, "optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-5}}},
}
PUBLISHED = (
    (
        "[MegaTrain](https://github.com/DLYuanGod/MegaTrain), Qwen2.5 7B, H100: 272 TFLOPS (batch not given)",
        ("h100", 1000, "7b", "streaming"),
    ),
    (
        "[MegaTrain](https://arxiv.org/abs/2604.05091), 14B, H200: 1.84 times ZeRO-3 with both offloads of DeepSpeed",
        ("h200", 1500, "14b", "streaming"),
    ),
    (
        "[SuperOffload](https://arxiv.org/abs/2509.21271), Qwen3 14B, GH200: up to 600 TFLOPS (neither batch nor "
        "how they are counted is given)",
        ("gh200", 480, "14b", "both offloads"),
    ),
)


@dataclass(frozen=True)
class Fit:
    """A model on a machine, at the largest micro-batch that fits."""

    model: str
    micro_batch: int
    estimate: Estimate
    tokens_per_s: float
    parameters: float

    @property
    def tflops(self) -> float:
        """TFLOP/s of the model: 6 FLOPs per parameter and token, without recomputation by checkpointing."""
        return 6 * self.parameters * self.tokens_per_s / 1e12


@lru_cache(maxsize=1)
def _model(name: str) -> PlannedModel:
    return load_model(name, "bf16", 0)


def fit(gpu: str, host_gb: int, name: str, way: str) -> Fit | None:
    """None if not even one sample fits."""
    machine = hardware({"gpu": gpu, "gpus_per_node": 1, "nodes": 1, "host_memory": f"{host_gb}G"})
    model = _model(name)
    for micro_batch in MICRO_BATCHES:
        given = {**WAYS[way], "train_micro_batch_size_per_gpu": micro_batch}
        asked = Training(length=LENGTH, micro_batch=micro_batch, checkpointing=True)
        training = training_of(given, asked, machine.ranks)
        (found,) = given_estimates(model, machine, training, given)
        if found.fits:
            return Fit(name, micro_batch, found, found.tokens_per_s, model.num_parameters)
        if any("host memory" in each for each in found.lacks):
            return None  # no smaller micro-batch changes this
    return None


def largest() -> Iterator[tuple[str, int, dict[str, Fit]]]:
    """The results of each way, by machine."""
    found: dict[tuple[str, int, str], Fit] = {}
    for name in MODELS:  # traces one model at a time
        for gpu, memory in MACHINES:
            for way in WAYS:
                if (gpu, memory, way) not in found and (fits := fit(gpu, memory, name, way)):
                    found[gpu, memory, way] = fits
    for gpu, memory in MACHINES:
        yield gpu, memory, {way: found[gpu, memory, way] for way in WAYS if (gpu, memory, way) in found}


def cell(fits: Fit | None) -> str:
    """A cell of the first table."""
    return "-" if fits is None else f"{fits.model.upper()}: {_figures(fits)}"


def _figures(fits: Fit) -> str:
    lane = LANES[fits.estimate.bound]
    bound = "" if lane == LANES["compute"] else f", bound by {lane}"
    return f"{float(f'{fits.tokens_per_s:.2g}'):,.0f} tokens/s, {fits.tflops:.0f} TFLOPS{bound}"


def section() -> str:
    """Both tables."""
    lines = [f"| GPU, GB of host memory | {' | '.join(WAYS)} |", "|" + " --- |" * (1 + len(WAYS))]
    for gpu, memory, by_way in largest():
        lines.append(f"| {gpu}, {memory} | {' | '.join(cell(by_way.get(way)) for way in WAYS)} |")
    lines += ["", "| published | predicted |", "| --- | --- |"]
    for words, (gpu, memory, name, way) in PUBLISHED:
        ours, beside = fit(gpu, memory, name, way), fit(gpu, memory, name, "both offloads")
        assert ours is not None and beside is not None
        ratio = f"; {ours.tokens_per_s / beside.tokens_per_s:.2f} times both offloads" if way == "streaming" else ""
        lines.append(f"| {words} | {way}: {_figures(ours)}{ratio} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables of docs/offload.md")
    if parser.parse_args().write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), section(), COMMAND), encoding="utf-8")
    else:
        sys.stdout.write(section())


if __name__ == "__main__":
    main()
