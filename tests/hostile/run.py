"""Runs hostile programs on real processes with gloo. Groups of ranks are reused from program to program.

A runner is anything with `run(program) -> Verdict`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Protocol

from tests.hostile.body import MakeEngine, RankResult, make_zero_engine, run_rank
from tests.hostile.spec import Forward, Micro, Program, RankMicro
from tests.hostile.verdicts import judge
from tests.support.campaigns import Verdict
from tests.support.lasting_ranks import LastingRanks

DEADLINE_S = 20.0
# Late imports of a program, which take seconds.
MODULES = ("torch.distributed", "torch._dynamo", "hf_zero.api.entry", "tests.hostile.body")
WARM_UP = Program(
    seed=0,
    world=0,
    stage=3,
    order="same",
    width=1,
    modules=(),
    shapes=((2,),),
    steps=((Micro((RankMicro((Forward(seed=0, rows=1, calls=()),)),) * 8),),),
)


class Runner(Protocol):
    """One way to run a program."""

    def run(self, program: Program) -> Verdict: ...


class ProcessRunner:
    """Use it as a context manager, so that no process is left behind."""

    def __init__(self, make_engine: MakeEngine = make_zero_engine, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._ranks = LastingRanks(partial(_play, make_engine), MODULES, lambda world: "")

    def __enter__(self) -> ProcessRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, program: Program, deadline_s: float | None = None) -> Verdict:
        """Runs `program` on its ranks; the verdict of a failure contains the stacks of all ranks."""
        reports, log = self._ranks.run(program.world, program.to_json(), deadline_s or self._deadline_s)
        return judge(program, reports, log)

    def close(self) -> None:
        self._ranks.close()


def _play(make_engine: MakeEngine, text: str, rank: int, folder: str) -> RankResult:
    """Runs a program in JSON; empty: warms a rank up."""
    if text:
        return run_rank(Program.from_json(text), rank, make_engine, folder)
    for optimizer in ("sgd", "adamw"):
        run_rank(replace(WARM_UP, optimizer=optimizer), rank, make_zero_engine, folder)
    return RankResult((), (), {})
