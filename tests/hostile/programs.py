"""Random hostile programs: `random_program(seed, size)` always gives the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from tests.hostile.spec import (
    BACKWARDS,
    EVALUATIONS,
    GROUPS,
    LEAVES,
    Call,
    Forward,
    Limits,
    Micro,
    ModuleSpec,
    Program,
    RankMicro,
    every_call,
    every_module,
)
from tests.hostile.trees import Grown, grow

# How the ranks' calls relate: the same everywhere; the same on all ranks, different each time; the same calls in each
# rank's own order; one order in which ranks skip and repeat; entirely different; and the same everywhere for several
# updates, with occasional updates of the other kinds.
ORDERS = ("same", "same_varying", "permuted", "skipping", "divergent", "changing")
_ORDER_WEIGHTS = (20, 10, 15, 15, 25, 15)
_STAGES = (0, 1, 2, 3)
_STAGE_WEIGHTS = (1, 1, 2, 6)


@dataclass(frozen=True)
class Size:
    """Upper limits of a program."""

    modules: int
    depth: int
    calls: int
    steps: int
    accumulation: int
    forwards: int
    worlds: tuple[int, ...]


SIZES = {
    "small": Size(modules=3, depth=0, calls=3, steps=2, accumulation=1, forwards=2, worlds=(2,)),
    "medium": Size(modules=5, depth=2, calls=6, steps=3, accumulation=2, forwards=3, worlds=(2, 2, 2, 3, 4)),
    "large": Size(modules=9, depth=3, calls=14, steps=4, accumulation=3, forwards=4, worlds=(2, 2, 3, 4)),
}


def random_program(seed: int, size: str = "medium") -> Program:
    """The program of this seed; `size` is one of SIZES."""
    return _Generator(Random(f"{size}:{seed}"), SIZES[size]).program(seed)


class _Generator:
    """Draws one program."""

    def __init__(self, random: Random, size: Size) -> None:
        self._random = random
        self._size = size
        self._grown: Grown
        self._checkpoint = ""

    def program(self, seed: int) -> Program:
        draw = self._random
        world = draw.choice(self._size.worlds)
        stage = draw.choices(_STAGES, _STAGE_WEIGHTS)[0]
        self._grown = grow(draw, self._size.modules, self._size.depth)
        self._checkpoint = draw.choices(("", "reentrant", "non_reentrant", "mixed"), (45, 15, 15, 25))[0]
        order = draw.choices(ORDERS, _ORDER_WEIGHTS)[0]
        return Program(
            seed=seed,
            world=world,
            stage=stage,
            order=order,
            width=draw.choice((3, 5, 8)),
            modules=self._grown.modules,
            shapes=self._grown.shapes,
            frozen=self._grown.frozen,
            ties=self._grown.ties,
            leaves=self._leaves() if stage == 3 else (),
            steps=self._steps(order, world),
            limits=self._limits() if stage == 3 else Limits(),
            offload=self._offload(stage),
            optimizer=draw.choice(("sgd", "adamw")),
            clip=draw.choice((0.0, 0.0, 0.5)),
            reduce_bucket=draw.choice((None, 7, 60)) if stage < 3 else None,
            overlap=draw.random() < 0.8,
            groups=draw.choice(GROUPS) if stage == 3 and world == 4 else "none",
        )

    # Settings

    def _leaves(self) -> tuple[str, ...]:
        trees = [name for name, spec in every_module(self._grown.modules) if spec.kind == "tree"]
        return (self._random.choice(trees),) if trees and self._random.random() < 0.1 else ()

    def _limits(self) -> Limits:
        draw = self._random
        style = draw.choices(("zero", "default", "mixed"), (45, 20, 35))[0]
        if style == "default":
            return Limits()
        if style == "zero":
            return Limits(prefetch=0, max_live=0, max_reuse=0, param_persistence=0)
        return Limits(
            prefetch=draw.choice((None, 0, 20)),
            max_live=draw.choice((None, 0, 15, 60)),
            max_reuse=draw.choice((None, 0, 15, 60)),
            param_persistence=draw.choice((None, 0, 0, 4, 10)),
            model_persistence=draw.choice((None, None, 8)),
        )

    def _offload(self, stage: int) -> str:
        draw = self._random.random()
        if stage == 0:
            return "optimizer_cpu" if draw < 0.12 else "none"
        if stage < 3:
            return "optimizer_cpu" if draw < 0.12 else "optimizer_nvme" if draw < 0.15 else "none"
        for bound, offload in ((0.06, "optimizer_cpu"), (0.12, "param_cpu"), (0.18, "both_cpu")):
            if draw < bound:
                return offload
        return "optimizer_nvme" if draw < 0.195 else "param_nvme" if draw < 0.21 else "none"

    # Calls

    def _steps(self, order: str, world: int) -> tuple[tuple[Micro, ...], ...]:
        draw = self._random
        backward = draw.choices((*BACKWARDS, "mixed"), (50, 8, 8, 8, 8, 8, 10))[0]
        if order == "changing" and backward == "mixed":
            backward = "sum"
        evaluates = draw.random() < 0.3
        direct = draw.random() < 0.1
        base = self._calls()
        num_steps, accumulation = draw.randint(1, self._size.steps), draw.randint(1, self._size.accumulation)
        usual: list[Micro] = []
        if order == "changing":
            num_steps += 3
            usual = [self._micro("same", base, world, backward, evaluates, direct) for _ in range(accumulation)]
        steps = []
        for _ in range(num_steps):
            if usual and draw.random() < 0.7:
                steps.append(tuple(usual))
                continue
            of_step = draw.choice(("permuted", "skipping", "divergent")) if usual else order
            micros = []
            for _ in range(accumulation):
                if order == "same_varying":
                    base = self._calls()
                way = draw.choice(BACKWARDS) if backward == "mixed" else backward
                micros.append(self._micro(of_step, base, world, way, evaluates, direct))
            steps.append(tuple(micros))
        return tuple(steps)

    def _micro(
        self, order: str, base: tuple[Call, ...], world: int, backward: str, evaluates: bool, direct: bool
    ) -> Micro:
        """If ranks are alike, they have the same number of forwards and evaluations; otherwise they need not."""
        draw = self._random
        alike = order.startswith("same")
        num_forwards = self._num_forwards(backward)
        num_evaluations = draw.choice((0, 1, 2)) if evaluates else 0
        place = draw.choice(EVALUATIONS)
        ranks = []
        for _ in range(world):
            if not alike and backward == "sum" and draw.random() < 0.3:
                num_forwards = self._num_forwards(backward)
            if not alike and evaluates:
                num_evaluations, place = draw.choice((0, 1, 2)), draw.choice(EVALUATIONS)
            ranks.append(
                RankMicro(
                    forwards=tuple(self._forward(self._calls_of(order, base), direct) for _ in range(num_forwards)),
                    evaluations=tuple(
                        self._forward(self._calls_of(order, base), False) for _ in range(num_evaluations)
                    ),
                    evaluate=place,
                )
            )
        return Micro(tuple(ranks), backward)

    def _num_forwards(self, backward: str) -> int:
        few = 1 if backward in ("sum", "split", "retain") and self._random.random() < 0.6 else 2
        return self._random.randint(1, self._size.forwards) if few > 1 else 1

    def _forward(self, calls: tuple[Call, ...], direct: bool) -> Forward:
        draw = self._random
        return Forward(seed=draw.randrange(10**6), rows=draw.randint(1, 4), calls=calls, direct=direct)

    def _calls_of(self, order: str, base: tuple[Call, ...]) -> tuple[Call, ...]:
        draw = self._random
        if order.startswith("same"):
            return base
        if order == "permuted":
            return _shuffled(draw, base)
        if order == "skipping":
            kept = [call for call in base for _ in range(draw.choice((0, 1, 1, 1, 2)))]
            return tuple(replace(call, inner=self._calls_of(order, call.inner)) for call in kept)
        return self._calls()

    def _calls(self) -> tuple[Call, ...]:
        return self._calls_in(self._grown.callable_in(""), "", self._checkpoint)

    def _calls_in(self, paths: Sequence[str], tree: str, checkpoint: str) -> tuple[Call, ...]:
        """Random calls among `paths`, which are relative to `tree`."""
        most = self._size.calls if not tree else max(2, self._size.calls // 2)
        count = self._random.choice((0, *range(1, most + 1), *range(1, most + 1))) if paths else 0
        return tuple(self._call(self._random.choice(paths), tree, checkpoint) for _ in range(count))

    def _call(self, path: str, tree: str, checkpoint: str) -> Call:
        draw = self._random
        name = f"{tree}.{path}" if tree else path
        mine = draw.choice(("", "reentrant", "non_reentrant")) if checkpoint == "mixed" else checkpoint
        if mine and draw.random() < 0.3:
            mine = ""
        inside = self._grown.tree_at(name)
        # Inside a checkpoint there is only sometimes another one, of the same kind.
        deeper = checkpoint if not mine else mine if draw.random() < 0.3 else ""
        return Call(
            path=path,
            inner=self._calls_in(self._grown.callable_in(inside), inside, deeper) if inside else (),
            checkpoint=mine,
            mode=draw.choices(("live", "detached", "dead", "no_grad"), (85, 5, 5, 5))[0],
            source=draw.choices(("chain", "input"), (85, 15))[0],
            tap=draw.random() < 0.15,
        )


def _shuffled(random: Random, calls: tuple[Call, ...]) -> tuple[Call, ...]:
    mixed = [replace(call, inner=_shuffled(random, call.inner)) for call in calls]
    random.shuffle(mixed)
    return tuple(mixed)


def features(program: Program) -> frozenset[str]:
    """The features of a program, as words like "stage=3" or "kind=reader", to count and select by."""
    found = {
        f"{key}={getattr(program, key)}"
        for key in ("stage", "world", "order", "offload", "optimizer", "width", "groups")
    }
    found |= {f"kind={spec.kind}" for _, spec in every_module(program.modules)}
    found |= {f"output={spec.output}" for _, spec in every_module(program.modules) if spec.kind in LEAVES}
    found |= {f"accumulation={program.accumulation}", f"steps={len(program.steps)}", f"overlap={program.overlap}"}
    present = {
        "frozen": program.frozen,
        "ties": program.ties,
        "leaves": program.leaves,
        "clip": program.clip,
        "reduce_bucket": program.reduce_bucket,
        "0-dim": any(() in spec.shapes for _, spec in every_module(program.modules)) or () in program.shapes,
        "own_parameters": program.shapes,
        "nested_lists": any(_has_list(spec.children) for _, spec in every_module(program.modules)),
    }
    found |= {name for name, value in present.items() if value}
    found |= _limit_features(program)
    for micro in program.micros():
        found |= _micro_features(micro)
    return frozenset(found)


def _has_list(specs: tuple[ModuleSpec, ...]) -> bool:
    return any(spec.kind in ("list", "dict") for spec in specs)


def _limit_features(program: Program) -> set[str]:
    if program.stage < 3:
        return set()
    limits = program.limits
    if limits == Limits():
        return {"limits=default"}
    values = (limits.prefetch, limits.max_live, limits.max_reuse, limits.param_persistence)
    return {"limits=zero" if values == (0, 0, 0, 0) else "limits=mixed"}


def _micro_features(micro: Micro) -> set[str]:
    found = {f"backward={micro.backward}"}
    orders = {tuple(tuple(_path(forward.calls)) for forward in rank.forwards) for rank in micro.ranks}
    found |= {"ranks_differ"} if len(orders) > 1 else set()
    found |= {"uneven_forwards"} if len({len(rank.forwards) for rank in micro.ranks}) > 1 else set()
    found |= {"several_forwards"} if any(len(rank.forwards) > 1 for rank in micro.ranks) else set()
    places = {(len(rank.evaluations), rank.evaluate if rank.evaluations else "") for rank in micro.ranks}
    found |= {"uneven_evaluations"} if len(places) > 1 else set()
    for rank in micro.ranks:
        found |= {f"evaluate={rank.evaluate}"} if rank.evaluations else set()
        for forward in (*rank.forwards, *rank.evaluations):
            found |= _forward_features(forward)
    return found


def _forward_features(forward: Forward) -> set[str]:
    found = {"direct"} if forward.direct else set()
    calls = list(every_call(forward.calls))
    paths = [call.path for call in forward.calls]
    found |= {"idle"} if not calls else set()
    found |= {"repeated"} if len(set(paths)) < len(paths) else set()
    found |= {"tap"} if any(call.tap for call in calls) else set()
    found |= {f"checkpoint={call.checkpoint}" for call in calls if call.checkpoint}
    found |= {f"mode={call.mode}" for call in calls} | {f"source={call.source}" for call in calls}
    return found


def _path(calls: tuple[Call, ...]) -> list[str]:
    return [call.path for call in every_call(calls)]
