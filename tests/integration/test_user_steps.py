"""The script's own optimizer.step() and zero_grad() under Accelerate work as without an engine.

accelerate's DeepSpeed wrapper updates inside `accelerator.backward`, and makes the script's `optimizer.step()` and
`zero_grad()` no-ops. So two losses before one step silently made two updates; manual accumulation made one per
micro-batch; a step omitted by the script was made anyway; and a loss through two trained models raised an error,
because it was unclear which of them to update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import hf_zero

hf_zero.install()

from tests.api.test_several_engines import (  # noqa: E402
    RANKS,
    ROWS,
    Weights,
    ds,
    kinds,
    models,
    noise,
    optimizer,
)
from tests.integration.flows import accelerator, clean  # noqa: E402
from tests.support.messages import heard  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.reference import assert_same_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_libraries")
STEPS = 4
TOLERANCE = 1e-5


class PlainAccelerator:
    """The part of Accelerator that the loops use, over plain PyTorch."""

    sync_gradients = True

    def __init__(self, accumulation: int = 1) -> None:
        self._accumulation = accumulation

    def backward(self, loss: Tensor) -> None:
        (loss / self._accumulation).backward()

    def clip_grad_norm_(self, parameters: Any, limit: float) -> Any:
        return nn.utils.clip_grad_norm_(parameters, limit)


class Pair:
    """Two models and their optimizers, prepared or plain."""

    def __init__(self, accelerator: Any, things: Any, rank: int | None) -> None:
        self.accelerator = accelerator
        self.maker, self.judge, self.maker_steps, self.judge_steps = things
        self._rows = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)

    def seed(self, step: int) -> Tensor:
        return noise(step, 5, 1)[self._rows]

    def real(self, step: int) -> Tensor:
        return noise(step, 7, 2)[self._rows]


def two_losses(pair: Pair, step: int) -> None:
    pair.accelerator.backward(pair.maker(pair.seed(step)).square().mean())
    pair.accelerator.backward(pair.maker(pair.seed(step + 10)).mean())
    pair.accelerator.clip_grad_norm_(pair.maker.parameters(), CLIP)
    pair.maker_steps.step()
    pair.maker_steps.zero_grad()


def accumulation_by_hand(pair: Pair, step: int) -> None:
    pair.maker_steps.zero_grad()
    for micro in range(3):
        pair.accelerator.backward(pair.maker(pair.seed(step + 10 * micro)).square().mean() / 3)
    pair.accelerator.clip_grad_norm_(pair.maker.parameters(), CLIP)
    pair.maker_steps.step()


def a_step_left_out(pair: Pair, step: int) -> None:
    """A gradient that is too large is dropped, as scripts do after a spike."""
    pair.accelerator.backward(pair.maker(pair.seed(step)).square().mean() * (50 if step == 1 else 1))
    norm = pair.accelerator.clip_grad_norm_(pair.maker.parameters(), CLIP)
    if norm < 5:
        pair.maker_steps.step()
    pair.maker_steps.zero_grad()


def adversaries(pair: Pair, step: int) -> None:
    fake = pair.maker(pair.seed(step))
    pair.judge_steps.zero_grad()
    pair.accelerator.backward(pair.judge(pair.real(step)).square().mean())
    pair.accelerator.backward((1 - pair.judge(fake.detach())).square().mean())
    pair.accelerator.clip_grad_norm_(pair.judge.parameters(), CLIP)
    pair.judge_steps.step()
    pair.maker_steps.zero_grad()
    pair.accelerator.backward(pair.judge(fake).square().mean())
    pair.accelerator.clip_grad_norm_(pair.maker.parameters(), CLIP)
    pair.maker_steps.step()


def colleagues(pair: Pair, step: int) -> None:
    pair.accelerator.backward(pair.judge(pair.maker(pair.seed(step))).square().mean())
    for model, steps in ((pair.maker, pair.maker_steps), (pair.judge, pair.judge_steps)):
        pair.accelerator.clip_grad_norm_(model.parameters(), CLIP)
        steps.step()
        steps.zero_grad()


CLIP = 0.05
LOOPS: list[Callable[[Pair, int], None]] = [
    two_losses,
    accumulation_by_hand,
    a_step_left_out,
    adversaries,
    colleagues,
]


def train_plainly(loop: Callable[[Pair, int], None]) -> list[Weights]:
    pair = models()
    together = Pair(PlainAccelerator(), (*pair, *map(optimizer, pair)), None)
    for step in range(STEPS):
        loop(together, step)
    return [dict(model.state_dict()) for model in pair]


def run_loops(rank: int, stage: int, limits: dict[str, int]) -> list[list[Weights]]:
    return [run_loop(rank, loop, stage, limits) for loop in LOOPS]


def run_loop(rank: int, loop: Callable[[Pair, int], None], stage: int, limits: dict[str, int]) -> list[Weights]:
    clean()
    one = accelerator({**ds(stage, limits), "gradient_clipping": CLIP})
    pair = models()
    together = Pair(one, one.prepare(*pair, *map(optimizer, pair)), rank)
    for step in range(STEPS):
        loop(together, step)
    return [dict(engine.module_state_dict()) for engine in (together.maker, together.judge)]


@kinds("1", "3-limits-0")
def test_a_script_trains_as_without_an_engine(stage: int, limits: dict[str, int]) -> None:
    plain = [train_plainly(loop) for loop in LOOPS]
    for results in run_ranks(run_loops, RANKS, stage, limits, init=False):
        for result, expected in zip(results, plain, strict=True):
            for weights, theirs in zip(result, expected, strict=True):
                assert_same_weights(weights, theirs, TOLERANCE)


# One process


def prepared(**options: Any) -> tuple[Any, Any, Any]:
    one = accelerator(ds(2, {}), **options)
    model = models()[0]
    return one, *one.prepare(model, optimizer(model))


def loss(engine: Any, step: int = 0) -> Tensor:
    return engine(noise(step, 5, 1)[:ROWS]).square().mean()


def test_a_script_that_never_steps_is_told() -> None:
    one, engine, _ = prepared()
    with heard() as said:
        for _ in range(3):
            one.backward(loss(engine))
    assert sum("A script that relies on DeepSpeed's update within backward()" in line for line in said) == 1
    assert engine.global_steps == 0


def test_two_losses_a_step_are_no_reason_to_speak() -> None:
    one, engine, steps = prepared()
    one.backward(loss(engine))
    steps.step()
    with heard() as said:
        one.backward(loss(engine))
        one.backward(loss(engine))
        steps.step()
    assert engine.global_steps == 2 and not [line for line in said if "backward()" in line]


def test_without_an_optimizer_object_backward_updates() -> None:
    """The config has the optimizer, and the script only prepares its model: nothing else could trigger the update."""
    one = accelerator({**ds(2, {}), "optimizer": {"type": "AdamW", "params": {"lr": 0.02}}})
    engine = one.prepare(models()[0])
    one.backward(loss(engine))
    assert engine.global_steps == 1


def test_step_without_gradients_is_no_update() -> None:
    one, engine, steps = prepared()
    steps.step()
    one.backward(loss(engine))
    engine.step()  # DeepSpeed's API for it
    steps.step()
    assert engine.global_steps == 1


def test_dropping_gradients_before_the_last_micro_batch_is_said_and_not_done() -> None:
    """`zero_grad()` at the top of the loop is a common mistake; DeepSpeed tolerates it, and so does hf_zero."""
    one, engine, steps = prepared(gradient_accumulation_steps=2)
    with heard() as said:
        for step in range(2):
            with one.accumulate(engine):
                steps.zero_grad()
                one.backward(loss(engine, step))
                steps.step()
    assert engine.global_steps == 1
    assert sum("in the middle of an accumulation" in line for line in said) == 1
    model = models()[0]
    ((loss(model, 0) + loss(model, 1)) / 2).backward()
    optimizer(model).step()
    assert_same_weights(dict(engine.module_state_dict()), dict(model.state_dict()), TOLERANCE)


def test_the_second_micro_batch_of_an_accumulation_is_no_missing_step() -> None:
    """Every run of Trainer with accumulation got a wrong warning that it called backward() again before step();
    LLaMA-Factory and ms-swift logged it on each rank."""
    one, engine, steps = prepared(gradient_accumulation_steps=2)
    with heard() as said:
        for step in range(4):
            one.gradient_state._set_sync_gradients(step % 2 == 1)
            one.backward(loss(engine, step))
            if step % 2 == 1:
                steps.step()
    assert engine.global_steps == 2 and not said


def test_another_limit_than_the_configs_is_said_once() -> None:
    one, engine, _ = prepared()
    one.backward(loss(engine))
    with heard() as said:
        for limit in (0.123, 0.123, float("inf")):
            one.clip_grad_norm_(engine.parameters(), limit)
    assert sum("clip_grad_norm_(max_norm=0.123)" in line for line in said) == 1 and len(said) == 1


def test_the_norm_is_there_before_the_step() -> None:
    one, engine, steps = prepared()
    model = copy.deepcopy(models()[0])
    loss(model).backward()
    expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    one.backward(loss(engine))
    assert float(one.clip_grad_norm_(engine.parameters(), float("inf"))) == pytest.approx(float(expected))
    steps.step()
    assert engine.get_global_grad_norm() == pytest.approx(float(expected))
