"""Lower bounds of kernels' times on GPUs, computed from their machine code. Never measured.

A kernel takes at least as long as its bytes at the card's published bandwidth, as its instructions at the published
rates of their pipes, and as its loads if registers allow too few warps to hide their latency. The counts are those of a
stored result of `python -m bench.kernel_report` (`kept()`). Imports only the standard library.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
LATENCY = 0.6e-6  # seconds of a load from device memory: an assumption, which bounds nothing here


@dataclass(frozen=True)
class Card:
    """A data sheet: bytes per second, multiprocessors or compute units, their clock, and their results per clock.

    `rates` come from the CUDA C++ Programming Guide ("Throughput of Native Arithmetic Instructions") and AMD's CDNA 3
    white paper; "issue" is four warps of 32 threads. A pipe without a rate sets no limit.
    """

    name: str
    target: str  # whose machine code it runs
    bandwidth: float
    processors: int
    hertz: float
    rates: dict[str, int]


_AMPERE = {"issue": 128, "fp32": 64, "alu": 64, "special": 16}
_LATER = {**_AMPERE, "fp32": 128}
CARDS = (
    Card("A100", "cuda:80", 2.039e12, 108, 1.41e9, _AMPERE),
    Card("H100", "cuda:90", 3.35e12, 132, 1.98e9, _LATER),
    Card("H200", "cuda:90", 4.8e12, 132, 1.98e9, _LATER),
    Card("B200", "cuda:100", 8.0e12, 148, 1.965e9, _LATER),
    Card("MI300X", "hip:gfx942", 5.3e12, 304, 2.1e9, {"alu": 64, "special": 16}),
    Card("4090", "cuda:80", 1.008e12, 128, 2.52e9, _LATER),  # its native code would be that of 8.9
)
_THREADS = 2048  # of a multiprocessor at full occupancy
SIZES = {"1.5B": 1.5e9, "8B": 8e9, "32B": 32e9}


def kept(folder: Path = RESULTS) -> dict[str, Any]:
    """The newest result of `bench.kernel_report --name kernels`."""
    run: dict[str, Any] = json.loads(sorted(folder.glob("*-kernels.json"))[-1].read_text(encoding="utf-8"))
    return run


def bounds(row: dict[str, Any], card: Card) -> dict[str, float]:
    """Seconds per element by limiting factor; `row` is one of the result, with bytes per element."""
    speed = card.processors * card.hertz
    found = {"bytes": row["num_bytes"] / card.bandwidth}
    for pipe, count in row["pipes_per_element"].items():
        if pipe in card.rates:
            found[pipe] = count / (card.rates[pipe] * speed)
    threads = _THREADS * row["occupancy"] * card.processors
    found["latency"] = LATENCY / (threads * row["elements_per_thread"])
    return found


def bound(row: dict[str, Any], card: Card) -> tuple[float, str, float]:
    """(minimum seconds per element, the limiting factor, the ratio to the time of its bytes)."""
    found = bounds(row, card)
    name = max(found, key=lambda key: found[key])
    return found[name], name, found[name] / found["bytes"]


def row_of(run: dict[str, Any], card: Card, kernel: str, num_bytes: float) -> dict[str, Any]:
    """The slowest of the kernel's variants that move this many bytes per element."""
    fitting = [row for row in run["found"][card.target] if row["kernel"] == kernel and row["num_bytes"] == num_bytes]
    return max(fitting, key=lambda row: bound(row, card)[0])


def seconds(run: dict[str, Any], card: Card, kernel: str, num_bytes: float) -> float:
    """Minimum seconds per element."""
    return bound(row_of(run, card, kernel, num_bytes), card)[0]


# What bench.gpu_suite times: the kernels of a row, or bytes per element if none of our kernels is involved.
_QUANTISED = {8: 3.015625, 4: 2.515625}
TIMED: dict[str, list[tuple[str, float]] | float] = {
    "adam, one pass": [("adam._adam", 28.0)],
    "adam, stochastic": 28.0,
    "torch fused AdamW and its casts": 40.0,
    "cast, unscale, fused AdamW, cast (as DeepSpeed's step)": 48.0,
    "adam with 8-bit states": [("adam8._adam8", 16.0)],
    "lion": [("lion._lion", 20.0)],
    "lamb, 64 tensors": [("lamb._moments", 22.0), ("lamb._apply", 18.0)],
    "sum of squares, bf16": [("norm._squares", 2.0)],
    "pack signs (with its norm)": 24.125,
    "unpack signs": [("signs._unpack", 4.125)],
    **{f"dequantise {bits} bits": [("quantize._read", moved)] for bits, moved in _QUANTISED.items()},
    "quantise to 8 bits": [("quantize._write", _QUANTISED[8])],
    "quantise to 4 bits": _QUANTISED[4],
    "quantise to 4 bits, with error feedback": [("quantize._write", 4.546875)],
    "quantise to 8 bits, with error feedback": _QUANTISED[8] + 2 * (_QUANTISED[8] - 2),
    **{f"add up four messages of {bits} bits": 2 + 4 * (moved - 2) for bits, moved in _QUANTISED.items()},
}


def card_of(device: str) -> Card | None:
    """Looks up the name that the driver reports: "NVIDIA H100 80GB HBM3"."""
    words = device.upper().replace("-", " ").replace("_", " ").split()
    return next((card for card in CARDS if card.name.upper() in words), None)


def timed(run: dict[str, Any], card: Card, name: str) -> float:
    """Minimum seconds per element of a row of bench.gpu_suite."""
    what = TIMED[name]
    return what / card.bandwidth if isinstance(what, float) else sum(seconds(run, card, *each) for each in what)


# The page's tables

_PIPES = {"bytes": "", "issue": "issue", "fp32": "fp32", "alu": "alu", "special": "special", "latency": "latency"}
# (what, kernel, bytes per element)
SHOWN = (
    ("AdamW, fp32 masters and states, bf16 gradient and weight", "adam._adam", 28.0),
    ("AdamW, bf16 weights rounded stochastically, fp32 states", "adam._adam", 22.0),
    ("AdamW, 8-bit states, fp32 masters", "adam8._adam8", 16.0),
    ("AdamW, 8-bit states, bf16 weights rounded stochastically", "adam8._adam8", 10.0),
    ("Lion, fp32 masters and states", "lion._lion", 20.0),
    ("Lion, bf16 weights rounded stochastically", "lion._lion", 14.0),
    ("SGD with momentum, fp32 masters and states", "sgd._sgd", 20.0),
    ("Adagrad, fp32 masters and states", "adagrad._adagrad", 20.0),
    ("LAMB, first pass", "lamb._moments", 22.0),
    ("LAMB, second pass", "lamb._apply", 18.0),
    ("sum of squares, bf16", "norm._squares", 2.0),
    ("bf16 to 8 bits", "quantize._write", 3.015625),
    ("8 bits to bf16", "quantize._read", 3.015625),
    ("bf16 to 4 bits, with what earlier rounding left", "quantize._write", 4.546875),
    ("signs, packed", "signs._pack", 8.125),
)
_NORM = ("norm._squares", 2.0)
UPDATES = {
    "hf_zero, AdamW": [("adam._adam", 28.0), _NORM],
    "hf_zero, AdamW with 8-bit states": [("adam8._adam8", 16.0), _NORM],
    "hf_zero, bf16 weights alone": [("adam._adam", 22.0), _NORM],
}


def kernel_table(run: dict[str, Any]) -> list[str]:
    lines = [f"| update or kernel | bytes | {' | '.join(card.name for card in CARDS)} |"]
    lines.append("|" + " --- |" * (2 + len(CARDS)))
    for what, kernel, num_bytes in SHOWN:
        cells = [_cell(*bound(row_of(run, card, kernel, num_bytes), card)) for card in CARDS]
        lines.append(f"| {what} | {num_bytes:.4g} | {' | '.join(cells)} |")
    return lines


def _cell(time: float, name: str, times: float) -> str:
    return f"{1e12 * time:.1f}" + (f" ({name}, {times:.2f}x)" if name != "bytes" else "")


def update_table(run: dict[str, Any]) -> list[str]:
    """Milliseconds to update all parameters on one card, including the norm that clipping needs."""
    lines = [f"| model | update | bytes per parameter | {' | '.join(card.name for card in CARDS)} |"]
    lines.append("|" + " --- |" * (3 + len(CARDS)))
    for model, numel in SIZES.items():
        for name, kernels in UPDATES.items():
            times = [sum(seconds(run, card, *kernel) for kernel in kernels) for card in CARDS]
            lines.append(_update_row(model, name, sum(each for _, each in kernels), numel, times))
        for name, moved in theirs(run).items():
            lines.append(_update_row(model, name, moved, numel, [moved / card.bandwidth for card in CARDS]))
    return lines


def theirs(run: dict[str, Any]) -> dict[str, float]:
    """Bytes per parameter of PyTorch's updates: casts around the update, norm and clipping of fp32 gradients."""
    return {f"PyTorch, {name} AdamW": moved + 4 + 8 for name, moved in run["traffic"].items()}


def _update_row(model: str, name: str, moved: float, numel: float, times: list[float]) -> str:
    cells = " | ".join(f"{1e3 * numel * time:.2f}" for time in times)
    return f"| {model} | {name} | {moved:g} | {cells} |"


def passes_table(run: dict[str, Any]) -> list[str]:
    """Bytes per model parameter, read + written, for each phase of a step."""
    phases = list(dict.fromkeys(phase for table in run["passes"].values() for phase in table))
    lines = [f"| phase | {' | '.join(run['passes'])} |", "|" + " --- |" * (1 + len(run["passes"]))]
    for phase in phases:
        cells = [table.get(phase) for table in run["passes"].values()]
        words = ["–" if moved is None else f"{moved[0]:g} + {moved[1]:g}" for moved in cells]
        lines.append(f"| {phase} | {' | '.join(words)} |")
    sums = [sum(map(sum, table.values())) for table in run["passes"].values()]
    return [*lines, f"| all | {' | '.join(f'{total:g}' for total in sums)} |"]


def section(run: dict[str, Any]) -> list[str]:
    """The section of docs/performance.md."""
    return [
        _KERNELS.format(name=f"bench/results/{run['date'][:10]}-kernels.md"),
        *kernel_table(run), "", _UPDATES, *update_table(run), "", _PASSES, *passes_table(run), "",
    ]  # fmt: skip


_KERNELS = """\
### Kernels: the least that they can take

**Predicted, never measured**: picoseconds of an element. Each is the largest of several lower bounds: bytes at the
card's published bandwidth; instructions of [the machine code](../{name}) at the
published rates of what executes them; and a latency of 0.6 µs, which loads of the warps that registers leave room for
have to hide. Without a word it is the bytes; with one, what it is, and how many times as long as the bytes that takes:
*issue* is four instructions of a warp per clock of a multiprocessor, *fp32* arithmetic, *alu* comparisons, selections
and integers, *special* roots and reciprocals. The updates with 8-bit states decode and encode two numbers for every
element in the time of 16 bytes, or of 10; where memory is fastest that is not time enough. Messages of 8 and 4 bits
divide exactly, so that all ranks read the same bits; links between hosts (50 GB/s for a GPU) take an element of 8 bits
in 20 ps.
"""
_UPDATES = """\
### Updates: the least that they can take

**Predicted** in the same way: milliseconds of an update of all parameters on one card, which of larger models holds a
part. PyTorch's AdamW works on fp32 copies, and its bytes are counted from its operations (`tests/support/passes.py`):
cast of bf16 gradients, norm, clipping, update, cast of the weights; only bytes bound it here. Of torchao and DeepSpeed
we know no published time of an update alone; whole iterations of theirs are in the last table.
"""
_PASSES = """\
### Passes over memory in a step

Bytes per parameter of the model, read + written, counted from the operations of a step of one rank of eight
(`tests/support/step_passes.py`): bf16 training with AdamW and clipping, weights gathered for forward and again for
backward. Collectives are left out. Ours are the fewest that collectives leave to do, at every stage: below stage 3
gradients come one by one, and nothing is updated before the norm of all is known. At stage 3 large parameters are
gathered where they are used, and their gradients reduced where autograd has left them. Mean, loss scale, clipping and
the cast of the weights are in the update. FSDP2 copies what it has gathered and what it reduces, casts both, and clips,
in passes of their own.
"""
