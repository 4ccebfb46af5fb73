"""Gradients that are not the engine's: torch.func and torch.autograd.grad beside training, at stage 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian as autograd_hessian
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from hf_zero import initialize
from hf_zero.api.gathered_parameters import gathered
from tests.support.beside_plain import PlainEngine
from tests.support.limits import NOTHING_STAYS
from tests.support.ranks import run_each

STAGE_3: dict[str, Any] = {"stage": 3, **NOTHING_STAYS}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.frozen = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(self.second(torch.tanh(self.first(x))))
        return result


def loss_of(net: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    result: Tensor = functional_call(net, parameters, (x,)).square().mean()
    return result


def trained(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}


def detached(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def whole(net: nn.Module, values: Callable[[], Any]) -> Any:
    with gathered(net):
        return values()


def with_respect_to_input(x: Tensor, run: Callable[[Tensor], Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(run(x).square().mean(), x, **options)[0], x


def doubly(net: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> Any:
    gradient, _ = with_respect_to_input(x, run, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), list(trained(net).values()))


def hessian_of_weight(net: nn.Module, x: Tensor) -> Any:
    weight = net.get_parameter("second.weight").detach()
    return hessian(lambda values: loss_of(net, {**detached(net), "second.weight": values}, x))(weight)


USES: dict[str, Callable[[nn.Module, Tensor, Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda net, x, run: whole(net, lambda: grad(lambda p: loss_of(net, p, x))(detached(net))),
    "grad of parameters": lambda net, x, run: whole(net, lambda: grad(lambda p: loss_of(net, p, x))(trained(net))),
    "per sample": lambda net, x, run: whole(
        net, lambda: vmap(grad(lambda p, x: loss_of(net, p, x)), in_dims=(None, 0))(detached(net), x)
    ),
    "hessian of a weight": lambda net, x, run: whole(net, lambda: hessian_of_weight(net, x)),
    "grad inside gathered": lambda net, x, run: whole(net, lambda: grad(lambda x: net(x).square().mean())(x)),
    "grad of input": lambda net, x, run: grad(lambda x: run(x).square().mean())(x),
    "per sample, of input": lambda net, x, run: vmap(grad(lambda x: run(x).square().mean()))(x),
    "hessian of input": lambda net, x, run: hessian(lambda x: run(x).square().mean())(x[0]),
    "jacrev": lambda net, x, run: jacrev(run)(x[0]),
    "jvp": lambda net, x, run: jvp(run, (x,), (torch.ones_like(x),)),
    "vjp": lambda net, x, run: vjp(run, x)[1](torch.ones(4, 2)),
    "vmap": lambda net, x, run: vmap(run)(x),
    "autograd.grad": lambda net, x, run: with_respect_to_input(x, run),
    "autograd.grad of parameters": lambda net, x, run: torch.autograd.grad(run(x).mean(), list(trained(net).values())),
    "autograd.grad twice": doubly,
    "autograd hessian": lambda net, x, run: autograd_hessian(lambda x: run(x).square().mean(), x),
}


def run_use(rank: int, name: str, zero: dict[str, Any]) -> None:
    """Beside training on all ranks, the result and the weights are those without an engine."""
    everything = []
    for is_plain in (True, False):
        net: Any = Net()
        found: list[Tensor] = []
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": zero,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "gradient_clipping": 0.0,
        }
        plain = PlainEngine(net, torch.optim.SGD(trained(net).values(), lr=0.1))
        run: Any = plain if is_plain else initialize(model=net, config=config)[0]
        for seed in range(2):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            found += torch.utils._pytree.tree_leaves(USES[name](net, x, run))
            run.backward(run(x).square().mean())
            run.step()
        with gathered(net):
            everything.append([value.detach().clone() for value in (*found, *net.parameters())])
    for expected, value in zip(*everything, strict=True):
        torch.testing.assert_close(value, expected)


def run_on_one_rank(rank: int) -> list[Tensor]:
    """Only rank 1 looks at its input's gradient."""
    net = Net()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": STAGE_3, "optimizer": {"type": "SGD"}}
    engine = initialize(model=net, config=config)[0]
    x = torch.ones(4, 3)
    found = [with_respect_to_input(x, engine)[0]] if rank else [torch.zeros(4, 3)]
    engine.backward(engine(x).mean())
    engine.step()
    return found


@pytest.mark.at_once
def test_other_gradients_beside_training_are_those_without_an_engine() -> None:
    """Per-sample gradients (`vmap(grad(...))`), `torch.func.grad` and `hessian` failed at stage 3 on several ranks with
    "Cannot access data pointer of Tensor that doesn't have storage": as their walk through the graph passed units, the
    engine reduced gradients that it took to be missing, as it does in its own backward, inside of torch.func's
    transform. `torch.autograd.grad` sent the same needless zeros. A first forward inside `hessian` failed with
    "please report a bug to PyTorch": the tensors of its gathers belonged to the transform, and outlived it."""
    run_each(run_use, 2, [(name, STAGE_3) for name in USES])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 3}, {**STAGE_3, "offload_param": {"device": "cpu"}}], ids=str)
def test_other_gradients_at_other_settings(zero: dict[str, Any]) -> None:
    run_each(run_use, 2, [(name, zero) for name in USES])


def test_one_rank_may_look_at_a_gradient_alone() -> None:
    """`torch.autograd.grad` for a saliency map on the first rank only."""
    ((_, mine),) = run_each(run_on_one_rank, 2, [()])
    net = Net()
    torch.testing.assert_close(mine[0] * 2, with_respect_to_input(torch.ones(4, 3), net)[0] * 2)
