"""SFTTrainer gives the losses and weights of plain PyTorch in one process, for all parameters and stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.requirements import requires
from tests.trl.runs import ADAPTERS, STAGES, Run, assert_same_training, on_every_stage, run, without_engine

pytestmark = requires(modules=("trl", "peft"))


@pytest.mark.parametrize(("stage", "adapter"), on_every_stage(ADAPTERS, quick="lora"))
def test_same_as_plain_pytorch(stage: int, adapter: str, tmp_path: Path) -> None:
    case = Run(adapter=adapter, stage=stage)
    assert_same_training(run(case, tmp_path), without_engine(case))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_with_accumulation_clipping_and_an_optimizer_of_the_config(stage: int, adapter: str, tmp_path: Path) -> None:
    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    options = {"max_grad_norm": 0.05, "weight_decay": 0.1}
    accumulated = {**options, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    case = Run(adapter=adapter, stage=stage, options=accumulated, ds={"optimizer": {"type": "AdamW", "params": adam}})
    assert_same_training(run(case, tmp_path), without_engine(Run(adapter=adapter, options=options)))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("checkpointing", ["False", "reentrant", "not_reentrant"])
def test_activation_checkpointing_of_a_frozen_base_changes_nothing(
    stage: int, checkpointing: str, tmp_path: Path
) -> None:
    """LoRA, ZeRO-3 and non-reentrant checkpointing crashed in the recomputation, on weights of shape [0]."""
    options: dict[str, object] = {"gradient_checkpointing": checkpointing != "False"}
    if checkpointing != "False":
        reentrant = str(checkpointing == "reentrant").lower()
        options["gradient_checkpointing_kwargs"] = f'{{"use_reentrant":{reentrant}}}'
    case = Run(adapter="lora", stage=stage, options=options)
    assert_same_training(run(case, tmp_path), without_engine(Run(adapter="lora")))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_built_before_the_trainer(stage: int, tmp_path: Path) -> None:
    case = Run(adapter="lora", stage=stage, options={"build_first": True})
    assert_same_training(run(case, tmp_path), without_engine(case))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_other_numbers_of_ranks(stage: int, processes: int, tmp_path: Path) -> None:
    batch = {"per_device_train_batch_size": 12 // processes, "max_steps": 4, "save_steps": 4}
    case = Run(adapter="lora", stage=stage, processes=processes, options=batch)
    expected = without_engine(Run(adapter="lora", options={**batch, "per_device_train_batch_size": 12}))
    result = run(case, tmp_path)
    # With 3 ranks the evaluation repeats rows to fill the last batches, so only training is compared.
    assert_same_training(
        result if processes == 1 else type(result)(result.log, expected.evaluation, result.saved), expected
    )
