"""Runs hostile programs on ranks that are threads of this process, scheduled by a seed: for their values, or for the
graph of what their devices would do."""

from __future__ import annotations

import tempfile
import traceback
from typing import Any
from unittest import mock

from torch import Tensor, nn, optim

from hf_zero.comm import Hosts
from hf_zero.layout import buckets
from tests.hostile.body import run_rank
from tests.hostile.spec import Program
from tests.hostile.verdicts import judge
from tests.support.campaigns import Verdict
from tests.support.happens_before import Fault, GraphWorld
from tests.support.in_process import Deadlock, InProcessWorld, RandomSchedule, Schedule, engines_in
from tests.support.lasting_ranks import RankReport
from tests.support.late import use


class ThreadRunner:
    """Deadlocks are detected with certainty, and the same seed gives the same run."""

    def __init__(self, seed: int = 0, share: float = 0.3, *, apart: bool = False) -> None:
        """
        Args:
            share: probability that a rank that could continue is overtaken by another one.
            apart: ranks share no memory.
        """
        self._seed = seed
        self._share = share
        self._apart = apart

    def run(self, program: Program) -> Verdict:
        return run_in_order(program, RandomSchedule(self._seed + program.seed, self._share), apart=self._apart)


def run_in_order(program: Program, schedule: Schedule, *, apart: bool = False) -> Verdict:
    """Runs a program whose ranks take turns by `schedule`."""
    beside = 2 if program.groups == "hpz" else 1
    hosts = Hosts.named([f"host {rank // beside}" for rank in range(program.world)]) if apart else None
    world = InProcessWorld(program.world, schedule, hosts, apart=apart)
    with tempfile.TemporaryDirectory() as folder, engines_in(world) as initialize:

        def make_engine(model: nn.Module, optimizer: optim.Optimizer, config: dict[str, Any]) -> Any:
            return initialize(model=model, optimizer=optimizer, config=config)[0]

        def play(rank: int) -> RankReport:
            try:
                return RankReport(run_rank(program, rank, make_engine, folder))
            except Deadlock:
                raise
            except Exception:
                world.leave()
                return RankReport(failure=traceback.format_exc())

        try:
            return judge(program, world.run(play))
        except Deadlock as deadlock:
            return Verdict("hung", str(deadlock))


class GraphRunner:
    """Looks for hangs of accelerators, and for memory that they would use too early (`tests.support.happens_before`).
    Values are not compared."""

    def __init__(self, seed: int = 0, share: float = 0.3, *, one_at_a_time: bool = False) -> None:
        """`one_at_a_time`: see `GraphWorld`."""
        self._seed = seed
        self._share = share
        self._one_at_a_time = one_at_a_time

    def run(self, program: Program) -> Verdict:
        beside = 2 if program.groups == "hpz" else 1
        hosts = Hosts.named([f"host {rank // beside}" for rank in range(program.world)])
        schedule = RandomSchedule(self._seed + program.seed, self._share)
        world = GraphWorld(program.world, schedule, hosts, one_at_a_time=self._one_at_a_time)
        small_too = mock.patch.object(buckets, "MIN_DIRECT_BYTES", 0)
        with tempfile.TemporaryDirectory() as folder, use(world.device), engines_in(world) as initialize, small_too:

            def make_engine(model: nn.Module, optimizer: optim.Optimizer, config: dict[str, Any]) -> Any:
                return initialize(model=model, optimizer=optimizer, config=config)[0]

            def read(loss: Tensor) -> float:
                world.device.read()
                return loss.item()

            def play(rank: int) -> None:
                run_rank(program, rank, make_engine, folder, read)

            try:
                world.run(play)
                world.graph.refuse_faults()
            except (Deadlock, Fault) as fault:
                return Verdict("hung", str(fault))
            except Exception:  # noqa: BLE001 (a verdict, like any other)
                return Verdict("died", traceback.format_exc())
        return Verdict("ok")
