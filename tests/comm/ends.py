"""Ends hundreds of processes: worlds of ranks that resume, train a little and exit normally.

    python -m tests.comm.ends --worlds 170 --ranks 3 --at-once 3 --by engine

Ranks are forked from one process that has imported everything, so that each takes a fraction of a second; several
worlds run at once to keep the machine busy. Each resumes at stage 3 from a checkpoint of two ranks. Prints the exit
codes that are not 0, and exits with their number.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise imported late by every rank
from torch import nn

from hf_zero import initialize
from hf_zero.comm.process_group import init_distributed

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
KEPT: list[Any] = []  # what a script's globals hold until it exits


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 3))


def train(by: str, saved: Path, *, saves: bool) -> None:
    """The entire life of a rank."""
    if by == "accelerate":
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin, DummyOptim

        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
        built = model()
        engine, _ = accelerator.prepare(built, DummyOptim(built.parameters(), lr=1e-2))
        load, save = accelerator.load_state, accelerator.save_state
        KEPT.append(accelerator)
    else:
        engine = initialize(model=model(), config=CONFIG)[0]
        load, save = engine.load_checkpoint, engine.save_checkpoint
    KEPT.append(engine)
    if not saves:
        load(str(saved))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    if saves:
        save(str(saved))


class Worlds:
    """The running worlds."""

    def __init__(self, by: str, folder: Path) -> None:
        self.by = by
        self.folder = folder
        self.running: dict[int, Path] = {}
        self.codes: list[int] = []

    def start(self, number: int, ranks: int, *, saves: bool = False) -> bool:
        """Returns whether this process is one of the ranks, which has trained and should exit."""
        own = self.folder / f"world{number}"
        own.mkdir()
        for rank in range(ranks):
            log = own / f"rank{rank}.log"
            pid = os.fork()
            if pid:
                self.running[pid] = log
                continue
            output = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ |= {name: str(value) for name, value in place.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
            init_distributed(init_method=f"file://{own}/rendezvous", rank=rank, world_size=ranks)
            train(self.by, self.folder / "saved", saves=saves)
            return True
        return False

    def wait(self, most: int) -> None:
        """Waits until at most `most` processes are left."""
        while len(self.running) > most:
            pid, status = os.waitpid(-1, 0)
            log, code = self.running.pop(pid), os.waitstatus_to_exitcode(status)
            self.codes.append(code)
            if code:
                print(f"{log} ended with {code}\n{log.read_text()[-2000:]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.comm.ends", description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", type=int, default=170)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=3, help="worlds at a time")
    parser.add_argument("--by", choices=("engine", "accelerate"), default="engine")
    options = parser.parse_args(arguments)
    logging.getLogger("hf_zero").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    if options.by == "accelerate":
        import accelerate.utils  # noqa: F401
        import transformers.trainer  # noqa: F401  (which accelerate's engines know)
    folder = tempfile.mkdtemp(prefix="ends-")
    worlds = Worlds(options.by, Path(folder))
    for number in range(options.worlds + 1):
        if worlds.start(number, options.ranks if number else 2, saves=not number):
            return 0  # a rank
        worlds.wait(options.ranks * (options.at_once - 1) if number else 0)
    worlds.wait(0)
    shutil.rmtree(folder)
    bad = [code for code in worlds.codes if code]
    print(f"{len(worlds.codes)} processes ended, {len(bad)} otherwise than with 0: {sorted(set(bad))}")
    return min(len(bad), 100)


if __name__ == "__main__":
    sys.exit(main())
