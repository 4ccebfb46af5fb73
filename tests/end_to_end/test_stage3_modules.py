"""Stage 3 with unusual uses of modules, frozen parameters and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.end_to_end.stage3 import (
    WIDTH,
    Seen,
    assert_same_training,
    assert_trains_as_plain,
    engine_of,
    plain,
    rank_batches,
    run_training,
    seeded,
    train_engine,
    vectors,
    whole,
)
from tests.support.limits import NOTHING_STAYS
from tests.support.models import Batch, tiny_llama
from tests.support.ranks import run_each, run_ranks


class Reuser(nn.Module):
    """A block used twice, a weight used outside its module, a parameter of the root itself, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.other = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.3))
        self.outlet = nn.Linear(WIDTH, 2)

    def hidden(self, x: Tensor) -> dict[str, Any]:
        x = self.blocks[0](x)
        x = self.blocks[1](x)
        x = self.blocks[0](x) * self.scale
        x = self.blocks[2](x) + nn.functional.linear(x, self.other.weight.t())
        return {"hidden": (self.blocks[0](x), [x])}

    def forward(self, x: Tensor) -> Tensor:
        first, (second,) = self.hidden(x)["hidden"]
        return self.outlet(self.other(first) + second).square().mean()


def test_a_module_used_twice_and_a_parameter_used_elsewhere() -> None:
    """The gradient of a module that ran twice in a forward was wrong, or "computed twice" was raised; a weight read
    from another module was an empty tensor."""
    assert_trains_as_plain(partial(seeded, Reuser), partial(vectors, 6))


class Stranger(nn.Module):
    """Uses the weight of a module without being its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = nn.functional.linear(x, self.embed.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def ids_batches(steps: int) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(0)
    return [[{"ids": torch.randint(20, (3, 5), generator=generator)} for _ in range(2)] for _ in range(steps)]


def test_an_embedding_used_as_the_head() -> None:
    """`F.linear(x, self.embed.weight)` at the end, after the embedding was released, gave "size mismatch" or zeros."""
    assert_trains_as_plain(partial(seeded, Stranger), partial(ids_batches, 5))


class Chain(nn.ModuleList):
    """A list with a parameter of its own and a forward."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.tanh(layer(x)) * self.gain
        return x


class Unusual(nn.Module):
    """Parameters in places that a traversal of layers misses."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH), dim=1)
        self.chain = Chain()
        self.vectors = nn.ParameterList(torch.full((WIDTH,), 0.5 + n) for n in range(2))
        self.table = nn.ParameterDict({"bias": torch.zeros(WIDTH)})
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.chain(torch.tanh(self.normed(self.inlet(x))))
        return self.outlet(x * self.vectors[0] + self.vectors[1] + self.table["bias"]).square().mean()


def test_parameters_in_unusual_places_are_trained() -> None:
    """Weight-normed convolutions (Wav2Vec2) have their parameters in a list that is not a list of layers. They belonged
    to no unit, got gradients, and were silently never updated."""
    assert_trains_as_plain(partial(seeded, Unusual), partial(vectors, 5))


class Returner(nn.Module):
    """A block that also returns its input, and a container that returns inner outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Passing() for _ in range(3))
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        bias = self.bias(x)
        hidden = [x * self.scale]
        for layer in self.layers:
            x, bias = layer(hidden[-1], bias)
            hidden.append(x)
        return {"loss": self.outlet(x).square().mean(), "hidden": tuple(hidden), "bias": bias}


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x) + bias), bias


def returned_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


def test_outputs_that_are_passed_through_or_come_from_inside() -> None:
    """T5's blocks pass on the position bias of the first one, and CLIP returns the outputs of its towers. Backward took
    these for the blocks' own results and released weights that it was still using."""
    assert_trains_as_plain(partial(seeded, Returner), partial(vectors, 5), returned_loss)


class Positions(nn.Module):
    """Returns its parameter, as a view, directly, or in an object, which is read later."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, length: int) -> Any:
        return {"view": self.table[:length], "parameter": self.table, "object": Held({"rows": [self.table]})}[self.how]


class Held:
    """An object that a traversal of outputs does not know, without a `__dict__`."""

    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Positioned(nn.Module):
    """The positions of a model inside; used again with a block that returns its output in an object."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.positions = Positions(how)
        self.layers = nn.ModuleList(Holding() for _ in range(3))

    def forward(self, x: Tensor) -> Held:
        positions = self.positions(len(x))
        for layer in self.layers:
            x = layer(x).inside["out"][0]
        return Held((x, positions))


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Held:
        return Held({"out": [torch.tanh(self.second(torch.tanh(self.first(x))))]})


class Lender(nn.Module):
    def __init__(self, how: str, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = Positioned(how)
        self.outlet = nn.Linear(WIDTH, 2)

    def run(self, x: Tensor) -> Tensor:
        x, positions = self.inner(x).inside
        rows = positions.inside["rows"][0] if isinstance(positions, Held) else positions
        return x * rows[: len(x)]

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        x = self.run(x) if self.reentrant is None else checkpoint(self.run, x, use_reentrant=self.reentrant)
        return self.outlet(x).square().mean()


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("how", ["view", "parameter", "object"])
def test_a_module_that_returns_its_parameter(how: str, reentrant: bool | None) -> None:
    """`return self.table[:length]`, of position embeddings, was a view of memory that had been freed when the outer
    module read it: a segmentation fault. Returning the parameter itself raised an error; DeepSpeed supports both.
    Outputs in nested objects were missed: "setStorage: ... out of bounds for storage of size 0" in backward."""
    build = partial(seeded, partial(Lender, how, reentrant))
    assert_trains_as_plain(build, partial(vectors, 4), limits=[NOTHING_STAYS])


class Kept(dict[str, Any]):
    """A container of a program's own."""


BESIDE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "object": (lambda y: Held([Held(y)]), lambda held: held.inside[0].inside),
    "set": (lambda y: frozenset([y]), lambda held: next(iter(held))),
    "dict": (lambda y: Kept(y=[y]), lambda held: held["y"][0]),
}


class Beside(nn.Module):
    """Returns a plain tensor, and in something else what it has computed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = torch.tanh(self.first(x) @ self.weight) @ self.other
        return x * 1.0, BESIDE[self.how][0](y)


class ReadsBeside(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = Beside(how)
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(BESIDE[self.how][1](self.inner(x)[1])).square().mean()


@pytest.mark.parametrize("how", BESIDE)
def test_an_output_that_is_in_something_beside_a_plain_tensor(how: str) -> None:
    """It was looked for only where there was no plain tensor: backward read released weights, and gradients were
    silently wrong."""
    build = partial(seeded, partial(ReadsBeside, how))
    assert_trains_as_plain(build, partial(vectors, 4), limits=[NOTHING_STAYS])


class Returning(nn.Module):
    """Returns a view of a parameter to the program."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions("view")
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.outlet(x), self.positions(len(x))


def loss_with_positions(model: nn.Module, batch: Batch) -> Tensor:
    out, positions = model(**batch)
    loss: Tensor = out.square().mean() + positions.pow(3).mean()
    return loss


def run_returning(rank: int, limits: dict[str, int]) -> Seen:
    model = seeded(Returning)
    engine = engine_of(model, **limits)
    (parts,) = vectors(1)
    with torch.no_grad():
        _, kept = engine(**parts[rank])
    before = kept.clone()
    losses, norms = train_engine(engine, [parts[rank] for parts in vectors(4)], loss_with_positions)
    assert torch.equal(kept, before), "what an evaluation has returned stays as it is"
    return losses, norms, whole(model)


def test_a_view_of_a_parameter_that_the_program_gets() -> None:
    """The same segmentation fault in a program's loss, or when it prints the output of an evaluation."""
    trace = plain(seeded(Returning), vectors(4), loss_with_positions)
    for seen in run_each(run_returning, 2, [({},), (NOTHING_STAYS,)]):
        assert_same_training(seen, trace)


def run_several_backwards(rank: int) -> Seen:
    model = seeded(Reuser)
    engine = engine_of(model)
    losses, norms = [], []
    for first, second in zip(vectors(3, seed=3), vectors(3, seed=4), strict=True):
        engine.set_gradient_accumulation_boundary(False)
        one = engine(**first[rank])
        engine.backward(one / 2)
        engine.set_gradient_accumulation_boundary(True)
        with torch.no_grad():
            engine(**first[1 - rank])  # an evaluation between forward passes of a step
        two = engine(**second[rank])
        engine.backward(two / 2)
        engine.step()
        losses.append((one.item() + two.item()) / 2)
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, whole(model)


def test_two_backwards_in_a_step_and_an_evaluation_between() -> None:
    """Accumulation, with a forward without gradients in the middle, broke the recorded order of gathers."""
    parts = [one + two for one, two in zip(vectors(3, seed=3), vectors(3, seed=4), strict=True)]
    assert_same_training(run_ranks(run_several_backwards, 2), plain(seeded(Reuser), parts))


# --- frozen parameters, recomputation ----------------------------------------------------------------------------


def freeze_nothing(model: nn.Module) -> None: ...


def freeze_all_but_one(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.layers.0.mlp.up_proj.weight")


def freeze_all_but_the_embedding(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed_tokens" in name)


def freeze_as_lora_does(model: nn.Module) -> None:
    """Matrices are frozen, small vectors are trained."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)


MASKS = {m.__name__: m for m in (freeze_nothing, freeze_all_but_one, freeze_all_but_the_embedding, freeze_as_lora_does)}


def masked_llama(mask: str, layers: int = 3) -> Any:
    model = tiny_llama(layers=layers)
    MASKS[mask](model)
    return model


def run_masked(rank: int, mask: str, reentrant: bool | None) -> Seen:
    def build() -> Any:
        model = masked_llama(mask)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        return model.train()

    return run_training(rank, build, partial(rank_batches, 4))


QUICK = [("freeze_nothing", True), ("freeze_all_but_one", None), ("freeze_as_lora_does", False)]
EVERY = [
    pytest.param(mask, reentrant, marks=[] if (mask, reentrant) in QUICK else pytest.mark.slow)
    for mask in MASKS
    for reentrant in (None, False, True)
]


@pytest.mark.parametrize(("mask", "reentrant"), EVERY)
def test_frozen_parameters_and_checkpointing(mask: str, reentrant: bool | None) -> None:
    """Frozen weights under gradient checkpointing had shape [0] in the recomputation: "size of tensor a must match".
    Frozen ones must stay bitwise the same, and the gradients equal those without checkpointing."""
    model = masked_llama(mask)
    begun = {name: value.detach().clone() for name, value in model.named_parameters()}
    runs = run_ranks(run_masked, 2, mask, reentrant)
    assert_same_training(runs, plain(model, rank_batches(4)))
    for name, parameter in model.named_parameters():
        assert torch.equal(runs[1][2][name], begun[name]) == (not parameter.requires_grad), name


class Checkpointed(nn.Module):
    """A user's own checkpointing, around one layer that is used at several depths."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.outlet(x).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_shared_over_depth_under_checkpointing(reentrant: bool) -> None:
    """Shared layers under checkpointing raised "the parameter has already been reduced", or lost a gradient."""
    assert_trains_as_plain(partial(seeded, partial(Checkpointed, reentrant)), partial(vectors, 4))
