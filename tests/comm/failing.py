"""Ends worlds of ranks of which one fails, and reports how and when each rank ended.

    python -m tests.comm.failing nccl:3:backward:raise gloo:2:save:kill ...

prints a line of JSON for each: the failure, and a list with (exit code, seconds after the failure, last output) of each
rank. Ranks are forked from one process that has imported everything, and end as a script does. With "nccl", destroying
the group of all ranks waits until all of them destroy it, as NCCL does, and no rank sees another rank's memory; with
"stuck", aborting it waits forever, too.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo  # otherwise imported late by every rank
import torch.distributed as dist

from hf_zero import initialize
from hf_zero.checkpoint import service
from hf_zero.comm import process_group
from hf_zero.comm.cpu import shared_memory
from hf_zero.step.sharded_step import ShardedStep
from tests.comm.ends import CONFIG, KEPT, model
from tests.support import engine_warm_up  # noqa: F401  (otherwise imported late by every rank)

RANKS, VICTIM = 2, 1
PHASES = ("initialize", "forward", "backward", "step", "save", "evaluation")
MANNERS = ("raise", "exit", "kill")
HUNG_S = 90.0
LATER_S = 5.0  # longer than a rank waits for others to leave
_AT_ONCE = 3


class Failure(NamedTuple):
    """How the victim ends; the phase "end" is that of a script without errors."""

    backend: str
    stage: int
    phase: str
    manner: str

    @classmethod
    def named(cls, name: str) -> Failure:
        backend, stage, phase, manner = name.split(":")
        return cls(backend, int(stage), phase, manner)

    def __str__(self) -> str:
        return ":".join(map(str, self))


class Ended(NamedTuple):
    """The end of a rank."""

    code: int | None  # None: it did not end
    seconds: float
    output: str


def _stand_in_for_nccl(folder: Path, rank: int) -> None:
    destroy: Callable[[Any], None] = dist.destroy_process_group

    def destroy_together(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            (folder / f"destroys{rank}").touch()
            while len(list(folder.glob("destroys*"))) < RANKS:
                time.sleep(0.01)
        destroy(group)

    replaced = [
        mock.patch.object(dist, "destroy_process_group", destroy_together),
        mock.patch.object(process_group, "_waits_for_others", lambda: True),
        mock.patch.object(process_group, "synchronize", lambda: None),
        mock.patch.object(shared_memory, "host_name", lambda: f"host{rank}"),
    ]
    for each in replaced:
        each.start()


def _live(failure: Failure, folder: Path, rank: int) -> None:
    """The entire life of a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    process_group.init_distributed("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    if failure.backend != "gloo":
        _stand_in_for_nccl(folder, rank)
    if failure.backend == "stuck":
        mock.patch.object(process_group, "_abort", functools.partial(time.sleep, 3600)).start()
        mock.patch.object(process_group, "_ABORT_S", 1.0).start()

    def fail(*_: object) -> None:
        if rank != VICTIM:
            return
        (folder / "failed").write_text(str(time.monotonic()))
        if failure.manner == "raise":
            raise ValueError("planted")
        if failure.manner == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(3)

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            fail()
            return function(*args, **kwargs)

        return around

    def begins(phase: str) -> bool:
        return failure.phase == phase

    built = model()
    KEPT.append(built)
    if begins("initialize"):
        # The optimizer is built when groups exist and before parameters are distributed.
        initialize(model=built, optimizer=failing(torch.optim.AdamW), config=CONFIG)
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": failure.stage}}
    engine = initialize(model=built, config=config)[0]
    KEPT.append(engine)

    def train() -> None:
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()

    train()
    if begins("forward"):
        built[2].register_forward_pre_hook(fail)
    if begins("backward"):
        built[2].register_full_backward_hook(fail)
    if begins("step"):
        mock.patch.object(ShardedStep, "_agree", failing(ShardedStep._agree)).start()
    train()
    if begins("save"):
        mock.patch.object(service, "_write", failing(service._write)).start()
    engine.save_checkpoint(str(folder / "saved"))
    engine.eval()
    if begins("evaluation"):
        built[2].register_forward_pre_hook(fail)
    with torch.no_grad():
        engine(torch.ones(2, 8))
    engine.train()
    train()
    (folder / "failed").write_text(str(time.monotonic()))
    if failure.manner == "alone" and rank != VICTIM:
        time.sleep(LATER_S)


@dataclass
class _World:
    """Ranks that are running or have ended."""

    failure: Failure
    folder: Path
    deadline: float
    ranks: dict[int, int]  # process id -> rank
    ended: dict[int, tuple[int | None, float]] = field(default_factory=dict)  # rank -> code, time

    def look(self) -> bool:
        """Returns whether all ranks have ended."""
        is_late = time.monotonic() > self.deadline
        for pid, rank in self.ranks.items():
            if rank in self.ended:
                continue
            if is_late:
                os.kill(pid, signal.SIGKILL)
            reaped, status = os.waitpid(pid, 0 if is_late else os.WNOHANG)
            if reaped:
                self.ended[rank] = (None if is_late else os.waitstatus_to_exitcode(status), time.monotonic())
        return len(self.ended) == RANKS

    def report(self) -> list[Ended]:
        begun = float((self.folder / "failed").read_text())
        outputs = [(self.folder / f"rank{rank}.log").read_text()[-6000:] for rank in range(RANKS)]
        return [Ended(self.ended[rank][0], self.ended[rank][1] - begun, outputs[rank]) for rank in range(RANKS)]


def _start(failure: Failure, folder: Path) -> _World | None:
    """Returns None in a rank that has ended without an error."""
    folder.mkdir()
    ranks = {}
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            output = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _live(failure, folder, rank)
            return None
        ranks[pid] = rank
    return _World(failure, folder, time.monotonic() + HUNG_S, ranks)


def main(names: list[str]) -> int:
    logging.getLogger("hf_zero").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    gc.freeze()  # ranks end as scripts do, but need not collect what this process has imported
    waiting, running = [Failure.named(name) for name in names], []
    folder = Path(tempfile.mkdtemp(prefix="failing-"))
    while waiting or running:
        if waiting and len(running) < _AT_ONCE:
            failure = waiting.pop(0)
            world = _start(failure, folder / str(len(waiting)))
            if world is None:
                return 0
            running.append(world)
        for world in [world for world in running if world.look()]:
            running.remove(world)
            print(json.dumps([str(world.failure), world.report()]), flush=True)
        time.sleep(0.01)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
