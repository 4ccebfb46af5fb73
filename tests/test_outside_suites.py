"""Bugs found by other projects' test suites; each docstring describes one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.api.engine import ZeroEngine
from hf_zero.api.parameter_access import (
    safe_get_full_grad,
    safe_set_full_grad,
    safe_update_full_grad_vectorized,
)
from hf_zero.api.zero_init import Init
from hf_zero.params.hooked_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from tests.support.ranks import run_ranks


def new_engine(stage: int, steps: int = 1, **sections: Any) -> ZeroEngine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.0,
        **sections,
    }
    return hf_zero.initialize(model=nn.Linear(3, 2), config=config)[0]


def backward(engine: ZeroEngine, rank: int) -> None:
    engine.backward(engine(torch.full((2, 3), float(rank + 1))).sum())


@pytest.mark.parametrize("folder", ["", None, 3])
def test_a_checkpoint_needs_a_folder_with_a_name(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save_checkpoint("")` wrote into the working directory; `save_checkpoint(None)` raised a TypeError of pathlib."""
    monkeypatch.chdir(tmp_path)
    engine = new_engine(1)
    with pytest.raises(AssertionError, match=r"save_checkpoint\(save_dir=.*\): give a folder"):
        engine.save_checkpoint(folder)
    with pytest.raises(ValueError, match=r"load_checkpoint\(load_dir=.*\): give a folder"):
        engine.load_checkpoint(folder)
    assert list(tmp_path.iterdir()) == []


def run_asserted(rank: int, folder: str) -> list[str]:
    engine, found = new_engine(1, checkpoint={"tag_validation": "Fail"}), []
    backward(engine, rank)
    for call in (lambda: engine.step(), lambda: engine.save_checkpoint(folder, tag=f"of-{rank}")):
        with pytest.raises(AssertionError) as caught, engine.no_sync():
            call()
        found.append(str(caught.value).partition(":")[0])
    return found


def test_what_deepspeed_asserts_can_be_caught_as_assertions(tmp_path: Path) -> None:
    """Callers expect an AssertionError for a step inside no_sync, for different tags, and for a missing model. hf_zero
    raised RuntimeError and ValueError; the errors are now both.
    """
    words = ["step() inside no_sync()", "save_checkpoint(tag=...)"]
    assert run_ranks(run_asserted, 2, str(tmp_path)) == [words, words]
    with pytest.raises(AssertionError, match="needs model="):
        hf_zero.initialize(config={"train_batch_size": 1})


def test_gradients_are_updated_with_their_parameter_at_hand() -> None:
    """DeepSpeed calls the function of `safe_update_full_grad_vectorized` as f(gradient, parameter). hf_zero passed one
    argument, so code written for DeepSpeed failed.
    """
    engine = new_engine(2)
    backward(engine, 0)
    seen = []

    def double(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        seen.append(parameter)
        return 2 * gradient

    parameters = list(engine.module.parameters())
    before = [safe_get_full_grad(parameter) for parameter in parameters]
    safe_update_full_grad_vectorized(parameters, double)
    assert seen == parameters
    assert all(torch.equal(safe_get_full_grad(p), 2 * old) for p, old in zip(parameters, before, strict=True))


def test_leaf_modules_by_name_say_what_is_missing() -> None:
    """DeepSpeed returns (modules, names without a module), and callers unpack it; hf_zero returned a list."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    assert set_z3_leaf_modules_by_name(model, ["0", "9"], raise_if_not_found=False) == ([model[0]], ["9"])
    assert set_z3_leaf_modules_by_suffix(model, [".1", ".0"]) == ([model[1][1], model[1][0]], [])
    assert get_z3_leaf_modules(model) == [model[0], model[1][0], model[1][1]]
    assert set_z3_leaf_modules_by_suffix(model, [".1"], flag=False) == ([model[1][1]], [])
    assert get_z3_leaf_modules(model) == [model[0], model[1][0]]
    with pytest.raises(ValueError, match=r"\['x'\] match no module"):
        set_z3_leaf_modules_by_name(model, ["1", "x"])


def run_unreduced(rank: int, stage: int) -> list[list[float]]:
    engine = new_engine(stage, steps=2)
    weight = engine.module.weight
    with engine.no_sync():
        backward(engine, rank)
        own = safe_get_full_grad(weight)
        assert own is not None
        safe_set_full_grad(weight, 3 * own)
        changed = safe_get_full_grad(weight)
    engine.micro_steps += 1
    backward(engine, rank)
    reduced = safe_get_full_grad(weight)
    engine.step()
    assert safe_get_full_grad(weight) is None
    with pytest.raises(RuntimeError, match="has no gradient to overwrite"):
        safe_set_full_grad(weight, own)
    assert own is not None and changed is not None, (own, changed)
    assert reduced is not None
    return [found[0].tolist() for found in (own, changed, reduced)]


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_are_not_reduced_yet_can_be_read(stage: int) -> None:
    """`safe_get_full_grad` was None inside `no_sync` at stages 0 and 1, where each rank has its own gradient."""
    for rank, (own, changed, reduced) in enumerate(run_ranks(run_unreduced, 2, stage)):
        # Two rows of value rank + 1, halved by the two accumulation steps.
        assert own == [rank + 1.0] * 3 and changed == [3 * (rank + 1.0)] * 3
        assert reduced == [(4 * 1.0 + 4 * 2.0) / 2] * 3


def run_nested(rank: int) -> list[bool]:
    found = []
    with Init():
        outer = nn.Linear(4, 4)
        with Init():
            inner = nn.Linear(4, 4)
        found += [hasattr(inner.weight, "ds_id"), hasattr(outer.weight, "ds_id")]
        both = nn.Sequential(outer, inner)
    return [*found, all(hasattr(parameter, "ds_id") for parameter in both.parameters())]


def test_what_a_nested_init_has_built_is_sharded_when_it_ends() -> None:
    """Parameters of a nested zero.Init had no `ds_id` until the outer one ended, but code inside it needs them."""
    for inner, _, both in run_ranks(run_nested, 2):
        assert inner and both


def test_parameters_offloaded_below_stage_3_stop_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """accelerate's questionnaire offers `offload_param` from stage 2 on, but a run with it raised an error."""
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    logging.getLogger("hf_zero").propagate = True
    with caplog.at_level(logging.INFO, logger="hf_zero"):
        engine = hf_zero.initialize(model=nn.Linear(1, 1), config=config)[0]
    assert "zero_optimization.offload_param: no effect at stage 2" in caplog.text
    assert engine.zero_offload_param().device == "cpu" and engine.settings.resolved.zero.offload_param is None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adafactor_alone_on_its_rank_is_saved_whatever_the_stage(stage: int, tmp_path: Path) -> None:
    """One rank trained with Adafactor at stages 2 and 3, but its first save failed, after the training was done."""

    def build() -> ZeroEngine:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
        return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

    engine = build()
    for _ in range(2):
        backward(engine, 0)
        engine.step()
    engine.save_checkpoint(tmp_path)
    backward(engine, 0)
    engine.step()
    resumed = build()
    assert resumed.load_checkpoint(tmp_path)[0] is not None
    backward(resumed, 0)
    resumed.step()
    for ours, theirs in zip(resumed.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
