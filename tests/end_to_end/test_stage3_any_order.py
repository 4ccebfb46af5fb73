"""Stage 3 with ranks that run modules in different orders: correct values, and no deadlock."""

from __future__ import annotations

from functools import partial
from unittest import mock

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero.comm.cpu import shared_memory
from tests.end_to_end.stage3 import (
    WIDTH,
    Seen,
    assert_same_training,
    assert_trains_as_plain,
    engine_of,
    plain,
    run_training,
    seeded,
    train_engine,
    vectors,
    whole,
)
from tests.support.limits import NOTHING_STAYS
from tests.support.models import Batch
from tests.support.ranks import RankFailure, run_each, run_ranks

DEFAULTS = {
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 10**9,
    "stage3_prefetch_bucket_size": 50_000_000,
}
SHARDED_DEFAULTS = {**DEFAULTS, "stage3_param_persistence_threshold": 0}  # otherwise small models hardly use stage 3
LIMITS = [NOTHING_STAYS, DEFAULTS, SHARDED_DEFAULTS]


class Routed(nn.Module):
    """Equally shaped experts in a list, called directly, in the order that the batch specifies."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        x = x * self.gain  # so that something is trained even if no expert runs
        for choice in route.tolist():
            x = torch.tanh(self.experts[choice](x))
        return x.square().mean()


Routes = tuple[tuple[int, ...], ...]  # of each rank


def routed(steps: int, routes: Routes) -> list[list[Batch]]:
    return [
        [{**part, "route": torch.tensor(routes[rank])} for rank, part in enumerate(parts)]
        for parts in vectors(steps, world=len(routes))
    ]


def assert_carried(routes: Routes) -> None:
    """With all limits, one after the other."""
    assert_trains_as_plain(partial(seeded, Routed), partial(routed, 4, routes), limits=LIMITS)


@pytest.mark.parametrize("routes", [((2, 2), (3, 3)), ((0, 1, 1), (1, 0, 0))])
def test_experts_in_other_orders_have_their_own_values(routes: Routes) -> None:
    """The very first loss was silently wrong. Gathers were matched between ranks by their position in the order of
    calls, so that shards of one expert were used for another one of the same shape."""
    assert_carried(routes)


@pytest.mark.parametrize("routes", [((0, 1), (2, 3)), ((0, 1), (2, 3), (3, 0, 1, 2)), ((), (1, 2), (2, 1), (0,))])
def test_disjoint_experts_end(routes: Routes) -> None:
    """Most runs never ended: one rank waited for a send buffer of a reduction, the other one for a gather of its
    backward, and neither served the other in the meantime."""
    assert_carried(routes)


def test_experts_used_twice_on_one_rank_only() -> None:
    """It always hung, even with default limits. The documentation said that modules which some ranks run twice in a
    forward and others once are unsupported, but the run gave no error."""
    assert_carried(((0, 1, 0), (0, 1, 1)))


WIDE = 512


def wide_batches() -> list[list[Batch]]:
    """A different route in every step."""
    generator = torch.Generator().manual_seed(0)

    def batch(step: int, rank: int) -> Batch:
        route = torch.tensor([(rank + step) % 4, 2 * rank, 3 - rank])
        return {"x": torch.randn(4, WIDE, generator=generator), "route": route}

    return [[batch(step, rank) for rank in (0, 1)] for step in range(5)]


def test_large_experts_end_too() -> None:
    """Hidden size 512 also hung, but less often."""
    assert_trains_as_plain(partial(seeded, partial(Routed, WIDE)), wide_batches, limits=[NOTHING_STAYS])


def run_apart(rank: int, routes: Routes) -> Seen:
    with mock.patch.object(shared_memory, "host_name", lambda: f"host {rank}"):
        return run_training(rank, partial(seeded, Routed), partial(routed, 4, routes), limits=NOTHING_STAYS)


def test_ranks_on_several_machines_carry_the_same() -> None:
    """Without shared memory ranks can only communicate through collectives, which must work as well."""
    cases: list[Routes] = [((2, 2), (3, 3)), ((0, 1), (2, 3)), ((0, 1, 0), (0, 1, 1)), ((), (3, 1, 0))]
    for routes, seen in zip(cases, run_each(run_apart, 2, [(routes,) for routes in cases]), strict=True):
        assert_same_training(seen, plain(seeded(Routed), routed(4, routes)))


def run_more_forwards(rank: int) -> Seen:
    """Rank 0 evaluates its batch before it trains on it; both continue to train."""
    model = seeded(Routed)
    engine = engine_of(model, **NOTHING_STAYS)
    losses: list[float] = []
    norms: list[float] = []
    for parts in routed(3, ((0, 1, 3), (2, 1))):
        if rank == 0:
            with torch.no_grad():
                engine(**parts[rank])
        more = train_engine(engine, [parts[rank]])
        losses, norms = losses + more[0], norms + more[1]
    return losses, norms, whole(model)


def test_a_rank_that_runs_one_forward_more() -> None:
    assert_same_training(
        run_ranks(run_more_forwards, 2, timeout_s=60), plain(seeded(Routed), routed(3, ((0, 1, 3), (2, 1))))
    )


def run_other_backwards(rank: int) -> None:
    engine = engine_of(seeded(Routed), **NOTHING_STAYS)
    batch = routed(1, ((0, 1), (2, 3)))[0][rank]
    for _ in range(1 + rank):
        engine.backward(engine(**batch))
    engine.step()


def test_more_backward_passes_on_one_rank_are_refused_by_name() -> None:
    """Unsupported differences end at once, on all ranks, with an error that says where each rank is."""
    with pytest.raises(RankFailure, match="ranks are in different calls: .*same number of backward passes"):
        run_ranks(run_other_backwards, 2, timeout_s=30)


class InForward(nn.Module):
    """Gathers a parameter manually in the middle of a forward in which ranks have reached different modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        first, second = route.tolist()
        x = torch.tanh(self.layers[first](x))
        with deepspeed.zero.GatheredParameters([self.outlet.weight]):
            x = x + self.outlet.weight.detach().mean()
        return self.outlet(torch.tanh(self.layers[second](x))).square().mean()


def test_gathered_parameters_inside_a_forward_that_differs() -> None:
    assert_trains_as_plain(partial(seeded, InForward), partial(routed, 3, ((0, 1), (2, 0))), limits=LIMITS)


def run_two_engines(rank: int, backward_alike: bool) -> list[Seen]:
    """Rank 0 runs the first model and then the second, rank 1 in the opposite order."""
    models = [seeded(Routed) for _ in range(2)]
    engines = [engine_of(model, **NOTHING_STAYS) for model in models]
    own_order = (0, 1) if rank == 0 else (1, 0)
    losses: list[list[float]] = [[], []]
    norms: list[list[float]] = [[], []]
    for parts in routed(3, TWO_ROUTES):
        found = {place: engines[place](**parts[rank]) for place in own_order}
        for place in (0, 1) if backward_alike else own_order:
            engines[place].backward(found[place])
            losses[place].append(found[place].item())
        for place, engine in enumerate(engines):
            engine.step()
            norms[place].append(float(engine.get_global_grad_norm()))
    return [(losses[place], norms[place], whole(models[place])) for place in (0, 1)]


TWO_ROUTES = ((0, 1), (3, 1))


def test_forwards_of_two_engines_in_other_orders() -> None:
    """The models have equal shapes: a gather of one must not be used for the other."""
    trace = plain(seeded(Routed), routed(3, TWO_ROUTES))
    runs = run_ranks(run_two_engines, 2, True, timeout_s=60)
    for place in (0, 1):
        assert_same_training([run[place] for run in runs], trace)


def test_backwards_of_two_engines_in_other_orders_are_refused() -> None:
    """Reductions have one order; one model's gradients must not be added to the other's."""
    with pytest.raises(RankFailure, match="ranks are in different calls"):
        run_ranks(run_two_engines, 2, False, timeout_s=30)


class Borrower(nn.Module):
    """Has only a small parameter of its own, and reads a large one of its neighbour."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self._lender = [lender]  # not a child

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x * self.gain, self._lender[0].weight)


class Lending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lender = nn.Linear(WIDTH, WIDTH)
        self.borrower = Borrower(self.lender)

    def forward(self, x: Tensor) -> Tensor:
        return self.borrower(torch.tanh(self.lender(x))).square().mean()


def direct_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one module that is called by itself."""
    module = model.module if hasattr(model, "module") else model
    return module.borrower(batch["x"]).square().mean()


def test_a_module_called_by_itself_reads_another_ones_parameter() -> None:
    """The module's own parameters were persistent, so its forward was not hooked, and the neighbour's parameter that it
    read was NaN: losses and weights were silently NaN from the first step on."""
    limits = [{**NOTHING_STAYS, "stage3_param_persistence_threshold": WIDTH}]
    assert_trains_as_plain(partial(seeded, Lending), partial(vectors, 3), direct_loss, limits)


class DeadEnd(nn.Module):
    """A checkpoint around two layers, of which the second one's output is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        self.layers[2](x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False).square().mean()


def test_a_checkpoint_whose_last_module_leads_to_nothing() -> None:
    """The run failed with "setStorage ... out of bounds": backward had reached the second last layer, whose
    recomputation also ran the last one, which released the layer in use."""
    assert_trains_as_plain(partial(seeded, DeadEnd), partial(vectors, 3), limits=LIMITS)
