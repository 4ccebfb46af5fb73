"""Trainer's options for checkpoints: resuming, the best model, their number, weights only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_zero.zero_to_fp32 import main
from tests.checkpoint.trainer_runs import arguments, run, same_weights
from tests.support.ranks import run_ranks


def trained(world: int, given: dict[str, Any], resume: str | bool | None = None, seed: int = 0) -> Any:
    """(losses, weights) of rank 0."""
    return run_ranks(run, world, given, resume, seed, init=False)[0]


@pytest.mark.parametrize(("stage", "bf16"), [(2, False), (3, True)])
def test_resume_from_checkpoint_equals_never_having_stopped(stage: int, bf16: bool, tmp_path: Path) -> None:
    losses, weights = trained(2, arguments(tmp_path / "a", stage, 2, bf16=bf16))
    folder = tmp_path / "a" / "checkpoint-4"
    assert (folder / "latest").read_text() == "global_step4"
    again, resumed = trained(2, arguments(tmp_path / "b", stage, 2, bf16=bf16), str(folder), seed=1)
    assert again == losses, "Trainer's log has the steps before the checkpoint, too"
    assert same_weights(resumed, weights)


def test_resume_on_another_world_and_stage(tmp_path: Path) -> None:
    losses, _ = trained(2, arguments(tmp_path, 2, 2, save_total_limit=2))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    other = arguments(tmp_path, 3, 1, save_strategy="no")
    again, _ = trained(1, other, str(tmp_path / "checkpoint-4"), 1)
    assert again == pytest.approx(losses, rel=1e-5)
    # True means the last one in the folder, after which no steps remain.
    assert trained(1, other, True, 1)[0] == losses


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_adafactor_resumes_on_another_world(stage: int, tmp_path: Path) -> None:
    """Adafactor trained at stages 2 and 3, but its first save failed."""
    losses, _ = trained(2, arguments(tmp_path / "a", stage, 2, optim="adafactor"))
    plain, _ = trained(1, {**arguments(tmp_path / "b", stage, 1, optim="adafactor"), "deepspeed": None})
    assert losses == pytest.approx(plain, rel=1e-5)
    again, _ = trained(
        1, arguments(tmp_path / "c", stage, 1, optim="adafactor"), str(tmp_path / "a" / "checkpoint-4"), 1
    )
    assert again == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "weights_alone"), [(2, False), (3, True), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_the_best_model_is_loaded_at_the_end(stage: int, weights_alone: bool, tmp_path: Path) -> None:
    """transformers rejects `save_only_model` with `load_best_model_at_end`: DeepSpeed could not load such a folder."""
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 3.0}
    given = arguments(tmp_path, stage, 2, max_grad_norm=0.0, save_only_model=weights_alone, **options)
    losses, weights = trained(2, given)
    assert losses[-1] > losses[0], "a rate of 3 makes it worse, so the best model is not the last"
    best = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(best.lm_head.weight, weights["lm_head.weight"])
    assert weights_alone == (not list(tmp_path.rglob("global_step*")))
    if not weights_alone:  # the checkpoint's masters also give a model that from_pretrained loads
        out = tmp_path / "out"
        assert main([str(tmp_path / "checkpoint-2"), str(out), "--safetensors"]) == 0
        model, found = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
        assert torch.equal(model.lm_head.weight, best.lm_head.weight)


def test_weights_alone(tmp_path: Path) -> None:
    trained(1, arguments(tmp_path, 2, 1, save_only_model=True, save_steps=6))
    assert not list(tmp_path.rglob("*.pt")) and (tmp_path / "checkpoint-6" / "model.safetensors").exists()
