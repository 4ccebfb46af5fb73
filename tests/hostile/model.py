"""The model of a hostile program: the same weights in every process, drawn for every parameter from its name."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hostile.spec import Call, ModuleSpec, Program


class Leaf(nn.Module):
    """A module from (rows, width) to the same shape, which returns its tensor in one of several forms."""

    output = "tensor"

    def compute(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, h: Tensor) -> Any:
        out = self.compute(h)
        if self.output == "tuple":
            return out, None
        if self.output == "dict":
            return {"out": out}
        return SimpleNamespace(out=out) if self.output == "object" else out


class Mlp(Leaf):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width, bias=size % 2 == 0)

    def compute(self, h: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(h)))


class Gain(Leaf):
    """Parameters of any shape, each of which scales everything a little."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.empty(shape) for shape in shapes)

    def compute(self, h: Tensor) -> Tensor:
        return scaled(torch.tanh(h), self.factors)


class Bank(Leaf):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.empty(width) for _ in range(size))

    def compute(self, h: Tensor) -> Tensor:
        for vector in self.vectors:
            h = torch.tanh(h * vector + vector)
        return h


class Table(Leaf):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(size, width)

    def compute(self, h: Tensor) -> Tensor:
        return torch.tanh(h + self.rows(torch.arange(h.shape[0]) % self.rows.num_embeddings))


class Empty(Leaf):
    """A parameter without elements beside one with some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.nothing, self.bias = nn.Parameter(torch.empty(0, width)), nn.Parameter(torch.empty(width))

    def compute(self, h: Tensor) -> Tensor:
        return torch.tanh(h + self.bias) + self.nothing.sum()


class Reader(Leaf):
    """Reads a parameter of another module, which need not be called for that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width))
        self.owner: list[nn.Module] = []  # in a list, so that it is not registered here
        self.attribute = ""

    def compute(self, h: Tensor) -> Tensor:
        value = getattr(self.owner[0], self.attribute)
        return torch.tanh(h + self.bias) * (1 + 0.5 * torch.tanh(value).sum() / max(1, value.numel()))


class Wrapped(Leaf):
    """One of torch's own modules."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def compute(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(h))


class Tree(nn.Module):
    """A module that makes the given calls to the modules below it; may have parameters of its own."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.own = nn.ParameterList(torch.empty(shape) for shape in shapes)

    def forward(self, h: Tensor, calls: tuple[Call, ...], x: Tensor) -> tuple[Tensor, Tensor]:
        """(output, input of the second loss)."""
        h, tapped = run_calls(self, calls, h, x)
        # Scaling by a number saves nothing for backward, unlike tanh: otherwise recomputation would start with that.
        return scaled(h / (1 + len(calls)), self.own), tapped


class Root(Tree):
    """The model: its forward returns the two losses of a batch."""

    def forward(self, x: Tensor, target: Tensor, calls: tuple[Call, ...]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h, tapped = run_calls(self, calls, x, x)
        return two_losses(scaled(h, self.own), tapped, x, target)


def scaled(h: Tensor, factors: nn.ParameterList) -> Tensor:
    for factor in factors:
        h = h * (1 + 0.5 * torch.tanh(factor).sum() / factor.numel())
    return h


def run_calls(tree: nn.Module, calls: tuple[Call, ...], h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Makes `calls` one after the other: `h` sums their outputs, the second value the tapped ones."""
    tapped = x.new_zeros(())
    for call in calls:
        out, inner_tapped = _call(tree.get_submodule(call.path), call, x if call.source == "input" else h, x)
        if call.mode == "dead":
            continue
        if call.mode == "detached":
            out, inner_tapped = out.detach(), inner_tapped.detach()
        h = h + 0.5 * out
        tapped = tapped + inner_tapped
        if call.tap:
            tapped = tapped + out.square().mean()
    return h, tapped


def _call(module: nn.Module, call: Call, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    def run(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(module, Tree):
            return module(h, call.inner, x)
        return unpacked(module(h)), x.new_zeros(())

    with torch.set_grad_enabled(torch.is_grad_enabled() and call.mode != "no_grad"):
        if not call.checkpoint:
            return run(h, x)
        return checkpoint(run, h, x, use_reentrant=call.checkpoint == "reentrant", preserve_rng_state=False)


def unpacked(output: Any) -> Tensor:
    """The tensor in a leaf's output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    return output["out"] if isinstance(output, dict) else output.out


def two_losses(h: Tensor, tapped: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both depend on the input, which requires gradients: there is a graph even if no module was called."""
    return (h - target).square().mean(), 0.1 * (tapped + x.square().mean())


def build_model(program: Program) -> Root:
    """The model with its ties, shared modules, frozen parameters and initial weights."""
    root = Root(program.shapes)
    builder = _Builder(program.width)
    for spec in program.modules:
        root.add_module(spec.name, builder.build(spec, spec.name))
    for name, source in program.ties:
        owner, _, attribute = name.rpartition(".")
        setattr(root.get_submodule(owner), attribute, root.get_parameter(source))
    for reader, name in builder.readers:
        owner, _, reader.attribute = name.rpartition(".")
        reader.owner.append(root.get_submodule(owner))
    for name, parameter in root.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{program.seed}:{name}".encode()))
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        parameter.requires_grad_(name not in program.frozen)
    return root


class _Builder:
    """Builds modules from specs, and records them by name for those that are registered twice."""

    def __init__(self, width: int) -> None:
        self.readers: list[tuple[Reader, str]] = []
        self._width = width
        self._made: dict[str, nn.Module] = {}

    def build(self, spec: ModuleSpec, name: str) -> nn.Module:
        module = self._made[spec.target] if spec.kind == "same" else self._new(spec, name)
        self._made[name] = module
        return module

    def _new(self, spec: ModuleSpec, name: str) -> nn.Module:
        children = {child.name: self.build(child, f"{name}.{child.name}") for child in spec.children}
        if spec.kind == "list":
            return nn.ModuleList(children.values())
        if spec.kind == "dict":
            return nn.ModuleDict(children)
        if spec.kind == "sequential":
            return nn.Sequential(*children.values())
        if spec.kind == "tree":
            tree = Tree(spec.shapes)
            for child_name, child in children.items():
                tree.add_module(child_name, child)
            return tree
        leaf = _leaf(spec, self._width)
        if isinstance(leaf, Leaf):
            leaf.output = spec.output
        if isinstance(leaf, Reader):
            self.readers.append((leaf, spec.target))
        return leaf


def _leaf(spec: ModuleSpec, width: int) -> Leaf | nn.Identity:
    if spec.kind == "mlp":
        return Mlp(width, spec.size)
    if spec.kind == "linear":
        return Wrapped(nn.Linear(width, width, bias=spec.size % 2 == 0))
    if spec.kind == "norm":
        return Wrapped(nn.LayerNorm(width))
    if spec.kind == "gain":
        return Gain(spec.shapes)
    if spec.kind == "bank":
        return Bank(width, spec.size)
    if spec.kind == "table":
        return Table(width, spec.size)
    if spec.kind == "empty":
        return Empty(width)
    if spec.kind == "reader":
        return Reader(width)
    assert spec.kind == "identity", f"no such kind: {spec.kind}"
    return nn.Identity()
