"""Several models in one Accelerator, several Accelerators, several engines: each trains as if it were alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero

hf_zero.install()

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DeepSpeedEngineWrapper, DeepSpeedPlugin, DummyOptim, DummyScheduler  # noqa: E402

from hf_zero.api.engine import ZeroEngine  # noqa: E402
from tests.integration.flows import ADAMW, WARMUP_DECAY, accelerator, clean  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.reference import assert_same_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_libraries")
STAGES = (0, 1, 2, 3)
RANKS, STEPS, ROWS, ACTIONS = 2, 5, 6, 4
TOLERANCE = 1e-5
EPS = 1e-6

Weights = dict[str, Tensor]


class Network(nn.Module):
    """States in, some numbers per state out."""

    def __init__(self, outputs: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inner = nn.Linear(7, 13)
            self.head = nn.Linear(13, outputs)

    def forward(self, states: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(states)))


def models() -> tuple[Network, Network, Network, Network]:
    """Policy, value, reference and reward; the reference starts as the policy."""
    policy = Network(ACTIONS, seed=1)
    return policy, Network(1, seed=2), copy.deepcopy(policy), Network(ACTIONS, seed=3)


def batch(step: int) -> Tensor:
    """The states of all ranks."""
    return torch.randn(RANKS * ROWS, 7, generator=torch.Generator().manual_seed(step))


def policy_loss(policy: nn.Module, value: nn.Module, reference: nn.Module, reward: nn.Module, states: Tensor) -> Tensor:
    """Similar to PPO's: the advantage under the policy, less the divergence from the reference."""
    logs = policy(states).log_softmax(-1)
    with torch.no_grad():
        advantage = reward(states) - value(states)
        reference_logs = reference(states).log_softmax(-1)
    divergence = (logs.exp() * (logs - reference_logs)).sum(-1)
    return (0.1 * divergence - (logs.exp() * advantage).sum(-1)).mean()


def value_loss(policy: nn.Module, value: nn.Module, reward: nn.Module, states: Tensor) -> Tensor:
    with torch.no_grad():
        expected = (policy(states).softmax(-1) * reward(states)).sum(-1, keepdim=True)
    return nn.functional.mse_loss(value(states), expected)


def optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, eps=EPS)


def train_plainly() -> list[Weights]:
    """Plain PyTorch, with the whole batch in one process."""
    policy, value, reference, reward = models()
    policy_steps, value_steps = optimizer(policy, 0.02), optimizer(value, 0.05)
    for step in range(STEPS):
        states = batch(step)
        policy_loss(policy, value, reference, reward, states).backward()
        policy_steps.step()
        policy_steps.zero_grad()
        value_loss(policy, value, reward, states).backward()
        value_steps.step()
        value_steps.zero_grad()
    return [dict(model.state_dict()) for model in (policy, value, reference, reward)]


def train_prepared(
    accelerators: tuple[Accelerator, Accelerator], engines: list[Any], steps: list[Any], rank: int
) -> list[Weights]:
    """The same with the results of `prepare`."""
    policy, value, reference, reward = engines
    for step in range(STEPS):
        states = batch(step)[rank * ROWS : (rank + 1) * ROWS]
        accelerators[0].backward(policy_loss(policy, value, reference, reward, states))
        steps[0].step()
        steps[0].zero_grad()
        accelerators[1].backward(value_loss(policy, value, reward, states))
        steps[1].step()
        steps[1].zero_grad()
    return [copy.deepcopy(accelerators[0].get_state_dict(engine)) for engine in engines]


def ds(stage: int, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # otherwise these models stay whole
    return {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": zero, **more}


def run_one_accelerator(rank: int, stage: int) -> list[Weights]:
    clean()
    one = accelerator(ds(stage))
    policy, value, reference, reward = models()
    steps = [optimizer(policy, 0.02), optimizer(value, 0.05)]
    # In any order, as in users' scripts.
    value_engine, reward_engine, policy_engine, reference_engine, *steps = one.prepare(
        value, reward, policy, reference, *steps
    )
    engines = [policy_engine, value_engine, reference_engine, reward_engine]
    for engine, model in zip(engines, (policy, value, reference, reward)):
        assert one.unwrap_model(engine) is model
    assert [isinstance(engine.optimizer, torch.optim.Optimizer) for engine in engines] == [True, True, False, False]
    assert [engine.zero_optimization_stage() for engine in engines[2:]] == [3 if stage == 3 else 0] * 2
    return train_prepared((one, one), engines, steps, rank)


def run_calls_one_by_one(rank: int, stage: int) -> list[Weights]:
    clean()
    one = accelerator(ds(stage))
    policy, value, reference, reward = models()
    policy_engine, policy_steps = one.prepare(policy, optimizer(policy, 0.02))
    value_engine, value_steps = one.prepare(value, optimizer(value, 0.05))
    engines = [policy_engine, value_engine, one.prepare(reference), one.prepare(reward)]
    return train_prepared((one, one), engines, [policy_steps, value_steps], rank)


def run_two_accelerators(rank: int, stage: int) -> list[Weights]:
    """As in accelerate's documentation: a plugin and an Accelerator per trained model, and a plugin for inference."""
    clean()
    plugins = {name: DeepSpeedPlugin(hf_ds_config=ds(stage)) for name in ("policy", "value", "forward")}
    first, second = Accelerator(deepspeed_plugins=plugins), Accelerator()
    policy, value, reference, reward = models()
    policy_engine, policy_steps = first.prepare(policy, optimizer(policy, 0.02))
    second.state.select_deepspeed_plugin("value")
    value_engine, value_steps = second.prepare(value, optimizer(value, 0.05))
    assert first.deepspeed_engine_wrapped.engine is policy_engine
    assert second.deepspeed_engine_wrapped.engine is value_engine
    first.state.select_deepspeed_plugin("forward")
    engines = [policy_engine, value_engine, first.prepare(reference), first.prepare(reward)]
    return train_prepared((first, second), engines, [policy_steps, value_steps], rank)


def run_by_hand(rank: int, stage: int) -> list[Weights]:
    import deepspeed

    policy, value, reference, reward = models()
    adam = {"type": "AdamW", "params": {"lr": 0.02, "eps": EPS, "weight_decay": 0.01}}
    policy_engine, *_ = deepspeed.initialize(model=policy, config=ds(stage, optimizer=adam))
    value_engine, *_ = deepspeed.initialize(model=value, optimizer=optimizer(value, 0.05), config=ds(stage))
    others = [deepspeed.initialize(model=model, config=ds(stage))[0] for model in (reference, reward)]
    for step in range(STEPS):
        states = batch(step)[rank * ROWS : (rank + 1) * ROWS]
        policy_engine.backward(policy_loss(policy_engine, value_engine, *others, states))
        policy_engine.step()
        value_engine.backward(value_loss(policy_engine, value_engine, others[1], states))
        value_engine.step()
    engines = [policy_engine, value_engine, *others]
    if stage == 3:
        return [dict(engine._zero3_consolidated_16bit_state_dict() or {}) for engine in engines]
    return [dict(engine.module.state_dict()) for engine in engines]


@pytest.mark.parametrize(
    ("run", "stage"),
    [
        pytest.param(run, stage, marks=[] if stage == often or stage == 3 else pytest.mark.slow)
        for run, often in (
            (run_one_accelerator, 2),
            (run_calls_one_by_one, 1),
            (run_two_accelerators, 0),
            (run_by_hand, 2),
        )
        for stage in STAGES
    ],
)
def test_two_trained_and_two_forward_models(run: Callable[[int, int], list[Weights]], stage: int) -> None:
    """An Accelerator had a single engine: of several models the last one was used for all, or an assertion failed. At
    stage 3 an engine mixed up its gathers with those of another one."""
    results = run_ranks(run, RANKS, stage, init=run is run_by_hand)
    for weights, expected in zip(results[0], train_plainly()):
        assert_same_weights(weights, expected, TOLERANCE)


# One Accelerator in this process


def two() -> tuple[Network, Network]:
    return Network(3, seed=1), Network(2, seed=2)


def test_dummies_of_config_sections_find_their_models() -> None:
    one = accelerator(ds(2, optimizer=ADAMW, scheduler=WARMUP_DECAY))
    first, second = two()
    dummies = [DummyOptim(first.parameters(), lr=0.1), DummyOptim(second.parameters(), lr=0.1)]
    schedules = [DummyScheduler(dummy, total_num_steps=9) for dummy in dummies]
    result = one.prepare(schedules[1], first, dummies[1], second, dummies[0], schedules[0])
    engines = [thing for thing in result if isinstance(thing, ZeroEngine)]
    assert [engine.module for engine in engines] == [first, second]
    assert result[0].scheduler is engines[1].lr_scheduler and result[5].scheduler is engines[0].lr_scheduler
    assert result[2].optimizer is engines[1].optimizer and result[4].optimizer is engines[0].optimizer


def test_the_norm_is_that_of_the_model_trained_last() -> None:
    one = accelerator(ds(2))
    first, second = two()
    *engines, first_steps, second_steps = one.prepare(first, second, optimizer(first, 0.1), optimizer(second, 0.1))
    states, norms = batch(0), []
    for number in (1, 0):
        one.backward(engines[number](states).square().mean())
        norms.append(one.clip_grad_norm_(engines[number].parameters(), 1.0))
        assert norms[-1] == engines[number].get_global_grad_norm()
    both = one.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
    assert both == pytest.approx((norms[0] ** 2 + norms[1] ** 2) ** 0.5)
    first_steps.step()
    second_steps.step()
    assert [engine.global_steps for engine in engines] == [1, 1]


def test_the_wrapper_of_the_engine_is_that_of_accelerate() -> None:
    """A program looked for accelerate's class, and for its engine: `deepspeed_engine_wrapped` was an object of ours,
    whose `engine` was that object itself if there were two."""
    one = accelerator(ds(2))
    first, second = two()
    *engines, _, _ = one.prepare(first, second, optimizer(first, 0.1), optimizer(second, 0.1))
    wrapper = one.deepspeed_engine_wrapped
    assert type(wrapper) is DeepSpeedEngineWrapper and wrapper.engine is engines[1]
    for engine in engines:
        one.backward(engine(batch(0)).square().mean())
        assert wrapper.engine is engine and one.deepspeed_engine_wrapped is wrapper
        if hasattr(wrapper, "get_global_grad_norm"):  # not in the oldest versions
            assert wrapper.get_global_grad_norm() == engine.get_global_grad_norm()


def test_a_wrapper_that_a_program_made_is_left_to_accelerate() -> None:
    one, (model, _) = accelerator(ds(2)), two()
    engine, _ = one.prepare(model, optimizer(model, 0.1))
    DeepSpeedEngineWrapper(engine).backward(engine(batch(0)).square().mean())
    assert engine.global_steps == 1


def test_a_loss_of_no_model_is_refused() -> None:
    one = accelerator(ds(2))
    first, second = two()
    one.prepare(first, second, optimizer(first, 0.1), optimizer(second, 0.1))
    with pytest.raises(RuntimeError, match="cannot see which of 2 trained models"):
        one.backward(torch.ones(1, requires_grad=True).sum())


def test_a_model_that_was_prepared_without_its_optimizer_is_not_trained() -> None:
    """backward() raised an error about a loss of none of 0 models, and blamed reentrant checkpointing."""
    one, (first, _) = accelerator(ds(2)), two()
    (engine,), loss = (one.prepare(first),), torch.ones(1, requires_grad=True).sum()
    assert engine.optimizer is None
    with pytest.raises(RuntimeError, match="no model has been prepared together with its optimizer"):
        one.backward(loss)


def test_an_optimizer_of_two_models_is_refused() -> None:
    first, second = two()
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    message = r"SGD holds parameters of model 0 \(Network\) and model 1 \(Network\)"
    with pytest.raises(ValueError, match=message):
        accelerator(ds(2)).prepare(first, second, both)


def test_a_stray_optimizer_and_a_stray_schedule_are_refused() -> None:
    first, second = two()
    stray = optimizer(nn.Linear(2, 2), 0.1)
    one = accelerator(ds(2))
    with pytest.raises(ValueError, match="AdamW holds parameters of no model"):
        one.prepare(first, second, stray)
    schedule = torch.optim.lr_scheduler.StepLR(stray, 1)
    with pytest.raises(ValueError, match="StepLR drives an optimizer that is not in this call"):
        one.prepare(first, second, schedule)


def test_freeing_the_memory_lets_go_of_all_engines(caplog: pytest.LogCaptureFixture) -> None:
    one = accelerator(ds(2))
    first, second = two()
    with caplog.at_level(logging.WARNING):
        engines = one.prepare(first, second, optimizer(first, 0.1), optimizer(second, 0.1))[:2]
    assert "separate `Accelerator()` instance" not in caplog.text
    one.free_memory()
    assert [engine.optimizer for engine in engines] == [None, None]
    assert one.deepspeed_engine_wrapped is None


def two_phases(first: Any, again: Callable[[Any], Any]) -> tuple[list[float], Any]:
    """Adam, then SGD, on the result of `again` for the model; returns the losses, and what was trained."""
    model, losses = first, []
    for phase, kind in enumerate((torch.optim.AdamW, torch.optim.SGD)):
        accelerator_of, model, steps = again((phase, model, kind))
        for step in range(STEPS):
            loss = model(batch(step)).square().mean()
            accelerator_of.backward(loss)
            steps.step()
            steps.zero_grad()
            losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("unwraps", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_phase_has_an_optimizer_of_its_own(stage: int, unwraps: bool, tmp_path: Any) -> None:
    """A script prepared its model again with another optimizer. The loss went to the first engine, which had no step
    any more, and the second phase trained nothing."""
    clean()
    one = accelerator(ds(stage))

    def prepared(turn: tuple[int, Any, Any]) -> tuple[Any, Any, Any]:
        phase, model, kind = turn
        model = one.unwrap_model(model) if phase and unwraps else model
        return (one, *one.prepare(model, kind(model.parameters(), lr=0.05)))

    class Alone:
        backward = staticmethod(lambda loss: loss.backward())

    def plain(turn: tuple[int, Any, Any]) -> tuple[Any, Any, Any]:
        _, model, kind = turn
        return Alone, model, kind(model.parameters(), lr=0.05)

    losses, engine = two_phases(models()[0], prepared)
    expected, _ = two_phases(models()[0], plain)
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert one._models == [engine] and len(one._optimizers) == 1
    one.save_state(str(tmp_path))
    one.load_state(str(tmp_path))


def test_what_is_prepared_stays_as_it_is() -> None:
    """A notebook cell was run again: a second engine was created around the first, and no step updated anything."""
    clean()
    one = accelerator(ds(2))
    policy, value, *_ = models()
    loader = torch.utils.data.DataLoader(batch(0), batch_size=ROWS)
    first = one.prepare(policy, optimizer(policy, 0.02), loader)
    assert all(a is b for a, b in zip(one.prepare(*first), first, strict=True))
    assert one.prepare(first[0]) is first[0]
    judge, steps, again = one.prepare(value, optimizer(value, 0.02), first[0])
    assert again is first[0] and isinstance(judge, ZeroEngine) and judge.module is value
    for engine, each in ((first[0], first[1]), (judge, steps)):
        before = copy.deepcopy(one.get_state_dict(engine))
        one.backward(engine(batch(0)).square().mean())
        each.step()
        assert not all(torch.equal(before[name], now) for name, now in one.get_state_dict(engine).items())
