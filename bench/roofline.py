"""The minimum cost of a step on GPUs, and the cost of hf_zero's schedule: the tables of docs/performance.md.

    python -m bench.roofline                    # print the section
    python -m bench.roofline --write            # write it into the page

Nothing here is measured. Link and memory rates are those that copies reach on such machines (`MACHINES`), compute rates
those of dense bf16 training; activations are not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import geometric_mean

from bench import kernel_times
from bench.surroundings import ROOT
from hf_zero.planning.event_model import LANES, Machine, Setup, Shape, Step, simulate

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- begin: python -m bench.roofline --write -->\n", "<!-- end -->\n"

# FLOP/s: 0.6 of the data sheet's dense bf16 (4090: 0.75). Memory: H200 as measured by a copy; others 0.9 of the sheet.
# Links: NVLink 4 and PCIe at the rate of large copies. Host memory: DDR5 at 0.7 of the sheet, shared by the GPUs; that
# of the last machine is what the update reached on 16 cores (bench/results/2026-11-27-programme-h100-block2.md).
MACHINES = (
    Machine("1 x H200, PCIe 5", 1, 590e12, 4.3e12, 1e15, 55e9, 300e9, 141e9),
    Machine("8 x H100, NVLink, PCIe 5", 8, 590e12, 3.0e12, 370e9, 55e9, 54e9, 80e9),
    Machine("1 x 4090, PCIe 4", 1, 124e12, 0.9e12, 1e15, 25e9, 63e9, 24e9),
    Machine("1 x H100, PCIe 5, host as measured", 1, 590e12, 3.0e12, 1e15, 55e9, 81e9, 80e9),
)
SHAPES = (Shape("1.5B", 1.5e9, 28), Shape("8B", 8e9, 32), Shape("32B", 32e9, 64))
TOKENS = {"1 x 4090, PCIe 4": 8192}
# No case here uses drives, tensor or sequence parallelism, or several hosts; updates beside forward take less than 5%.
COLUMNS = tuple(lane for lane in LANES if lane not in ("disk", "exchange", "messages", "update"))
STATES_AND_GRADIENTS = 14  # bytes per parameter: masters 4, moments 8, gradients 2
FILLED = 0.85  # share of device memory for model states; the rest is for activations

# (what, figure, where, source)
PUBLISHED = (
    ("ZeRO-Offload", "40 TFLOP/s", "10B on a V100", "abstract of arXiv 2101.06840"),
    ("SuperOffload", "600 TFLOP/s, up to 4x ZeRO-Offload", "GH200, 20B on one", "DeepSpeed's page on SuperOffload"),
    ("MegaTrain", "272 TFLOP/s", "7B on an H100", "repository of arXiv 2604.05091"),
    ("MegaTrain", "1.84x ZeRO-3 with offload", "14B", "abstract of arXiv 2604.05091"),
    ("torchao, CPUOffloadOptimizer", "1.52 s per iteration; ZeRO-Offload 3.13 s", "as in its README", "torchao/optim"),
    ("FSDP2, torchtitan", "5,762 tokens/s per GPU; compiled 6,667", "8B on 8 H100", "torchtitan's page on performance"),
)


# One case for every lane that can be the slowest (outgoing traffic never exceeds incoming traffic).
_SLOW_LINK = replace(MACHINES[1], name="8 x H100, PCIe 5 alone", link=22e9)
BOUNDS = (
    (MACHINES[0], SHAPES[0], Setup(0)),
    (_SLOW_LINK, SHAPES[1], Setup(3, tokens=1024)),
    (MACHINES[2], SHAPES[1], Setup(3, offload_parameters=True, tokens=512, trained=0.01)),
    (MACHINES[2], SHAPES[1], Setup(3, offload_optimizer=True, tokens=512, clips=False)),
)


def setups(machine: Machine, shape: Shape) -> Iterator[Setup]:
    tokens = TOKENS.get(machine.name, 16384)
    stages = (0, 1, 2, 3) if machine.gpus > 1 else (0,)
    yield from (Setup(stage, tokens=tokens) for stage in stages)
    if machine.gpus > 1:
        yield Setup(2, offload_optimizer=True, tokens=tokens)
    yield Setup(3, offload_optimizer=True, tokens=tokens)
    both = Setup(3, offload_optimizer=True, offload_parameters=True, tokens=tokens)
    yield both
    if fits(machine, shape, both):
        auto = with_auto_ratio(machine, shape, both)
        yield auto
        if auto.offload_ratio:
            yield replace(auto, update="both")


def with_auto_ratio(machine: Machine, shape: Shape, setup: Setup) -> Setup:
    """The same with `"ratio": "auto"`: the states of as many units as fit stay on the device."""
    room = FILLED * machine.capacity - device_bytes(machine, shape, setup)
    of_unit = STATES_AND_GRADIENTS * shape.parameters / shape.units / machine.gpus
    return replace(setup, offload_ratio=1 - min(int(room / of_unit), shape.units) / shape.units)


def stage_of(setup: Setup) -> str:
    part = "optimizer" if setup.offload_ratio == 1 else f"{setup.offload_ratio:.0%} of the optimizer"
    has_states = setup.offload_optimizer and setup.offload_ratio > 0
    away = [part] * has_states + ["parameters"] * setup.offload_parameters
    by = ", updated by both" if setup.update == "both" else ""
    return f"{setup.stage}" + (f", {' and '.join(away)} on the host" if away else "") + by


def over_slowest(step: Step) -> float:
    """The step time relative to its slowest lane."""
    return step.seconds / step.busy[step.bound]


def device_bytes(machine: Machine, shape: Shape, setup: Setup) -> float:
    """Model states that stay on the device, without activations."""
    sharded = 1 / machine.gpus
    weights = 2 * (sharded if setup.stage == 3 else 1.0)
    gradients = 2 * (sharded if setup.stage >= 2 else 1.0)
    states = 12 * (sharded if setup.stage >= 1 else 1.0)
    if setup.offload_optimizer:
        resident = 1 - setup.offload_ratio
        states, gradients = resident * states, gradients * (resident if setup.stage >= 2 else 1.0)
    if setup.offload_parameters:
        weights = 0.0
    buffers = 4 * 2 / shape.units  # two units in flight, with their gradients
    return shape.parameters * (weights + gradients + states + buffers)


def fits(machine: Machine, shape: Shape, setup: Setup) -> bool:
    return device_bytes(machine, shape, setup) <= FILLED * machine.capacity


def _row(machine: Machine, shape: Shape, setup: Setup) -> str:
    states = device_bytes(machine, shape, setup) / 1e9
    if not fits(machine, shape, setup):
        return (
            f"| {shape.name} | {stage_of(setup)} | {states:.0f} | "
            + " | ".join("–" for _ in COLUMNS)
            + " | does not fit | | | |"
        )
    step = simulate(machine, shape, setup)
    lanes = " | ".join(f"{1e3 * step.busy[lane]:.0f}" for lane in COLUMNS)
    reached = f"{1e3 * step.seconds:.0f} ({over_slowest(step):.2f}x)"
    useful = 6 * shape.parameters * setup.tokens / step.seconds / 1e12
    rate = f"{setup.tokens / step.seconds:,.0f} | {useful:.0f}"
    return f"| {shape.name} | {stage_of(setup)} | {states:.0f} | {lanes} | {step.bound} | {reached} | {rate} |"


def machine_table(machine: Machine) -> Iterator[str]:
    tokens = TOKENS.get(machine.name, 16384)
    yield f"### {machine.name}: {tokens:,} tokens per GPU and step"
    yield ""
    yield f"| model | stage | GB of states | {' | '.join(COLUMNS)} | bound by | step, ms | tokens/s per GPU | TFLOP/s |"
    yield "|" + " --- |" * (len(COLUMNS) + 7)
    for shape in SHAPES:
        yield from (_row(machine, shape, setup) for setup in setups(machine, shape))
    yield ""


def changes(step_of: Setup, machine: Machine, shape: Shape) -> dict[str, Step]:
    """The same step after one design change each."""
    faster_host = replace(machine, host_memory=machine.host_memory * UPDATE_SHARE)
    return {
        "updates during backward": simulate(machine, shape, replace(step_of, clips=False)),
        "8-bit states": simulate(faster_host, shape, step_of),
        "both": simulate(faster_host, shape, replace(step_of, clips=False)),
        MORE_TOKENS: simulate(machine, shape, replace(step_of, tokens=4 * step_of.tokens)),
    }


MORE_TOKENS = "four times the tokens"
UPDATE_SHARE = 28 / 16.0625  # bytes of a parameter with fp32 states over those with 8-bit states


def offloaded() -> Iterator[tuple[Machine, Shape, Setup]]:
    """Every case of the tables with all updates on the host."""
    for machine, shape in product(MACHINES, SHAPES):
        for setup in setups(machine, shape):
            is_plain = setup.offload_ratio == 1 and setup.update == "cpu"
            if setup.offload_optimizer and is_plain and fits(machine, shape, setup):
                yield machine, shape, setup


def gains(machine: Machine, shape: Shape, setup: Setup) -> dict[str, float]:
    """Tokens per second after each change, relative to the present."""
    now = simulate(machine, shape, setup).seconds
    after = changes(setup, machine, shape)
    return {name: (4 if name == MORE_TOKENS else 1) * now / step.seconds for name, step in after.items()}


def change_table() -> Iterator[str]:
    cases = {case: gains(*case) for case in offloaded()}
    names = list(next(iter(cases.values())))
    yield f"| machine | model | stage | {' | '.join(names)} |"
    yield "|" + " --- |" * (3 + len(names))
    for (machine, shape, setup), found in cases.items():
        yield (
            f"| {machine.name} | {shape.name} | {stage_of(setup)} | "
            + " | ".join(f"{found[n]:.2f}" for n in names)
            + " |"
        )
    mean = {name: geometric_mean([found[name] for found in cases.values()]) for name in names}
    said = ", ".join(f"{name} {mean[name]:.2f}" for name in names)
    most = max((name for name in names if name not in (MORE_TOKENS, "both")), key=lambda name: mean[name])
    yield ""
    yield f"Geometric means: {said}. Of the single changes, **{most}** would gain most."


def bound_table() -> Iterator[str]:
    yield "| bound by | machine | model | stage | tokens | step / bound |"
    yield "|" + " --- |" * 6
    for machine, shape, setup in BOUNDS:
        step = simulate(machine, shape, setup)
        place = f"{machine.name} | {shape.name} | {stage_of(setup)}"
        yield f"| {step.bound} | {place} | {setup.tokens:,} | {over_slowest(step):.2f}x |"


_HEAD = f"""\
A step in a simulation (`hf_zero/planning/event_model.py`). Computation, collectives, copies to the device ("in"),
copies to the host ("out") and the host's own work each have a column with their milliseconds; they can run at the
same time, so a step takes at least as long as the longest of them ("bound by"). "step" is what hf_zero's order of
them takes, in brackets as a multiple of that bound. Recomputation is on, TFLOP/s count 6 FLOPs per parameter and
token. Links, memories and compute are those of `MACHINES` in `bench/roofline.py`: what copies and dense training
reach, not data sheets. The last rows of each model have the part of the optimizer on the host that `"ratio": "auto"`
chooses with {1 - FILLED:.0%} of the device's memory for activations, updated by the CPU or by both
(`"offload_update": "both"`). Nothing in these tables is measured.
"""
_AT_BOUNDS = """\
### At each bound

One case for each column that can be the longest. The third trains one parameter in a hundred, the fourth does not clip.
Everything else runs beside the longest.
"""
_NEXT = """\
### What other designs would gain

Tokens per second after one change of design, over those of today's schedule with clipping, where the host's updates
begin when the norm is known:
"""
_EXPLAINED = """\
*Updates during backward*: a sub-group's update begins as soon as its gradients have arrived, before the norm is known,
and is undone if the step is clipped or skipped (SuperOffload's idea; without clipping nothing has to be undone). *8-bit
states*: their bytes, if the update's arithmetic kept up with memory. *Four times the tokens* is no change of design but
what a larger batch or more accumulation does to the same step.
"""
_PUBLISHED = "### What others have published\n"


def section() -> str:
    lines = [_HEAD]
    for machine in MACHINES:
        lines += machine_table(machine)
    published = ["| what | figure | on | source |", "| --- | --- | --- | --- |"]
    published += [f"| {' | '.join(row)} |" for row in PUBLISHED]
    lines += [_AT_BOUNDS, *bound_table(), "", _NEXT, *change_table(), "", _EXPLAINED]
    return "\n".join([*lines, *kernel_times.section(kernel_times.kept()), _PUBLISHED, *published, ""])


def page(text: str) -> str:
    """`text` with the section replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(section())


if __name__ == "__main__":
    main()
