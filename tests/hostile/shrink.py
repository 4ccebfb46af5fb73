"""Reduces a failing program while it still fails.

Every family of simplifications is tried until none of its candidates fails any more, large steps first; then the next
family, and all of them again until nothing changes. Candidates that are invalid or have been tried before are
skipped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from tests.hostile.campaign import RANKS, make_runner
from tests.hostile.model import build_model
from tests.hostile.oracle import expected
from tests.hostile.run import ProcessRunner, Runner
from tests.hostile.script import describe, script_of
from tests.hostile.spec import (
    LISTS,
    Call,
    Forward,
    Limits,
    Micro,
    ModuleSpec,
    Program,
    RankMicro,
    every_module,
    find_problem,
)

ATTEMPTS = 400
ZERO = Limits(prefetch=0, max_live=0, max_reuse=0, param_persistence=0)
Family = Callable[[Program], Iterator[Program]]
T = TypeVar("T")


@dataclass(frozen=True)
class Shrunk:
    """The smallest program found, and the number of tried ones."""

    program: Program
    attempts: int


def shrink(program: Program, fails: Callable[[Program], bool], attempts: int = ATTEMPTS) -> Shrunk:
    """The smallest program for which `fails`, called at most `attempts` times; `program` itself is assumed to fail."""
    return Shrunk(*search(program, fails, FAMILIES, _tidy, attempts))


def search(
    start: T,
    fails: Callable[[T], bool],
    families: Sequence[Callable[[T], Iterator[T]]],
    tidy: Callable[[T], T | None],
    attempts: int,
) -> tuple[T, int]:
    """The smallest one found, and the number of tried ones; `start` is hashable and assumed to fail.

    Args:
        families: functions that return slightly smaller variants.
        tidy: makes a variant valid, or returns None.
    """
    tried, found, changed = {start}, start, True
    while changed:
        changed = False
        for family in families:
            while (smaller := _first(family(found), fails, tidy, tried, attempts)) is not None:
                found, changed = smaller, True
    return found, len(tried) - 1


def fails_like(runner: Runner, kind: str, tries: int = 1) -> Callable[[Program], bool]:
    """Whether a program has this verdict in one of `tries` runs, because deadlocks are not deterministic."""
    return lambda program: any(runner.run(program).kind == kind for _ in range(tries))


def _first(
    smaller: Iterator[T], fails: Callable[[T], bool], tidy: Callable[[T], T | None], tried: set[T], attempts: int
) -> T | None:
    for raw in smaller:
        candidate = tidy(raw)
        if candidate is None or candidate in tried:
            continue
        if len(tried) > attempts:
            return None
        tried.add(candidate)
        if fails(candidate):
            return candidate
    return None


def _tidy(program: Program) -> Program | None:
    """`program` without names of removed parts; None if one process cannot run it."""
    if find_problem(program) is not None:
        return None
    try:
        names = {name for name, _ in build_model(program).named_parameters()}
        modules = {name for name, _ in every_module(program.modules)}
        program = replace(
            program,
            frozen=tuple(name for name in program.frozen if name in names),
            leaves=tuple(name for name in program.leaves if name in modules),
        )
        expected(program)
    except Exception:  # noqa: BLE001 (whatever is wrong with it, it is no program)
        return None
    return program


# Ranks and passes


def _fewer_steps(program: Program) -> Iterator[Program]:
    for index in range(len(program.steps)):
        if len(program.steps) > 1:
            yield replace(program, steps=(program.steps[index],))
    for index in range(len(program.steps)):
        if len(program.steps) > 1:
            yield replace(program, steps=_without(program.steps, index))


def _fewer_micros(program: Program) -> Iterator[Program]:
    for index in range(program.accumulation):
        if program.accumulation > 1:
            yield replace(program, steps=tuple((step[index],) for step in program.steps))


def _fewer_ranks(program: Program) -> Iterator[Program]:
    for rank in range(program.world):
        if program.world > 2:
            fewer = _each_micro(program, lambda micro, rank=rank: replace(micro, ranks=_without(micro.ranks, rank)))
            yield replace(fewer, world=program.world - 1)


def _plain_settings(program: Program) -> Iterator[Program]:
    for stage in range(program.stage):
        yield replace(program, stage=stage, limits=Limits(), leaves=(), offload="none")
    for changes in (
        {"offload": "none"},
        {"clip": 0.0},
        {"optimizer": "sgd"},
        {"overlap": True},
        {"reduce_bucket": None},
        {"leaves": ()},
        {"ties": ()},
        {"frozen": ()},
        {"shapes": ()},
        {"shapes": program.shapes[:1]},
        {"width": 3},
    ):
        yield replace(program, **changes)  # type: ignore[arg-type]


def _plain_limits(program: Program) -> Iterator[Program]:
    """All of them at their defaults, or at zero; if both are needed, as many as possible at their defaults."""
    yield replace(program, limits=Limits())
    for name in ("prefetch", "max_live", "max_reuse", "param_persistence", "model_persistence"):
        if getattr(program.limits, name) is not None:
            yield replace(program, limits=replace(program.limits, **{name: None}))
    for name in ("prefetch", "max_live", "max_reuse", "param_persistence"):
        if getattr(program.limits, name):
            yield replace(program, limits=replace(program.limits, **{name: 0}))


def _simple_backward(program: Program) -> Iterator[Program]:
    yield _each_micro(program, lambda micro: replace(micro, backward="sum"))
    yield _each_micro(
        program,
        lambda micro: replace(
            micro, backward="sum", ranks=tuple(replace(rank, forwards=rank.forwards[:1]) for rank in micro.ranks)
        ),
    )


def _fewer_forwards(program: Program) -> Iterator[Program]:
    """Drops evaluations and forwards, first for all ranks at once, then for each rank."""
    yield _each_rank(program, lambda rank: replace(rank, evaluations=()))
    most = max(len(rank.forwards) for micro in program.micros() for rank in micro.ranks)
    for index in range(most if most > 1 else 0):
        yield _each_rank(program, lambda rank, index=index: replace(rank, forwards=_without(rank.forwards, index)))
    for place, rank in _ranks(program):
        for index in range(len(rank.forwards) if len(rank.forwards) > 1 else 0):
            yield _with_rank(program, place, replace(rank, forwards=_without(rank.forwards, index)))
        for index in range(len(rank.evaluations)):
            yield _with_rank(program, place, replace(rank, evaluations=_without(rank.evaluations, index)))
        if rank.evaluations:
            yield _with_rank(program, place, replace(rank, evaluate="first"))


# Calls


def _plain_calls(program: Program) -> Iterator[Program]:
    """Removes one kind of context from all calls at once."""
    for changes in (
        {"checkpoint": "", "mode": "live", "source": "chain", "tap": False},
        {"checkpoint": ""},
        {"mode": "live"},
        {"source": "chain"},
        {"tap": False},
    ):
        yield _each_forward(program, lambda forward, changes=changes: _with_calls(forward, changes))
    yield _each_forward(program, lambda forward: replace(forward, direct=False))
    yield _each_forward(program, lambda forward: replace(forward, rows=1))


def _with_calls(forward: Forward, changes: dict[str, object]) -> Forward:
    return replace(forward, calls=_changed(forward.calls, changes))


def _changed(calls: tuple[Call, ...], changes: dict[str, object]) -> tuple[Call, ...]:
    return tuple(replace(call, inner=_changed(call.inner, changes), **changes) for call in calls)  # type: ignore[arg-type]


def _fewer_calls(program: Program) -> Iterator[Program]:
    """In each forward: no calls, half of them, one less, or a simpler one."""
    for place, rank in _ranks(program):
        for name in ("forwards", "evaluations"):
            batches: tuple[Forward, ...] = getattr(rank, name)
            for index, forward in enumerate(batches):
                for calls in _smaller_calls(forward.calls):
                    changed = (*batches[:index], replace(forward, calls=calls), *batches[index + 1 :])
                    yield _with_rank(program, place, replace(rank, **{name: changed}))  # type: ignore[arg-type]


def _smaller_calls(calls: tuple[Call, ...]) -> Iterator[tuple[Call, ...]]:
    if len(calls) > 1:
        yield ()
        yield calls[: len(calls) // 2]
        yield calls[len(calls) // 2 :]
    for index, call in enumerate(calls):
        yield _without(calls, index)
        simpler = [replace(call, inner=inner) for inner in _smaller_calls(call.inner)]
        for changes in ({"checkpoint": ""}, {"mode": "live"}, {"source": "chain"}, {"tap": False}):
            simpler.append(replace(call, **changes))  # type: ignore[arg-type]
        for one in simpler:
            if one != call:
                yield (*calls[:index], one, *calls[index + 1 :])


# Modules


def _fewer_modules(program: Program) -> Iterator[Program]:
    """Without one module and its calls; elements in the middle of a list are replaced by nothing."""
    for name, spec in every_module(program.modules):
        yield _drop_calls(replace(program, modules=_edited(program.modules, name, None)), program)
        if spec.kind not in ("identity", *LISTS):
            nothing = ModuleSpec(spec.name, "identity")
            yield _drop_calls(replace(program, modules=_edited(program.modules, name, nothing)), program)


def _plain_modules(program: Program) -> Iterator[Program]:
    for name, spec in every_module(program.modules):
        for changes in (
            {"kind": "linear", "size": 1, "shapes": (), "target": "", "children": (), "output": "tensor"},
            {"output": "tensor"},
            {"size": 1},
            {"shapes": spec.shapes[:1]},
        ):
            if spec.kind in LISTS or (spec.kind in ("tree", "sequential") and "kind" in changes):
                continue
            simpler = replace(spec, **changes)  # type: ignore[arg-type]
            if simpler != spec:
                yield replace(program, modules=_edited(program.modules, name, simpler))


def _edited(specs: tuple[ModuleSpec, ...], name: str, new: ModuleSpec | None) -> tuple[ModuleSpec, ...]:
    """`specs` with the one of this full name replaced or removed. In the middle of a list it cannot be removed."""
    first, _, rest = name.partition(".")
    edited = []
    for spec in specs:
        if spec.name != first:
            edited.append(spec)
        elif rest:
            edited.append(replace(spec, children=_edited(spec.children, rest, new)))
        elif new is not None:
            edited.append(new)
    return tuple(edited)


def _drop_calls(program: Program, before: Program) -> Program:
    """`program` without invalid calls, or, for a removed tree, with the calls inside them."""
    kinds = dict(every_module(program.modules))
    if any(spec.kind == "list" and _has_gap(spec) for spec in kinds.values()):
        return before  # the names of its elements would change

    def kept(calls: tuple[Call, ...], tree: str) -> tuple[Call, ...]:
        left = []
        for call in calls:
            name = f"{tree}.{call.path}" if tree else call.path
            spec = kinds.get(name)
            while spec is not None and spec.kind == "same":
                name, spec = spec.target, kinds.get(spec.target)
            if spec is not None:
                left.append(replace(call, inner=kept(call.inner, name) if spec.kind == "tree" else ()))
        return tuple(left)

    return _each_forward(program, lambda forward: replace(forward, calls=kept(forward.calls, "")))


def _has_gap(spec: ModuleSpec) -> bool:
    return [child.name for child in spec.children] != [str(index) for index in range(len(spec.children))]


FAMILIES: Sequence[Family] = (
    _fewer_steps,
    _fewer_micros,
    _fewer_ranks,
    _simple_backward,
    _fewer_forwards,
    _plain_settings,
    _plain_calls,
    _fewer_calls,
    _fewer_modules,
    _plain_modules,
    _plain_limits,
)


# Changes in many places


def _without(items: tuple, index: int) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], *items[index + 1 :])


def _each_micro(program: Program, change: Callable[[Micro], Micro]) -> Program:
    return replace(program, steps=tuple(tuple(change(micro) for micro in step) for step in program.steps))


def _each_rank(program: Program, change: Callable[[RankMicro], RankMicro]) -> Program:
    return _each_micro(program, lambda micro: replace(micro, ranks=tuple(change(rank) for rank in micro.ranks)))


def _each_forward(program: Program, change: Callable[[Forward], Forward]) -> Program:
    return _each_rank(
        program,
        lambda rank: replace(
            rank,
            forwards=tuple(change(forward) for forward in rank.forwards),
            evaluations=tuple(change(forward) for forward in rank.evaluations),
        ),
    )


Place = tuple[int, int, int]  # step, micro-batch, rank


def _ranks(program: Program) -> Iterator[tuple[Place, RankMicro]]:
    for step, micros in enumerate(program.steps):
        for number, micro in enumerate(micros):
            for rank, part in enumerate(micro.ranks):
                yield (step, number, rank), part


def _with_rank(program: Program, place: Place, part: RankMicro) -> Program:
    step, number, rank = place
    micro = program.steps[step][number]
    ranks = (*micro.ranks[:rank], part, *micro.ranks[rank + 1 :])
    micros = (*program.steps[step][:number], replace(micro, ranks=ranks), *program.steps[step][number + 1 :])
    return replace(program, steps=(*program.steps[:step], micros, *program.steps[step + 1 :]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Shrink a program that a campaign has written, and print it as a script."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.shrink", description=main.__doc__)
    parser.add_argument("program", type=Path, help="JSON file of a failing program")
    parser.add_argument("--ranks", choices=RANKS, default=RANKS[0], help="kind of ranks")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help="maximum number of programs to run")
    parser.add_argument("--deadline", type=float, default=3.0, help="seconds per program")
    parser.add_argument("--tries", type=int, default=1, help="runs of each program")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    program = Program.from_json(options.program.read_text())
    runner = make_runner(options.ranks, options.deadline)
    try:
        kind = next((found.kind for _ in range(options.tries) if not (found := runner.run(program)).is_ok), "ok")
        if kind == "ok":
            print(f"{options.program} does not fail in {options.tries} runs", file=sys.stderr)
            return 1
        write_shrunk(options.program, program, kind, fails_like(runner, kind, options.tries), options.attempts)
    finally:
        if isinstance(runner, ProcessRunner):
            runner.close()
    return 0


def write_shrunk(
    path: Path, program: Program, kind: str, fails: Callable[[Program], bool], attempts: int = ATTEMPTS
) -> Shrunk:
    """Shrink `program`; the result is written beside `path`, as a script and as JSON."""
    shrunk = shrink(program, fails, attempts)
    script = path.with_name(f"{path.stem}-shrunk.py")
    script.write_text(script_of(shrunk.program, kind, script.name))
    script.with_suffix(".json").write_text(shrunk.program.to_json(indent=1))
    print(f"{script} ({shrunk.attempts} programs tried)\n{describe(shrunk.program)}", flush=True)
    return shrunk


if __name__ == "__main__":
    sys.exit(main())
