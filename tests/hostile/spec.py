"""A hostile program as plain frozen data, fully determined by its JSON text.

    Program
      modules   the tree of the model: ModuleSpec, lists and trees nested
      steps     per update, per micro-batch, per rank: which modules run, in which order, in which context
      the rest  stage, limits, offload, optimizer: the content of ds.json

Nothing here imports torch, so that programs can be generated, counted and reduced without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.as_json import AsJson

# Kinds of modules. Those of the first group are called with a tensor; a tree is called with the calls to make inside.
LEAVES = ("mlp", "linear", "norm", "gain", "bank", "table", "empty", "identity", "reader")
LISTS = ("list", "dict")  # nn.ModuleList and nn.ModuleDict: never called, only their elements
KINDS = (*LEAVES, "sequential", "tree", *LISTS, "same")
OUTPUTS = ("tensor", "tuple", "dict", "object")
CHECKPOINTS = ("", "reentrant", "non_reentrant")
MODES = ("live", "detached", "dead", "no_grad")
SOURCES = ("chain", "input")
BACKWARDS = ("sum", "each", "late", "late_reversed", "split", "retain")
EVALUATIONS = ("first", "between", "last")
GROUPS = ("none", "hpz", "mics")  # second shards, or shard groups, of two ranks
OFFLOADS = ("none", "optimizer_cpu", "param_cpu", "both_cpu", "optimizer_nvme", "param_nvme")


@dataclass(frozen=True)
class ModuleSpec:
    """One module of the tree.

    Attributes:
        name: in its parent.
        size: hidden width, number of vectors or of rows, depending on the kind.
        shapes: of a gain's or a tree's own parameters, including 0-dim and odd ones.
        output: the form in which a leaf returns its tensor.
        target: full name of the module that is registered here again ("same"), or of the parameter that a "reader"
            reads although it belongs to another module.
    """

    name: str
    kind: str
    size: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()
    output: str = "tensor"
    target: str = ""
    children: tuple[ModuleSpec, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of a module, by its path from the calling tree.

    Attributes:
        inner: the calls that a called tree makes in turn.
        checkpoint: activation checkpointing around the call.
        mode: use of the output: "live", "detached" from the graph, "dead" (unused), or computed under "no_grad".
        source: the input is the output of the previous calls, or the model's "input".
        tap: the output is also used in the second loss directly.
    """

    path: str
    inner: tuple[Call, ...] = ()
    checkpoint: str = ""
    mode: str = "live"
    source: str = "chain"
    tap: bool = False


@dataclass(frozen=True)
class Forward:
    """One forward on one batch.

    Attributes:
        seed: of the batch.
        rows: of the batch.
        direct: modules are called from outside, without the model's own forward.
    """

    seed: int
    rows: int
    calls: tuple[Call, ...]
    direct: bool = False


@dataclass(frozen=True)
class RankMicro:
    """One rank's work in one micro-batch: training forwards, and evaluations at one point among them."""

    forwards: tuple[Forward, ...]
    evaluations: tuple[Forward, ...] = ()
    evaluate: str = "first"


@dataclass(frozen=True)
class Micro:
    """One micro-batch: every rank's work, and how all of them call backward.

    "sum" is one backward of all losses together; "each" one after every forward; "late" one per forward after all of
    them ("late_reversed": the last forward first); "split" two per forward, one for each of its losses; "retain" two of
    the same graph.
    """

    ranks: tuple[RankMicro, ...]
    backward: str = "sum"

    @property
    def num_backwards(self) -> tuple[int, ...]:
        """Per rank; they must be equal, because each of them reduces gradients."""
        factor = 2 if self.backward in ("split", "retain") else 1
        return tuple(1 if self.backward == "sum" else factor * len(rank.forwards) for rank in self.ranks)


@dataclass(frozen=True)
class Limits:
    """The limits of stage 3 in elements; None omits a key. With all at zero small models are also partitioned."""

    prefetch: int | None = None
    max_live: int | None = None
    max_reuse: int | None = None
    param_persistence: int | None = None
    model_persistence: int | None = None


@dataclass(frozen=True)
class Program(AsJson):
    """A complete training run of `world` ranks.

    Attributes:
        seed: of the initial weights.
        order: how the ranks' calls relate; redundant to `steps`, but useful for selection.
        shapes: of the root's own parameters.
        frozen: full names of parameters without gradient.
        ties: (full name of a parameter, full name of its replacement).
        leaves: names of modules that are marked as leaf modules of stage 3.
        steps: the micro-batches of each update, always the same number.
    """

    seed: int
    world: int
    stage: int
    order: str
    width: int
    modules: tuple[ModuleSpec, ...]
    steps: tuple[tuple[Micro, ...], ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    frozen: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    leaves: tuple[str, ...] = ()
    limits: Limits = Limits()
    offload: str = "none"
    optimizer: str = "sgd"
    clip: float = 0.0
    reduce_bucket: int | None = None
    overlap: bool = True
    groups: str = "none"

    @property
    def accumulation(self) -> int:
        return len(self.steps[0])

    def micros(self) -> Iterator[Micro]:
        for step in self.steps:
            yield from step

    def forwards(self) -> Iterator[Forward]:
        """All forwards, including evaluations."""
        for micro in self.micros():
            for rank in micro.ranks:
                yield from (*rank.forwards, *rank.evaluations)


def every_call(calls: tuple[Call, ...]) -> Iterator[Call]:
    """`calls` and the calls inside them."""
    for call in calls:
        yield call
        yield from every_call(call.inner)


def every_module(modules: tuple[ModuleSpec, ...], prefix: str = "") -> Iterator[tuple[str, ModuleSpec]]:
    """(full name, spec) of all modules below the root, parents first."""
    for spec in modules:
        name = f"{prefix}{spec.name}"
        yield name, spec
        yield from every_module(spec.children, f"{name}.")


def find_problem(program: Program) -> str | None:
    """Why ranks could not run this program: a violation of the engine's contract."""
    if len({len(step) for step in program.steps}) != 1:
        return "steps have different numbers of micro-batches"
    for micro in program.micros():
        if len(micro.ranks) != program.world:
            return f"{len(micro.ranks)} ranks in a micro-batch, the world has {program.world}"
        if len(set(micro.num_backwards)) != 1 or not micro.num_backwards[0]:
            return f"ranks call backward {micro.num_backwards} times"
        if not all(rank.forwards for rank in micro.ranks):
            return "a rank has nothing to call backward on"
    return None
