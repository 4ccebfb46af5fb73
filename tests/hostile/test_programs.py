"""The tools for hostile programs: generator, oracle, shrinker and script; only the script uses ranks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hostile import script, spec
from tests.hostile.body import EPS, RATES, WEIGHT_DECAY, RankResult, forward
from tests.hostile.campaign import chosen
from tests.hostile.model import Root, build_model
from tests.hostile.oracle import ABSOLUTE, CHAOS, RELATIVE, expected, find_difference, is_chaotic, largest_error
from tests.hostile.programs import ORDERS, SIZES, features, random_program
from tests.hostile.script import describe, script_of
from tests.hostile.shrink import shrink
from tests.hostile.spec import Call, Forward, Micro, ModuleSpec, Program, RankMicro, every_call, find_problem
from tests.support.ranks import free_port

pytestmark = pytest.mark.lengthy

SEEDS = 500
PRESENT = (
    "frozen",
    "ties",
    "leaves",
    "clip",
    "reduce_bucket",
    "0-dim",
    "own_parameters",
    "nested_lists",
    "ranks_differ",
    "uneven_forwards",
    "several_forwards",
    "uneven_evaluations",
    "direct",
    "idle",
    "repeated",
    "tap",
)
CHOICES = {
    "stage": (0, 1, 2, 3),
    "world": (2, 3, 4),
    "order": ORDERS,
    "kind": spec.KINDS,
    "output": spec.OUTPUTS,
    "checkpoint": spec.CHECKPOINTS[1:],
    "mode": spec.MODES,
    "source": spec.SOURCES,
    "backward": spec.BACKWARDS,
    "evaluate": spec.EVALUATIONS,
    "offload": spec.OFFLOADS,
    "optimizer": ("sgd", "adamw"),
    "limits": ("zero", "default", "mixed"),
    "accumulation": (1, 2),
    "steps": (1, 2, 3),
    "overlap": (True, False),
}


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return [random_program(seed) for seed in range(SEEDS)]


def test_every_feature_occurs(programs: list[Program]) -> None:
    counts = Counter(feature for program in programs for feature in features(program))
    wanted = {f"{key}={value}" for key, values in CHOICES.items() for value in values} | set(PRESENT)
    assert not {feature: counts[feature] for feature in wanted if counts[feature] < 3}
    assert counts["stage=3"] > SEEDS / 2 and counts["limits=zero"] > SEEDS / 6


def test_experts_are_called_in_other_orders_on_other_ranks(programs: list[Program]) -> None:
    """Stage 3 had errors with these calls; as many programs without such calls are generated for comparison."""
    swapped = differing = 0
    for program in programs:
        for micro in program.micros():
            paths = [[call.path for call in every_call(rank.forwards[0].calls)] for rank in micro.ranks]
            differing += paths[0] != paths[1]
            swapped += paths[0] != paths[1] and sorted(paths[0]) == sorted(paths[1])
    assert swapped > 40 and differing > 150
    alike = sum("ranks_differ" not in features(program) for program in programs)
    assert SEEDS / 4 < alike < 3 * SEEDS / 4


def test_a_program_is_its_json_and_its_seed(programs: list[Program]) -> None:
    for seed, program in enumerate(programs[:100]):
        assert Program.from_json(program.to_json()) == program
        assert random_program(seed) == program
    assert len(set(programs)) == SEEDS


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=[pytest.mark.slow] if size == "large" else []) for size in sorted(SIZES)]
)
def test_programs_can_be_run_by_one_process(size: str) -> None:
    for seed in range(25):
        program = random_program(seed, size)
        assert find_problem(program) is None
        for result in expected(program):
            assert all(abs(loss) < 1e4 for loss in result.losses), "numbers so large say little"


def test_weights_are_those_of_the_seed_and_the_name() -> None:
    program = random_program(11)
    first, second = dict(build_model(program).named_parameters()), dict(build_model(program).named_parameters())
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = dict(build_model(replace(program, seed=12)).named_parameters())
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].numel())


def test_programs_can_be_chosen_by_what_is_in_them() -> None:
    programs = chosen(0, 5, "medium", only=["stage=2", "clip"], without=["direct"])
    assert all({"stage=2", "clip"} <= features(program) and "direct" not in features(program) for program in programs)
    with pytest.raises(ValueError, match="none among"):
        chosen(0, 1, "small", only=["world=4"])


# The oracle


def forward_of(*paths: str, seed: int = 1, **more: object) -> Forward:
    return Forward(seed=seed, rows=2, calls=tuple(Call(path) for path in paths), **more)  # type: ignore[arg-type]


def by_hand(optimizer: str) -> Program:
    """Two ranks, two micro-batches, two updates; "b" is run by rank 1 in one micro-batch, "c" in the second update."""
    linears = tuple(ModuleSpec(name, "linear", size=2) for name in "abcd")
    first = Micro((RankMicro((forward_of("a"),)), RankMicro((forward_of("a", "b", seed=2),))))
    second = Micro((RankMicro((forward_of("a", seed=3),)), RankMicro((forward_of("a", seed=4),))))
    third = Micro((RankMicro((forward_of("c", seed=5),)), RankMicro((forward_of("a", seed=6),))))
    return Program(
        seed=3,
        world=2,
        stage=2,
        order="divergent",
        width=3,
        modules=linears,
        steps=((first, second), (second, third)),
        optimizer=optimizer,
    )


def updated_by_hand(
    optimizer: str, value: Tensor, gradient: Tensor, state: list[Tensor], step: int, decay: float
) -> Tensor:
    """AdamW or SGD with momentum, implemented again; changes `state`."""
    if optimizer == "sgd":
        gradient = gradient + decay * value
        state[0] = gradient if step == 1 else 0.9 * state[0] + gradient
        return value - RATES["sgd"] * state[0]
    rate = RATES["adamw"]
    state[0] = 0.9 * state[0] + 0.1 * gradient
    state[1] = 0.999 * state[1] + 0.001 * gradient * gradient
    denominator = (state[1] / (1 - 0.999**step)).sqrt() + EPS
    return value * (1 - rate * decay) - rate * (state[0] / (1 - 0.9**step)) / denominator


def by_hand_result(program: Program, optimizer: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    model: Root = build_model(program)
    states: dict[str, list[Tensor]] = {}
    counts: Counter[str] = Counter()
    losses: list[list[float]] = [[], []]
    for step in program.steps:
        total: Tensor = torch.zeros(())
        for micro in step:
            for rank in (0, 1):
                first, second = forward(model, model, program, micro.ranks[rank].forwards[0])
                losses[rank] += [first.item(), second.item()]
                total = total + (first + second) / 4  # two ranks, two micro-batches
        named = dict(model.named_parameters())
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        for (name, parameter), gradient in zip(named.items(), gradients):
            if gradient is not None:
                counts[name] += 1
                state = states.setdefault(name, [torch.zeros_like(parameter), torch.zeros_like(parameter)])
                decay = WEIGHT_DECAY if parameter.dim() > 1 else 0.0
                parameter.data = updated_by_hand(optimizer, parameter.data, gradient, state, counts[name], decay)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_oracle_does_what_a_loop_by_hand_does(optimizer: str) -> None:
    program = by_hand(optimizer)
    assert find_problem(program) is None
    losses, weights = by_hand_result(program, optimizer)
    for rank, result in enumerate(expected(program)):
        torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(losses[rank]), rtol=1e-6, atol=1e-7)
        for name, value in weights.items():
            torch.testing.assert_close(result.weights[name], value, rtol=1e-6, atol=1e-7)
    start = dict(build_model(program).named_parameters())
    untouched = {name for name, value in start.items() if torch.equal(value, expected(program)[0].weights[name])}
    assert untouched == {"d.inner.weight", "d.inner.bias"}, "not decayed, as it is used on no rank"


def test_a_difference_is_named() -> None:
    wanted = expected(by_hand("sgd"))
    assert find_difference(wanted, wanted) is None

    def changed(**changes: object) -> str | None:
        return find_difference((wanted[0], replace(wanted[1], **changes)), wanted)  # type: ignore[arg-type]

    losses, weights = wanted[1].losses, wanted[1].weights
    assert changed(losses=(losses[0], losses[1] + 1e-3, *losses[2:])).startswith("rank 1: losses[1] is")  # type: ignore[union-attr]
    assert changed(losses=(float("nan"), *losses[1:])).startswith("rank 1: losses[0] is nan")  # type: ignore[union-attr]
    assert changed(losses=losses[1:]) == f"rank 1 has {len(losses) - 1} losses, expected {len(losses)}"
    for wrong in (weights["a.inner.bias"] + 1e-3, torch.full((3,), float("nan")), torch.ones(1, 3)):
        text = changed(weights={**weights, "a.inner.bias": wrong})
        assert text is not None and text.startswith("rank 1: a.inner.bias ends as")


def test_a_program_that_enlarges_rounding_is_allowed_what_rounding_does_and_no_more() -> None:
    """A program of 4 ranks and 24 micro-batches was called wrong for an error of 1.3e-5, which plain fp32 also has."""
    program = replace(by_hand("sgd"), steps=by_hand("sgd").steps * 4)
    exact = expected(program, torch.float64)
    error = largest_error(expected(program), exact)
    assert 0 < error < 0.1

    def off_by(allowances: float) -> tuple[RankResult, ...]:
        losses = exact[0].losses
        moved = losses[0] + allowances * (RELATIVE * abs(losses[0]) + ABSOLUTE)
        return (replace(exact[0], losses=(moved, *losses[1:])), exact[1])

    assert is_chaotic(program, off_by(0.9 * CHAOS * error)) and not is_chaotic(program, off_by(1.1 * CHAOS * error))
    assert not is_chaotic(program, off_by(float("nan")))


# Invalid programs


def test_ranks_that_call_backward_a_different_number_of_times_are_no_program() -> None:
    program = by_hand("sgd")
    two = RankMicro((forward_of("a"), forward_of("a")))
    one = RankMicro((forward_of("a"),))
    assert find_problem(replace(program, steps=((Micro((two, one)),),))) is None
    uneven = replace(program, steps=((Micro((two, one), backward="each"),),))
    assert find_problem(uneven) == "ranks call backward (2, 1) times"
    assert find_problem(replace(program, world=3)) == "2 ranks in a micro-batch, the world has 3"
    assert "different numbers" in str(find_problem(replace(program, steps=(program.steps[0], program.steps[1][:1]))))


# Shrinking


def calls_on(program: Program, rank: int) -> list[Call]:
    return [call for micro in program.micros() for one in micro.ranks[rank].forwards for call in every_call(one.calls)]


def test_what_is_left_is_what_makes_it_fail() -> None:
    """It fails if rank 1 runs something under reentrant checkpointing twice in a row."""

    def fails(program: Program) -> bool:
        calls = calls_on(program, 1)
        pairs = zip(calls, calls[1:])
        return any(a.checkpoint == b.checkpoint == "reentrant" and a.path == b.path for a, b in pairs)

    found = next(program for program in (random_program(seed, "large") for seed in range(2000)) if fails(program))
    small = shrink(found, fails, attempts=2000).program
    assert fails(small) and find_problem(small) is None
    assert small.world == 2 and small.stage == 0 and len(small.steps) == small.accumulation == 1
    assert calls_on(small, 0) == [] and len(calls_on(small, 1)) <= 3
    assert len(small.modules) == 1 and not small.frozen and not small.ties and small.offload == "none"
    assert sum(len(rank.evaluations) for micro in small.micros() for rank in micro.ranks) == 0


def test_shrinking_ends_after_so_many_attempts() -> None:
    asked = []
    shrink(random_program(3, "large"), lambda program: bool(asked.append(program)), attempts=25)
    assert len(asked) == 25


# Scripts


def test_the_parts_of_a_script_do_not_define_the_same_name_twice() -> None:
    text = script_of(by_hand("sgd"), "wrong")
    names = [node.name for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert len(names) == len(set(names))
    imported = [node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert not any(name and name.startswith("tests") for name in imported)
    assert script.HANG_S > 30


def test_a_script_tells_a_reader_what_runs() -> None:
    text = describe(by_hand("sgd"))
    assert "  rank 1: [a, b]" in text and "stage 2, 2 ranks, sgd" in text


@pytest.mark.slow  # its parts are compared above
def test_a_script_runs_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(script_of(by_hand("adamw"), "ok", path.name))
    seat = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, **seat, "RANK": rank, "LOCAL_RANK": rank},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "rank 0 is right" in outputs[0] and "rank 1 is right" in outputs[1]
