"""Programs that reset the states of an engine's optimizer while it trains (ReLoRA, a new phase of training)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.api.parameter_access import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from tests.support.beside_plain import (
    Layers,
    assert_same,
    engine_of,
    plain_weights,
    train,
    train_plainly,
    weights_of,
)
from tests.support.ranks import run_each


def clear(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def pop(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)


def new(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = type(optimizer.state)(dict)


def zero(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def replace(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = torch.zeros(value.shape, dtype=value.dtype)


RESETS: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "clear": clear,
    "pop": pop,
    "new": new,
    "zero": zero,
    "replace": replace,
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def radam(model: nn.Module) -> torch.optim.Optimizer:
    """Its own step runs."""
    return torch.optim.RAdam([p for p in model.parameters() if p.requires_grad], lr=0.01)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    parameters = [p for p in model.parameters() if p.requires_grad]
    return Adafactor(parameters, lr=0.01, scale_parameter=False, relative_step=False)


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "radam": radam,
    "adafactor": adafactor,
}


def run(
    rank: int, world: int, stage: int, kind: str, reset: str, sections: dict[str, Any], bf16: bool = False
) -> dict[str, torch.Tensor]:
    engine = engine_of(KINDS[kind], stage, world, bf16=bf16, **sections)
    for step in train(engine, rank, world, 4):
        if step == 1:
            RESETS[reset](engine.optimizer)
    return weights_of(engine)


@functools.cache
def expected(kind: str) -> dict[str, torch.Tensor]:
    model = Layers()
    optimizer = KINDS[kind](model)
    for step in train_plainly(model, optimizer, 4):
        if step == 1:
            clear(optimizer)
    return plain_weights(model)


def check(world: int, cases: list[tuple[Any, ...]]) -> None:
    for case, ranks in zip(cases, run_each(run, world, cases), strict=True):
        for weights in ranks:
            assert_same(weights, expected(case[2]), bf16=case[-1] is True, what=str(case))


def test_updates_after_a_reset_are_those_of_a_new_optimizer(tmp_path: Path) -> None:
    """ReLoRA merges its adapters and resets the optimizer with `optimizer.state.clear()`. Moments started again, but
    the count for the bias correction went on, so the next updates were too small: -1.0742 for torch's -1.0575.

    With states on NVMe a tensor without memory stands for them between updates, which torch lets a constant be written
    into: after `state["exp_avg"].zero_()`, or a new tensor in its place, the next update silently read the old moments
    from the drive, with the count that the program had reset."""
    cases: list[tuple[Any, ...]] = [(2, 2, "adamw", reset, {}) for reset in RESETS]
    cases += [(2, 3, "adamw", "clear", {}), (2, 1, "adamw", "clear", {}, True), (2, 2, "radam", "clear", {})]
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 2, "offload_optimizer": nvme}
    resets = [(kind, reset) for kind in ("adamw", "radam") for reset in ("clear", "zero", "replace")]
    check(2, [*cases, *((2, 2, kind, reset, {"zero_optimization": zero}) for kind, reset in resets)])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_every_reset_at_every_stage(world: int, tmp_path: Path) -> None:
    places: list[dict[str, Any]] = [{}, {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}]
    cases: list[tuple[Any, ...]] = []
    for kind in KINDS:
        for stage in range(4):
            cases += [(world, stage, kind, "clear", {}, bf16) for bf16 in (False, True)]
            for reset in RESETS if kind != "adafactor" else ("clear", "pop", "new"):
                cases.append((world, stage, kind, reset, {}))
            for place in places[1:] if stage else ():
                zero = {"stage": stage, "offload_optimizer": place, "stage3_param_persistence_threshold": 12}
                for reset in ("clear", "zero", "replace") if kind != "adafactor" else ("clear",):
                    cases.append((world, stage, kind, reset, {"zero_optimization": zero}))
    check(world, cases)


ACCESSES: list[Callable[[Any, nn.Parameter], Any]] = [
    lambda states, weight: states[weight],
    lambda states, weight: states.pop(weight, None),
    lambda states, weight: weight in states,
    lambda states, weight: states.get(weight),
]


def run_one_parameter(rank: int, world: int, stage: int) -> Any:
    engine = engine_of(adamw, stage, world)
    weight, errors = engine.module.into.weight, []
    for step in train(engine, rank, world, 4):
        if step == 1:
            for act in ACCESSES:
                with pytest.raises(KeyError, match="into.weight") as caught:
                    act(engine.optimizer.state, weight)
                errors.append(str(caught.value))
            for key in ("exp_avg", "exp_avg_sq"):
                known = safe_get_full_optimizer_state(weight, key)
                assert known is not None
                safe_set_full_optimizer_state(weight, torch.zeros_like(known), key)
            safe_set_full_optimizer_state(weight, 0, "step")
    return weights_of(engine), errors


def test_one_parameter_is_reset_by_its_name_and_refused_by_its_key() -> None:
    """A program reset the states of LoRA's matrices with `optimizer.state[parameter]`: an engine's optimizer has
    masters, so it got a new, empty dictionary, and nothing was reset."""
    model = Layers()
    optimizer = adamw(model)
    for step in train_plainly(model, optimizer, 4):
        if step == 1:
            optimizer.state.pop(model.into.weight)
    cases = [(2, stage) for stage in (0, 2, 3)]
    for case, ranks in zip(cases, run_each(run_one_parameter, 2, cases), strict=True):
        for weights, errors in ranks:
            assert_same(weights, plain_weights(model), what=str(case))
            assert all("safe_set_full_optimizer_state" in error for error in errors)


def run_set(rank: int, stage: int, kind: str, sections: dict[str, Any]) -> None:
    engine = engine_of(KINDS[kind], stage, 2, **sections)
    weight, momentum = engine.module.into.weight, torch.arange(60.0).view(10, 6)
    with pytest.raises(RuntimeError, match=r"'exp_avg' per element of 'into.weight'.*created by the first update"):
        safe_set_full_optimizer_state(weight, momentum, "exp_avg")
    for _ in train(engine, rank, 2, 1):
        pass
    with pytest.raises(RuntimeError, match=r"'exp_average' per element of 'into.weight'.*it has 'exp_avg'"):
        safe_set_full_optimizer_state(weight, momentum, "exp_average")
    safe_set_full_optimizer_state(weight, momentum, "exp_avg")
    found = safe_get_full_optimizer_state(weight, "exp_avg")
    assert found is not None and torch.equal(found, momentum)
    other = safe_get_full_optimizer_state(engine.module.out.weight, "exp_avg")
    assert other is not None and other.abs().max() < 1


def test_a_state_that_cannot_be_set_is_an_error(tmp_path: Path) -> None:
    """A script called `safe_set_full_optimizer_state(p, value, "exp_avg")` before the first update, and another one
    with a misspelled key: both did nothing, silently. Under optimizers whose own step sees whole tensors (stage 0) the
    value was written into a copy."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": nvme}}
    cases: list[tuple[Any, ...]] = [(stage, kind, {}) for stage in (0, 2, 3) for kind in ("adamw", "radam")]
    run_each(run_set, 2, [*cases, (2, "adamw", zero)])
