"""Hostile programs on real ranks are correct and end. And the harness itself: it detects errors and hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hostile.body import make_zero_engine
from tests.hostile.campaign import chosen, main, table
from tests.hostile.model import Bank
from tests.hostile.programs import random_program
from tests.hostile.run import ProcessRunner
from tests.hostile.script import describe
from tests.hostile.shrink import fails_like, shrink
from tests.hostile.spec import Call, Forward, Limits, Micro, ModuleSpec, Program, RankMicro, every_call
from tests.support.campaigns import Outcome, Verdict

NUM_QUICK = 8
NUM_SLOW = 2000
CHUNK = 200
SHORT_S = 2.0  # for programs that hang on purpose


@pytest.fixture(scope="module")
def runner() -> Iterator[ProcessRunner]:
    with ProcessRunner() as runner:
        yield runner


def assert_right(runner: ProcessRunner, programs: list[Program]) -> None:
    """None is wrong, hangs, dies or is rejected; and errors are far below the tolerance."""
    bad: list[str] = []
    for program in programs:
        verdict = runner.run(program)
        if not verdict.is_ok:
            bad.append(
                f"seed {program.seed} {verdict.kind}: {verdict.detail}\n{describe(program)}\n{program.to_json()}"
            )
        assert verdict.error < 0.5
    assert not bad, f"{len(bad)} of {len(programs)} programs fail; the first:\n{bad[0]}"


def test_programs_are_right(runner: ProcessRunner) -> None:
    assert_right(runner, chosen(0, NUM_QUICK, "medium"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(10_000, 10_000 + NUM_SLOW, CHUNK))
def test_many_programs_are_right(runner: ProcessRunner, first: int) -> None:
    assert_right(runner, [random_program(seed) for seed in range(first, first + CHUNK)])


# Injected faults on rank 1, whenever a Bank runs


def make_planted(act: Any, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """An engine, on rank 1 of which `act(output)` replaces the output of every Bank."""
    engine = make_zero_engine(model, optimizer, config)
    for module in engine.module.modules():
        if isinstance(module, Bank) and os.environ["RANK"] == "1":
            module.register_forward_hook(lambda _module, _args, output: act(output))
    return engine


def slightly_wrong(output: Any) -> Any:
    return output * 1.05 if isinstance(output, Tensor) else output


def hanging(output: Any) -> Any:
    time.sleep(3600)


def dying(output: Any) -> Any:
    os._exit(3)


def raising(output: Any) -> Any:
    raise ValueError("planted")


def make_refusing(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    raise NotImplementedError("not this one")


def with_banks(paths: tuple[str, ...], world: int = 2) -> Program:
    """Every rank calls `paths`; "bank" is a Bank, "other" is not."""
    modules = (ModuleSpec("bank", "bank", size=2), ModuleSpec("other", "mlp", size=3), ModuleSpec("more", "norm"))
    rank = RankMicro((Forward(seed=1, rows=2, calls=tuple(Call(path) for path in paths)),))
    return Program(
        seed=1,
        world=world,
        stage=3,
        order="same",
        width=5,
        modules=modules,
        steps=((Micro((rank,) * world), Micro((rank,) * world)),),
        limits=Limits(0, 0, 0, 0),
        optimizer="adamw",
    )


HARMFUL = with_banks(("other", "bank", "more"))
HARMLESS = with_banks(("other", "more"))


def test_a_wrong_value_is_noticed_and_shrinks_to_what_makes_it() -> None:
    with ProcessRunner(partial(make_planted, slightly_wrong)) as runner:
        verdict = runner.run(HARMFUL)
        assert verdict.kind == "wrong" and "rank 1: losses[0] is" in verdict.detail
        assert runner.run(HARMLESS).is_ok
        found = next(program for program in (random_program(seed) for seed in range(500)) if _is_fit(program))
        assert runner.run(found).kind == "wrong"
        small = shrink(found, fails_like(runner, "wrong"), attempts=350).program
    assert [spec.kind for spec in small.modules if spec.kind not in ("list", "dict", "tree")] == ["bank"]
    assert small.world == 2 and small.stage == 0 and len(small.steps) == small.accumulation == 1
    first, second = (list(every_call(rank.forwards[0].calls)) for rank in small.steps[0][0].ranks)
    assert not first and len(second) == 1


def _is_fit(program: Program) -> bool:
    """A program of some size that calls a bank on rank 1, directly and at the top."""
    banks = {spec.name for spec in program.modules if spec.kind == "bank" and spec.output == "tensor"}
    called = {
        call.path for micro in program.micros() for call in micro.ranks[1].forwards[0].calls if call.mode == "live"
    }
    return bool(banks & called) and program.world == 2 and len(program.steps) > 1 and len(program.modules) > 2


def test_a_hang_is_noticed_with_what_the_ranks_were_doing_and_the_next_program_runs() -> None:
    with ProcessRunner(partial(make_planted, hanging)) as runner:
        assert runner.run(HARMLESS).is_ok
        verdict = runner.run(HARMFUL, SHORT_S)
        assert verdict.kind == "hung" and "did not end in time" in verdict.detail
        assert "in hanging" in verdict.detail and "in run_rank" in verdict.detail
        assert runner.run(HARMLESS).is_ok

        def fails(program: Program) -> bool:
            # Only programs that must hang are run: each hang takes until the deadline.
            return _calls_bank(program) and runner.run(program, SHORT_S).kind == "hung"

        small = shrink(replace(HARMFUL, steps=(HARMFUL.steps[0][:1],)), fails, attempts=2).program
    assert _calls_bank(small) and small.stage < 3


def _calls_bank(program: Program) -> bool:
    calls = [call.path for micro in program.micros() for call in micro.ranks[1].forwards[0].calls]
    return "bank" in calls


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (partial(make_planted, dying), "died", "rank 1 is gone"),
        (partial(make_planted, raising), "died", "rank 1: Traceback"),
        (make_refusing, "refused", "NotImplementedError: not this one"),
    ],
)
def test_ranks_that_end_are_told_from_refusals(make: Any, kind: str, text: str) -> None:
    with ProcessRunner(make) as runner:
        verdict = runner.run(HARMFUL)
    assert verdict.kind == kind and text in verdict.detail


# Campaigns


def test_a_campaign_writes_what_failed_and_counts_it(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "program.json"
    path.write_text(HARMLESS.to_json())
    assert main([str(path), "--repeat", "2", "--folder", str(tmp_path / "failures")]) == 0
    assert "all                            2        2        0        0        0        0" in capsys.readouterr().out
    assert not (tmp_path / "failures").exists()
    empty = replace(HARMLESS, frozen=tuple(f"{name}.{part}" for name, part in _all_parameters()))
    path.write_text(empty.to_json())
    assert main([str(path), "--folder", str(tmp_path / "failures")]) == 1
    written = tmp_path / "failures" / "refused-medium-1.json"
    assert Program.from_json(written.read_text()) == empty
    assert "Traceback" in written.with_suffix(".txt").read_text()


def _all_parameters() -> list[tuple[str, str]]:
    mlp = ["up.weight", "up.bias", "down.weight"]
    return [*(("other", part) for part in mlp), ("more", "inner.weight"), ("more", "inner.bias")] + [
        ("bank", f"vectors.{index}") for index in range(2)
    ]


def test_the_table_counts_by_stage_and_order() -> None:
    text = table([Outcome(HARMFUL, Verdict("hung"), 1.0), Outcome(replace(HARMFUL, stage=1), Verdict("ok"), 1.0)])
    rows = {line.partition("  ")[0]: line.split()[-6:] for line in text.splitlines()[1:]}
    assert rows["all"] == ["2", "1", "0", "1", "0", "0"]
    assert rows["stage 3"] == ["1", "0", "0", "1", "0", "0"] and rows["order same"] == rows["all"]
