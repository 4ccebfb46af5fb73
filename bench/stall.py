"""How long a checkpoint blocks training: steps with saves compared with steps without.

    python -m bench.stall --size 110m --batch 4 --oracle-python .oracle/bin/python --name 110m
    python -m bench.stall --write               # writes docs/checkpoints.md from the newest stored result

Blocks of steps without a save alternate with blocks of the same length whose first step is followed by a save. A step's
time includes its forward, backward and update, and the save if there is one; an asynchronous write slows down the
following steps, which are in the table, too. All engines save the same state: fp32 masters and both moments of AdamW,
and the weights in `--precision` (in FSDP2: in fp32, which are its masters). Each way runs alone, with two ranks of one
thread each.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.surroundings import RESULTS, ROOT, about, keep, machine, page_with, rank_environments

BESIDE, WAITING, DEEPSPEED, DCP = "hf_zero, async", "hf_zero", "DeepSpeed", "FSDP2, DCP's async_save"
MARK = "RESULT "
PAGE, COMMAND = ROOT / "docs" / "checkpoints.md", "python -m bench.stall --write"
_MEANS = (
    "Seconds; over: as a share of the step without saves; longest: of the steps of a block, each the median of its "
    "rounds; all: of all steps between two saves, and what they took more."
)
log = logging.getLogger("bench")


def build(
    way: str, size: Any, stage: int, precision: str
) -> tuple[Callable[[Any], object], Callable[[str, int], object]]:
    """(step, save) of one way."""
    import torch.distributed as dist

    from bench import engines, models

    model = models.build_model(size)
    if way == DCP:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict

        dist.init_process_group("cpu:gloo")
        beside = dist.new_group(backend="gloo")  # in the first group it would be matched with training's collectives
        step = engines.build_fsdp2_step(model, reshard=stage == 3, dtype=engines.DTYPES[precision])
        (cell,) = [each for each in step.__closure__ or () if hasattr(each.cell_contents, "param_groups")]
        under_way: list[Any] = []

        def save(folder: str, number: int) -> None:
            while under_way:
                under_way.pop().result()
            states = dict(zip(("model", "optimizer"), get_state_dict(model, cell.cell_contents), strict=True))
            place = f"{folder}/step{number}"
            under_way.append(checkpoint.async_save(states, checkpoint_id=place, process_group=beside))

        return step, save
    if way != DEEPSPEED:
        import hf_zero

        hf_zero.install()
    import deepspeed

    config = engines.ds_config(stage, size.batch, "own" if way != DEEPSPEED else "torch", precision=precision)
    if way == BESIDE:
        config["hf_zero"] = {"checkpoint": {"async": True}}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return engines.engine_step(engine), lambda folder, number: engine.save_checkpoint(folder, f"step{number}")


def play(options: argparse.Namespace) -> None:
    """One rank: seconds of every step, without and with saves, by block."""
    import torch
    import torch.distributed as dist

    from bench import models

    torch.set_num_threads(1)
    size = replace(models.SIZES[options.size], batch=options.batch)
    step, save = build(options.way, size, options.stage, options.precision)
    found: dict[str, list[list[float]]] = {"without": [], "with": []}
    tokens = models.batches(size, 1, int(os.environ["RANK"]))[0]
    for block in range(-1, 2 * options.rounds):  # one warm-up block with a save: memory, plans, processes
        seconds = []
        for number in range(options.every):
            started = time.perf_counter()
            step(tokens)
            if number == 0 and block % 2:
                save(options.folder, block)
            seconds.append(time.perf_counter() - started)
        if block >= 0:
            found["with" if block % 2 else "without"].append(seconds)
    sys.stdout.write(f"{MARK}{json.dumps(found)}\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # writes still in flight are not measured


def measure(way: str, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Rank 0's times: all ranks wait for one another in every step."""
    oracle = options.oracle_python if way == DEEPSPEED else None
    with tempfile.TemporaryDirectory(prefix="bench-stall-", dir=options.disk) as folder:
        words = [oracle or sys.executable, "-m", "bench.stall", "--way", way, "--folder", folder]
        words += ["--size", options.size, "--batch", str(options.batch), "--stage", str(options.stage)]
        words += ["--every", str(options.every), "--rounds", str(options.rounds), "--precision", options.precision]
        ranks = [
            subprocess.Popen(words, cwd=ROOT, env=each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for each in rank_environments(2, deepspeed_python=oracle)
        ]
        said = [process.communicate() for process in ranks]
        lines = [line for line in said[0][0].splitlines() if line.startswith(MARK)]
        if not lines:
            raise SystemExit(f"{way} failed:\n{said[0][1][-4000:]}")
        os.sync()
        return dict(json.loads(lines[0].removeprefix(MARK)))


def _longest(blocks: Sequence[Sequence[float]]) -> float:
    """The longest step of a block, each step the median over all rounds, so that a step slowed down by other load in
    one round does not count as a stall; the worst of all is in the table, too."""
    return max(statistics.median(each) for each in zip(*blocks, strict=True))


def table(run: dict[str, Any]) -> str:
    """Seconds per step, by way."""
    lines = [
        "| way | step without saves | its longest | median with saves | over | the step that saves "
        "| longest with saves | over | all, over | worst of all, without and with |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for way, found in run["ways"].items():
        without, within = ([each for block in found[key] for each in block] for key in ("without", "with"))
        plain, with_saves = statistics.median(without), statistics.median(within)
        saving = statistics.median(block[0] for block in found["with"])
        longest, longest_with = _longest(found["without"]), _longest(found["with"])
        pairs = ((with_saves, plain), (longest_with, longest), (sum(within), sum(without)))
        over = [f"{100 * (value / floor - 1):+.1f}%" for value, floor in pairs]
        figures = [f"{value:.3f}" for value in (plain, longest, with_saves, saving, longest_with)]
        worst = f"{max(without):.3f}, {max(within):.3f}"
        lines.append(f"| {' | '.join([way, *figures[:3], over[0], *figures[3:], *over[1:], worst])} |")
    return "\n".join([*lines, ""])


def markdown(run: dict[str, Any]) -> str:
    """The report of one run."""
    settings, cores, load = run["settings"], run["machine"]["cores"], run["machine"]["load_1min"]
    lines = [
        f"# A save each {settings['every']} steps, model {settings['size']}, {settings['precision']}, stage "
        f"{settings['stage']}, 2 ranks",
        "",
        f"`{run['command']}`, {run['date'][:16]}, {cores} cores, load {load} at the end. {_MEANS}",
        "",
        table(run),
    ]
    return "\n".join(lines)


def section() -> str:
    """The newest stored result."""
    path = max(RESULTS.glob("*-stall-*.json"))
    run = json.loads(path.read_text())
    settings, cores = run["settings"], run["machine"]["cores"]
    what = f"{settings['size']} in {settings['precision']}, stage {settings['stage']}, two ranks on {cores} cores"
    what += f", a save in {settings['every']} steps, rounds: {settings['rounds']} ({path.stem})"
    return f"{what}. {_MEANS}\n\n{table(run)}"


def main() -> None:
    """Measure, then write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="110m", help="model size from bench/models.py")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, help="folder on the disk to write to; default: a temporary one")
    parser.add_argument("--oracle-python", help="interpreter with real DeepSpeed; default: skip DeepSpeed")
    parser.add_argument("--name", help="write bench/results/<date>-stall-<name>.md and .json")
    parser.add_argument("--write", action="store_true", help="only write docs/checkpoints.md's table")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        play(options)
        return
    if options.write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), section(), COMMAND), encoding="utf-8")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ways = [BESIDE, WAITING, DCP, *([DEEPSPEED] if options.oracle_python else [])]
    run: dict[str, Any] = {
        **about("bench.stall"),
        "settings": {key: getattr(options, key) for key in ("size", "batch", "precision", "stage", "every", "rounds")},
        "ways": {},
    }
    for way in ways:
        run["ways"][way] = measure(way, options)
        log.info("%s is measured", way)
    run["machine"] = machine()
    text = markdown(run)
    log.info(text)
    if options.name:
        keep(run, text, f"stall-{options.name}")


if __name__ == "__main__":
    main()
