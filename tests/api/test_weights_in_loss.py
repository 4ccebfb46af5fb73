"""Parameters in the loss at stage 3: what autograd saves inside GatheredParameters has its values in backward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_zero import initialize
from hf_zero.api.gathered_parameters import GatheredParameters, gathered
from tests.support.beside_plain import PlainEngine
from tests.support.limits import NOTHING_STAYS
from tests.support.ranks import run_each, run_ranks

OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


class Squared(torch.autograd.Function):
    """A function of the user's own, which saves the parameter."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (values,) = ctx.saved_tensors
        return 2 * gradient * values


def hidden_times(values: Tensor, hidden: Tensor) -> Tensor:
    return (hidden * values).square().mean()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is deprecated
    scripted = torch.jit.script(hidden_times)

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pow": lambda p, h: p.pow(2).mean(),
    "mul": lambda p, h: (p * p).mean(),
    "matmul": lambda p, h: (h @ p).square().mean(),
    "hidden": hidden_times,
    "layer_norm": lambda p, h: functional.layer_norm(h, p.shape, p, p).square().mean(),
    "norm": lambda p, h: p.norm(),
    "cos": lambda p, h: p.cos().mean(),
    "linear": lambda p, h: functional.linear(h, p).square().mean(),
    "transposed": lambda p, h: (h @ p.t()).square().mean(),
    "row": lambda p, h: (p[0] * h).square().mean(),
    "clone": lambda p, h: p.clone().square().mean(),
    "function": lambda p, h: Squared.apply(p).mean(),  # type: ignore[no-untyped-call]
    "scripted": scripted,
    "checkpoint": lambda p, h: checkpoint(lambda h: (h * p).square().mean(), h, use_reentrant=False),
}


class Net(nn.Module):
    """Two trained layers, and frozen weights that a loss compares with; `inside` adds to the hidden values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.inside: Callable[[Tensor], Tensor] = torch.zeros_like

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        result: Tensor = self.second(hidden + self.inside(hidden))
        return result


def term(net: nn.Module, uses: Callable[[Tensor, Tensor], Tensor], hidden: Tensor) -> Tensor:
    weights = [parameter for parameter in net.parameters() if parameter.ndim == 2]
    with GatheredParameters(weights):
        return torch.stack([uses(weight, hidden) for weight in weights]).sum()


def engine_of(net: nn.Module, stage: int = 3, **zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **(NOTHING_STAYS if stage == 3 else {}), **zero},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    return initialize(model=net, config=config)[0]


def trained(uses: Callable[[Tensor, Tensor], Tensor], place: str, stage: int | None, zero: dict[str, Any]) -> Any:
    """Weights after three updates by an engine; without a stage, by plain PyTorch."""
    net = Net()
    if place == "inside":
        net.inside = lambda hidden: term(net, uses, hidden)
    plain = PlainEngine(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01))
    engine: Any = plain if stage is None else engine_of(net, stage, **zero)
    for seed in range(3):
        output = net(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        loss = output.square().mean()
        if place == "before":
            loss = term(net, uses, output.detach()) + loss
        elif place == "after":
            loss = loss + term(net, uses, output)
        engine.backward(loss)
        engine.step()
        if stage == 3:
            assert all(parameter.hf_zero_shard.left is None for parameter in net.parameters()), "memory is kept"
    with gathered(net):
        return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def all_uses(weight: Tensor, hidden: Tensor) -> Tensor:
    return torch.stack([use(weight, hidden) for use in USES.values()]).sum()


def run_trained(rank: int, place: str, stage: int, zero: dict[str, Any], name: str = "") -> None:
    uses = USES[name] if name else all_uses
    expected, found = trained(uses, place, None, {}), trained(uses, place, stage, zero)
    for key in expected:
        assert torch.allclose(found[key], expected[key], rtol=1e-5, atol=1e-6), key


@pytest.mark.at_once
def test_a_regularization_term_trains_as_without_an_engine() -> None:
    """`with GatheredParameters(ps): l2 = sum(p.pow(2).sum() for p in ps)`, and backward outside of it: autograd saves
    the parameter itself in `pow`, `p * p`, `h @ p`, a norm; at stage 3 it was NaN by the time backward read it, and
    every update was skipped. `F.linear`, `p.t()` and `p[0]` save views, which had kept their memory."""
    cases = [(place, stage, {}) for place in ("before", "after", "inside") for stage in (2, 3)]
    run_each(run_trained, 2, [*cases, ("after", 3, OFFLOAD), ("inside", 3, OFFLOAD)])


@pytest.mark.slow
def test_each_use_in_a_loss_trains_as_without_an_engine() -> None:
    """The same, use by use, so that none is right because of another one."""
    places, settings = ("before", "after", "inside"), [(1, {}), (3, {}), (3, OFFLOAD)]
    run_each(run_trained, 2, [(place, *each, name) for name in USES for place in places for each in settings])


def run_after_update(rank: int) -> None:
    net = Net()
    engine = engine_of(net)
    x = torch.ones(4, 4)
    kept = term(net, USES["pow"], x)
    for _ in range(2):  # two micro-batches of one graph
        engine.backward(engine(x).mean() + kept, retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match=r"values that first\.weight, second\.weight had before the last update"):
        engine.backward(engine(x).mean() + kept)


def run_after_evaluation(rank: int) -> list[Tensor]:
    """The units are still gathered when the term is computed, and released when the next forward begins."""
    found = []
    for stage in (2, 3):
        net = Net()
        limits = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
        engine = engine_of(net, stage, **(limits if stage == 3 else {}))
        with torch.no_grad():
            engine(torch.ones(4, 4))
        weight = net.second.weight
        assert weight.sum() != 0, "it can be read"
        loss = weight.pow(2).sum() + (weight.t() @ weight).sum()
        engine.backward(loss + engine(torch.ones(4, 4)).mean())
        engine.step()
        with gathered(net):
            found.append(weight.detach().clone())
    return found


def run_lives(rank: int) -> None:
    """The values are freed with the graph, by the end of backward at the latest."""
    net = Net()
    engine = engine_of(net)
    weight: Any = net.first.weight
    with GatheredParameters([weight]):
        values, logged = weakref.ref(weight.data.untyped_storage()), float(weight.norm())
    assert values() is None and weight.hf_zero_shard.left is None and logged > 0
    for _ in range(2):
        with GatheredParameters([weight]):
            penalty = weight.norm()
        assert weight.hf_zero_shard.left is not None
        with pytest.raises(RuntimeError, match=r"'first.weight' cannot be read here"):
            weight.norm()
        assert weight.data.shape == weight.detach().t().shape == (4, 4)
        engine.backward(engine(torch.ones(4, 4)).mean() + penalty)
        assert weight.hf_zero_shard.left is None
        engine.step()


def run_others(rank: int) -> list[Tensor]:
    run_after_update(rank)
    run_lives(rank)
    return run_after_evaluation(rank)


@pytest.mark.at_once
def test_values_that_a_graph_has_saved_live_as_long_as_it_does() -> None:
    """A term of the loss that is computed once and used after an update needs values that are gone; PyTorch raises an
    error then. At stage 3 the gradient was NaN, also where the parameters could be read without GatheredParameters,
    after an evaluation."""
    for at_stage_2, at_stage_3 in run_ranks(run_others, 2):
        torch.testing.assert_close(at_stage_3, at_stage_2)
