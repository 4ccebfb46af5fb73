"""Several engines in one loss: gradients reach both, and each engine applies or drops its own, as in plain PyTorch.

A generator's loss flows through the discriminator. Accelerate's `backward` raised an error, and `engine.backward` did
not start the discriminator's reductions: its gradients were reduced in the order of autograd, out of step if only one
rank's loss reached them, and divided by the wrong loss scale in fp16.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from tests.support.beside_plain import PlainEngine
from tests.support.limits import NOTHING_STAYS
from tests.support.ranks import run_each, run_ranks
from tests.support.reference import assert_same_weights

RANKS, STEPS, ROWS = 2, 4, 6
TOLERANCE = 1e-5
Weights = dict[str, Tensor]
KINDS: list[tuple[int, dict[str, int]]] = [(0, {}), (1, {}), (2, {}), (3, {}), (3, NOTHING_STAYS)]
IDS = ["0", "1", "2", "3", "3-limits-0"]


def kinds(*default: str) -> Any:
    """All of KINDS, marking those not listed in `default` as slow."""
    return pytest.mark.parametrize(
        ("stage", "limits"),
        [
            pytest.param(*kind, id=name, marks=[] if name in default else [pytest.mark.slow])
            for name, kind in zip(IDS, KINDS, strict=True)
        ],
    )


def network(sizes: list[int], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, sizes[1:], strict=False)]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], sizes[-1]))


def models() -> tuple[nn.Module, nn.Module]:
    """Generator and discriminator, each with several buckets and units."""
    return network([5, 9, 11, 7], seed=1), network([7, 13, 8, 3], seed=2)


def noise(step: int, width: int, salt: int) -> Tensor:
    return torch.randn(RANKS * ROWS, width, generator=torch.Generator().manual_seed(100 * salt + step))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-6)


Loop = Callable[[Any, Any, Tensor, Tensor], None]


def adversaries(maker: Any, judge: Any, seed: Tensor, real: Tensor) -> None:
    """As in PyTorch's DCGAN tutorial: two backwards of the discriminator, then one step."""
    judge.zero_grad()
    judge.backward(judge(real).square().mean())
    fake = maker(seed)
    judge.backward((1 - judge(fake.detach())).square().mean())
    judge.step()
    maker.zero_grad()
    maker.backward(judge(fake).square().mean())
    maker.step()


def adversaries_without_detach(maker: Any, judge: Any, seed: Tensor, real: Tensor) -> None:
    """The discriminator's loss reaches the generator, whose gradients are then dropped."""
    judge.zero_grad()
    judge.backward(judge(real).square().mean() + (1 - judge(maker(seed))).square().mean())
    judge.step()
    maker.zero_grad()
    maker.backward(judge(maker(seed)).square().mean())
    maker.step()


def colleagues(maker: Any, judge: Any, seed: Tensor, real: Tensor) -> None:
    """One loss trains both models."""
    maker.backward(judge(maker(seed)).square().mean() + judge(real).mean())
    judge.step()
    maker.step()


def steps_later(maker: Any, judge: Any, seed: Tensor, real: Tensor) -> None:
    """Separate losses, with both steps at the end."""
    maker.backward(maker(seed).square().mean())
    judge.backward(judge(real).square().mean())
    maker.backward(maker(seed).mean())
    maker.step()
    judge.step()


def judge_switched_off(maker: Any, judge: Any, seed: Tensor, real: Tensor) -> None:
    """Unneeded gradients are disabled."""
    judge.module.requires_grad_(False)
    maker.backward(judge(maker(seed)).square().mean())
    judge.module.requires_grad_(True)
    maker.step()
    judge.backward(judge(real).square().mean())
    judge.step()


LOOPS: list[Loop] = [adversaries, adversaries_without_detach, colleagues, steps_later, judge_switched_off]


def train_plainly(loop: Loop) -> list[Weights]:
    """Trains on the whole batch in one process."""
    pair = models()
    maker, judge = (PlainEngine(model, optimizer(model)) for model in pair)
    for step in range(STEPS):
        loop(maker, judge, noise(step, 5, 1), noise(step, 7, 2))
    return [dict(model.state_dict()) for model in pair]


def ds(stage: int, limits: dict[str, int], **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 60, "stage3_gather_16bit_weights_on_model_save": True, **limits}
    return {"train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0, "zero_optimization": zero, **more}


def weights_of(engine: Any) -> Weights:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def run_loops(rank: int, stage: int, limits: dict[str, int]) -> list[list[Weights]]:
    """Runs the loops one after the other in one process, with whatever the previous one has left behind."""
    return [run_loop(rank, loop, stage, limits) for loop in LOOPS]


def run_loop(rank: int, loop: Loop, stage: int, limits: dict[str, int]) -> list[Weights]:
    engines = [initialize(model=m, optimizer=optimizer(m), config=ds(stage, limits))[0] for m in models()]
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    for step in range(STEPS):
        loop(*engines, noise(step, 5, 1)[own], noise(step, 7, 2)[own])
    return [weights_of(engine) for engine in engines]


@kinds("2", "3-limits-0")
def test_two_engines_train_as_plain_pytorch(stage: int, limits: dict[str, int]) -> None:
    plain = [train_plainly(loop) for loop in LOOPS]
    for results in run_ranks(run_loops, RANKS, stage, limits):
        for result, expected in zip(results, plain, strict=True):
            for weights, theirs in zip(result, expected, strict=True):
                assert_same_weights(weights, theirs, TOLERANCE)


def run_only_one_moves(rank: int, stage: int, limits: dict[str, int]) -> None:
    maker, judge = (initialize(model=m, optimizer=optimizer(m), config=ds(stage, limits))[0] for m in models())
    before = weights_of(judge)
    maker.backward(judge(maker(noise(0, 5, 1))).square().mean())
    maker.step()
    judge.zero_grad()
    assert (maker.global_steps, judge.global_steps) == (1, 0)
    judge.step()  # without gradients
    assert all(torch.equal(before[name], value) for name, value in weights_of(judge).items())


def test_the_other_model_stays_and_its_gradients_are_dropped_by_zero_grad() -> None:
    run_each(run_only_one_moves, RANKS, KINDS)


def run_experts(rank: int, stage: int, limits: dict[str, int]) -> list[Weights]:
    """Rank 0's loss reaches the discriminator, rank 1's does not."""
    pair = models()
    engines = maker, judge = [initialize(model=m, optimizer=optimizer(m), config=ds(stage, limits))[0] for m in pair]
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    made = maker(noise(0, 5, 1)[own])
    judged = judge(made)
    maker.backward((judged if rank == 0 else made).square().mean())
    maker.step()
    judge.step()
    return [weights_of(engine) for engine in engines]


def test_a_model_that_only_one_rank_reaches() -> None:
    pair = models()
    maker, judge = (PlainEngine(model, optimizer(model)) for model in pair)
    made = maker(noise(0, 5, 1))
    first, second = made[:ROWS], made[ROWS:]
    ((judge(first).square().mean() + second.square().mean()) / RANKS).backward()
    maker.step()
    judge.step()
    for result in itertools.chain(*run_each(run_experts, RANKS, KINDS)):
        for weights, model in zip(result, pair):
            assert_same_weights(weights, dict(model.state_dict()), TOLERANCE)


def run_fp16(rank: int) -> None:
    """The discriminator's loss scale has been lowered: gradients from the generator's loss must use the generator's."""
    half = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    config = ds(2, {}, fp16=half)
    maker, judge = (initialize(model=m, optimizer=optimizer(m), config=copy.deepcopy(config))[0] for m in models())
    judge.optimizer.loss_scaler.update(True)
    assert (maker.loss_scale(), judge.loss_scale()) == (256.0, 128.0)
    seed = noise(0, 5, 1).half()
    norms = []
    for backward in (maker.backward, judge.backward):
        backward(judge(maker(seed)).float().square().mean())
        for engine in (maker, judge):
            engine.optimizer.foresee_norm()
        norms.append((maker.get_global_grad_norm(), judge.get_global_grad_norm()))
        maker.zero_grad()
        judge.zero_grad()
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)
    maker.backward(judge(maker(seed)).float().square().mean())
    judge.backward(judge(maker(seed).detach()).float().square().mean())
    with pytest.raises(RuntimeError, match=r"scaled by different factors \(\[128.0, 256.0\]\).*zero_grad\(\)"):
        judge.step()
    judge.zero_grad()
    judge.backward(judge(maker(seed).detach()).float().square().mean())
    judge.step()
    maker.step()


def test_loss_scales_of_two_engines() -> None:
    run_ranks(run_fp16, RANKS)


def run_engines_that_are_gone(rank: int) -> None:
    maker, judge = (initialize(model=m, optimizer=optimizer(m), config=ds(2, {}))[0] for m in models())
    judge.destroy()
    maker.backward(judge(maker(noise(0, 5, 1))).square().mean())
    maker.step()
    assert maker.global_steps == 1


def test_a_destroyed_engine_is_in_nobodys_way() -> None:
    run_ranks(run_engines_that_are_gone, RANKS)


def run_beside_an_abandoned_engine(rank: int, stage: int, limits: dict[str, int]) -> list[Weights]:
    """Only rank 0's garbage collector runs."""
    gc.disable()
    engines = [initialize(model=m, optimizer=optimizer(m), config=ds(stage, limits))[0] for m in models()]
    abandoned = initialize(model=models()[1], config=ds(stage, limits, optimizer={"type": "AdamW"}))[0]
    abandoned(noise(0, 7, 3)).sum()
    alive = weakref.ref(abandoned)
    del abandoned
    if rank == 0:
        gc.collect()
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    for step in range(STEPS):
        colleagues(*engines, noise(step, 5, 1)[own], noise(step, 7, 2)[own])
    weights = [weights_of(engine) for engine in engines]
    initialize(model=models()[0], config=ds(stage, limits, optimizer={"type": "AdamW"}))
    assert alive() is None, "the next engine makes room"
    return weights


@pytest.mark.parametrize(("stage", "limits"), [(1, {}), (3, NOTHING_STAYS)], ids=["1", "3-limits-0"])
def test_an_abandoned_engine_is_the_same_to_all_ranks(stage: int, limits: dict[str, int]) -> None:
    """The program dropped a discriminator after a forward without a step, but only some ranks had garbage-collected it.
    Some ranks then treated the loss as reaching two engines, others as reaching one, and training hung."""
    expected = train_plainly(colleagues)
    for result in run_ranks(run_beside_an_abandoned_engine, RANKS, stage, limits):
        for weights, theirs in zip(result, expected, strict=True):
            assert_same_weights(weights, theirs, TOLERANCE)


def phases(model: nn.Module) -> Iterator[tuple[nn.Module, range]]:
    """The trained part of the model (the head, then everything, then everything again), and its steps."""
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    yield model, range(2)
    model.requires_grad_(True)
    yield model, range(2, 5)
    yield model, range(5, 8)


def run_phases(rank: int, stage: int, limits: dict[str, int]) -> Weights:
    """No engine is destroyed or dropped."""
    engines, own = [], slice(rank * ROWS, (rank + 1) * ROWS)
    for model, steps in phases(models()[0]):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        steps_by = torch.optim.AdamW(trained, lr=0.02, eps=1e-6)
        engines.append(initialize(model=model, optimizer=steps_by, config=ds(stage, limits))[0])
        for step in steps:
            engines[-1].backward(engines[-1](noise(step, 5, 1)[own]).square().mean())
            engines[-1].step()
    with pytest.raises(RuntimeError, match=r"given to initialize\(\) again"):
        engines[0].backward(engines[0](noise(0, 5, 1)[own]).square().mean())
    return weights_of(engines[-1])


def test_a_model_that_is_initialized_again_is_trained_by_the_new_engine() -> None:
    """A user trained a head, unfroze the rest, and called initialize again, which DeepSpeed allows.

    The first engine's hooks stayed on the parameters and kept taking gradients of the head, so that the second engine
    only got the rest. Losses silently differed from plain PyTorch's. And a second Trainer of the same model, whose
    first one still held its engine, logged a norm of 0: its first update had no gradients.
    """
    for model, steps in phases(expected := models()[0]):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        plain = torch.optim.AdamW(trained, lr=0.02, eps=1e-6)
        for step in steps:
            model(noise(step, 5, 1)).square().mean().backward()
            plain.step()
            plain.zero_grad()
    for weights in itertools.chain(*run_each(run_phases, RANKS, KINDS)):
        assert_same_weights(weights, dict(expected.state_dict()), TOLERANCE)


def penalised(judge: Any, real: Tensor, salt: float) -> Tensor:
    """WGAN-GP's loss in its order: the gradient penalty, then the model's other forwards."""
    inputs = (real * salt).requires_grad_()
    (gradient,) = torch.autograd.grad(judge(inputs).sum(), inputs, create_graph=True)
    return judge(real).mean() - judge(-real).square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def run_penalty(rank: int, stage: int, limits: dict[str, int]) -> Weights:
    model = models()[1]
    engine = initialize(model=model, optimizer=optimizer(model), config=ds(stage, limits))[0]
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    for step in range(STEPS):
        engine.backward(penalised(engine, noise(step, 7, 2)[own], 0.5))
        engine.step()
    units = [unit for bucket in engine.module_view.store.buckets if (unit := getattr(bucket, "unit", None))]
    assert not any(unit.is_held for unit in units)
    return weights_of(engine)


def test_a_penalty_on_gradients() -> None:
    """At stage 3 double backward failed with "setStorage: ... out of bounds for storage of size 0".

    The second backward reads weights in operations that belong to no module's output, when the first one had already
    released their units.
    """
    model = models()[1]
    plain = PlainEngine(model, optimizer(model))
    for step in range(STEPS):
        plain.backward(penalised(plain, noise(step, 7, 2), 0.5))
        plain.step()
    for weights in itertools.chain(*run_each(run_penalty, RANKS, KINDS)):
        assert_same_weights(weights, dict(model.state_dict()), TOLERANCE)
