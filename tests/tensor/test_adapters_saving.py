"""Saved adapters of tensor-parallel models load into a whole model and give the trained results."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from tests.integration.flows import clean
from tests.mesh.hugging_face import by_accelerator, by_trainer
from tests.support.one_process import (
    Difference,
    Trained,
    assert_small,
    batches,
    difference_of_weights,
    differences,
    engine_of,
    in_one_process,
    train,
)
from tests.support.ranks import run_ranks
from tests.tensor.lora import adapted
from tests.tensor.models import model_of
from tests.tensor.training import config_with

KIND = "uneven"  # whole key heads, and MLPs in parts of different sizes
SAVED: dict[str, Any] = {"use_dora": True, "modules_to_save": ["lm_head"]}


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(**batches(1)[0]).logits
    return found


def loaded(folder: Path) -> Tensor:
    """Logits of the base model before training, with the adapter in `folder`."""
    return logits_of(PeftModel.from_pretrained(model_of(KIND), str(folder)))  # type: ignore[arg-type]


def trained_logits(model: nn.Module, trained: Trained) -> Tensor:
    model = copy.deepcopy(model)
    model.load_state_dict(trained.weights, strict=False)
    return logits_of(model)


def _engine(model: nn.Module, stage: int, tensor: int = 2) -> Any:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    return engine_of(model, config_with(stage, tensor, zero_optimization=zero))


def _saves_and_resumes(rank: int, folder: str, stages: tuple[int, ...]) -> dict[str, float]:
    data, model, found = batches(4), adapted(KIND, **SAVED), {}
    plain = in_one_process(model, data[:2])
    for stage in stages:
        root = Path(folder) / str(stage)
        first = _engine(model, stage)
        train(first, data[:2])
        first.save_checkpoint(str(root))
        assert first.save_16bit_model(str(root), "whole.bin")
        state = first._consolidated_16bit_state_dict()
        first.module.save_pretrained(str(root / "adapter"), is_main_process=rank == 0, state_dict=state)
        if stage < 3:  # at stage 3 the weights themselves raise
            with pytest.raises(ValueError, match="would write this rank's part of .*: on every rank, call state = "):
                first.module.save_pretrained(str(root / "parts"))
        torch.distributed.barrier()
        whole = torch.load(root / "whole.bin")
        found[f"whole, stage {stage}"] = difference_of_weights(whole, plain.weights)
        kept = loaded(root / "adapter") - trained_logits(model, plain)
        found[f"adapter, stage {stage}"] = kept.abs().max().item()
        went_on = train(first, data[2:]).losses
        second = _engine(model, stage)
        assert second.load_checkpoint(str(root))[0]
        resumed = train(second, data[2:]).losses
        alone = _engine(model, stage, tensor=1)
        assert alone.load_checkpoint(str(root))[0]
        found[f"whole matrices, stage {stage}"] = difference_of_weights(alone.module_state_dict(), plain.weights)
        found[f"resumed, stage {stage}"] = max(abs(a - b) for a, b in zip(went_on, resumed, strict=True))
    return found


@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 1, 2), marks=pytest.mark.slow)])
def test_adapters_and_checkpoints(tmp_path: Path, stages: tuple[int, ...]) -> None:
    assert_small(run_ranks(_saves_and_resumes, 2, str(tmp_path), stages))


def _by_libraries(rank: int, folder: str, stage: int) -> dict[str, Difference]:
    rows, root = batches(4), Path(folder)
    found: dict[str, Difference] = {}
    model = adapted(KIND, **SAVED)
    plain = in_one_process(model, rows)
    found["Trainer"] = differences(by_trainer(rows, root, stage=stage, tensor=2, model=copy.deepcopy(model)), plain)
    clean()
    expected = trained_logits(model, plain)
    found["saved by Trainer"] = (loaded(root / "saved") - expected).abs().max().item()
    checkpoint = {"resume": root / "checkpoint-2", "model": copy.deepcopy(model)}
    found["resumed"] = differences(by_trainer(rows, root, stage=stage, tensor=2, **checkpoint), plain)
    clean()
    more: dict[str, Any] = {"model": copy.deepcopy(model), "saved": root / "accelerate"}
    unclipped = by_accelerator(rows, stage=stage, tensor=2, **more)
    found["Accelerator"] = differences(unclipped, plain)
    torch.distributed.barrier()
    clean()
    kept = loaded(root / "accelerate") - trained_logits(model, unclipped)
    found["saved by Accelerator"] = kept.abs().max().item()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_trainer_and_accelerator(tmp_path: Path, stage: int) -> None:
    assert_small(run_ranks(_by_libraries, 2, str(tmp_path), stage, init=False))
