"""Random module trees for hostile programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.hostile.spec import LISTS, OUTPUTS, ModuleSpec

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (2,), (7,), (3, 1, 2), (1, 5), (2, 3), (11, 1))
_LEAF_KINDS = ("mlp", "linear", "norm", "gain", "bank", "table", "empty", "identity")
_LEAF_WEIGHTS = (30, 20, 10, 15, 10, 6, 3, 6)
_CHILD_KINDS = ("leaf", "list", "dict", "tree", "sequential", "same", "reader")
_CHILD_WEIGHTS = (42, 20, 4, 14, 5, 7, 8)
_LIST_NAMES = ("experts", "blocks", "layers", "branches")


@dataclass(frozen=True)
class Grown:
    """A tree, modifications of its parameters, and callable modules."""

    modules: tuple[ModuleSpec, ...]
    shapes: tuple[tuple[int, ...], ...]
    frozen: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    _callable: dict[str, tuple[str, ...]]
    _targets: dict[str, str]

    def callable_in(self, tree: str) -> tuple[str, ...]:
        """Paths, from `tree` (a full name, "" for the root), of the modules that it can call."""
        return self._callable[tree]

    def tree_at(self, name: str) -> str:
        """Full name of the tree that is registered as `name`; "" if there is none."""
        name = self._targets.get(name, name)
        return name if name in self._callable else ""


def grow(random: Random, most_modules: int, depth: int) -> Grown:
    """A tree with at most `most_modules` modules per level, and trees nested up to `depth`."""
    grower = _Grower(random, most_modules)
    modules = grower.children("", depth)
    shapes = grower.shapes(2) if random.random() < 0.4 else ()
    names = [f"own.{index}" for index in range(len(shapes))] + grower.parameters
    ties = grower.ties()
    tied = {name for name, _ in ties}
    left = [name for name in names if name not in tied]
    frozen = _frozen(random, left)
    filled = [name for name in left if not name.endswith(".nothing")]
    if not filled:
        shapes = ((3,),)  # otherwise nothing could be trained
    elif not set(filled) - set(frozen):
        frozen = tuple(name for name in frozen if name != filled[0])
    return Grown(modules, shapes, frozen, ties, grower.callable, grower.targets)


def _frozen(random: Random, names: list[str]) -> tuple[str, ...]:
    style = random.choices(("none", "some", "module"), (60, 25, 15))[0]
    if style == "none" or not names:
        return ()
    if style == "some":
        return tuple(name for name in names if random.random() < 0.3)
    module = random.choice(names).rpartition(".")[0]
    return tuple(name for name in names if name.startswith(f"{module}."))


@dataclass
class _Grower:
    random: Random
    most_modules: int
    parameters: list[str] = field(default_factory=list)  # full names, in the order of construction
    matrices: dict[tuple[str, int], list[str]] = field(default_factory=dict)  # of one shape each
    finished: list[tuple[str, ModuleSpec]] = field(default_factory=list)  # modules that may be registered again
    callable: dict[str, tuple[str, ...]] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    num_named: int = 0

    def children(self, tree: str, depth: int) -> tuple[ModuleSpec, ...]:
        """Generates the modules of a tree, and records which ones it can call."""
        specs = tuple(self._child(tree, depth) for _ in range(self.random.randint(1, self.most_modules)))
        self.callable[tree] = tuple(path for spec in specs for path in _callable(spec))
        return specs

    def _child(self, tree: str, depth: int) -> ModuleSpec:
        kind = self.random.choices(_CHILD_KINDS, _CHILD_WEIGHTS)[0]
        if kind in LISTS:
            self.num_named += 1
            name = self.random.choice(_LIST_NAMES) + str(self.num_named)
            return self._list(kind, _join(tree, name), name, depth)
        return self._element(kind, tree, depth)

    def _element(self, kind: str, tree: str, depth: int, name: str = "") -> ModuleSpec:
        """A callable module; one that is not possible here becomes a leaf."""
        self.num_named += 1
        name = name or f"m{self.num_named}"
        full = _join(tree, name)
        if kind == "tree" and depth > 0:
            spec = ModuleSpec(name, "tree", shapes=self._own_shapes(full), children=self.children(full, depth - 1))
        elif kind == "sequential":
            inner = tuple(
                self._leaf(self._leaf_kind(), full, str(index), "tensor") for index in range(self.random.randint(1, 3))
            )
            spec = ModuleSpec(name, "sequential", children=inner)
        elif kind == "same" and self.finished:
            target, original = self.random.choice(self.finished)
            self.targets[full] = self.targets.get(target, target)
            return ModuleSpec(name, "same", target=target)
        elif kind == "reader" and self.parameters:
            target = self.random.choice(self.parameters)
            spec = ModuleSpec(name, "reader", target=target, output=self.random.choice(OUTPUTS))
            self.parameters.append(f"{full}.bias")
        else:
            spec = self._leaf(self._leaf_kind(), tree, name, self.random.choice(("tensor", *OUTPUTS)))
        self.finished.append((full, spec))
        return spec

    def _list(self, kind: str, full: str, name: str, depth: int) -> ModuleSpec:
        """Experts of one shape, or anything; sometimes nested lists."""
        draw = self.random
        count = draw.randint(2, 4)
        if depth > 0 and draw.random() < 0.15:
            inner = tuple(self._list("list", f"{full}.{index}", str(index), 0) for index in range(2))
            return ModuleSpec(name, kind, children=inner)
        if draw.random() < 0.7:
            leaf, size = draw.choice(("mlp", "mlp", "linear", "bank")), draw.randint(1, 5)
            specs = []
            for index in range(count):
                specs.append(self._leaf(leaf, full, str(index), "tensor", size))
                self.finished.append((f"{full}.{index}", specs[-1]))
            return ModuleSpec(name, kind, children=tuple(specs))
        kinds = [draw.choice(("leaf", "tree", "sequential", "reader", "same")) for _ in range(count)]
        children = tuple(self._element(one, full, depth, str(index)) for index, one in enumerate(kinds))
        return ModuleSpec(name, kind, children=children)

    def _leaf_kind(self) -> str:
        return self.random.choices(_LEAF_KINDS, _LEAF_WEIGHTS)[0]

    def _leaf(self, kind: str, tree: str, name: str, output: str, size: int = 0) -> ModuleSpec:
        size = size or self.random.randint(1, 5)
        shapes = self.shapes(3) if kind == "gain" else ()
        if kind == "identity":
            output = "tensor"
        spec = ModuleSpec(name, kind, size, shapes, output)
        names = [f"{_join(tree, name)}.{parameter}" for parameter in _parameters(spec)]
        self.parameters += names
        if kind in ("mlp", "linear") and names:
            self.matrices.setdefault((kind, size if kind == "mlp" else 0), []).append(names[0])
        return spec

    def _own_shapes(self, full: str) -> tuple[tuple[int, ...], ...]:
        shapes = self.shapes(2) if self.random.random() < 0.5 else ()
        self.parameters += [f"{full}.own.{index}" for index in range(len(shapes))]
        return shapes

    def shapes(self, most: int) -> tuple[tuple[int, ...], ...]:
        return tuple(self.random.choice(SHAPES) for _ in range(self.random.randint(1, most)))

    def ties(self) -> tuple[tuple[str, str], ...]:
        """Matrices of one shape that become one parameter."""
        alike = [names for names in self.matrices.values() if len(names) > 1]
        if not alike or self.random.random() > 0.3:
            return ()
        first, second = self.random.sample(self.random.choice(alike), 2)
        return ((second, first),)


def _parameters(spec: ModuleSpec) -> list[str]:
    """Names of a leaf's parameters, as in model.py."""
    if spec.kind == "mlp":
        return ["up.weight", "up.bias", "down.weight", *(["down.bias"] if spec.size % 2 == 0 else [])]
    if spec.kind == "linear":
        return ["inner.weight", *(["inner.bias"] if spec.size % 2 == 0 else [])]
    if spec.kind == "gain":
        return [f"factors.{index}" for index in range(len(spec.shapes))]
    if spec.kind == "bank":
        return [f"vectors.{index}" for index in range(spec.size)]
    return {
        "norm": ["inner.weight", "inner.bias"],
        "table": ["rows.weight"],
        "empty": ["nothing", "bias"],
        "identity": [],
    }[spec.kind]


def _callable(spec: ModuleSpec) -> list[str]:
    """Callable paths at `spec`: itself, or the elements of a list."""
    if spec.kind not in LISTS:
        return [spec.name]
    return [f"{spec.name}.{path}" for child in spec.children for path in _callable(child)]


def _join(tree: str, name: str) -> str:
    return f"{tree}.{name}" if tree else name
