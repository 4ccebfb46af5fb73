"""KTO, RLOO, reward models and distillation: TRL's other stable trainers, compared with plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.requirements import requires
from tests.trl.runs import STAGES, Run, assert_same_training, run, without_engine

pytestmark = [requires(modules=("trl", "peft")), pytest.mark.slow]
RECIPES: dict[str, tuple[str, str, dict[str, object]]] = {
    "reward": ("reward", "full", {}),
    "reward_lora": ("reward", "lora", {"lora_task_type": "SEQ_CLS"}),
    "kto": ("kto", "full", {}),
    "kto_lora": ("kto", "lora", {}),
    "rloo": ("rloo", "full", {}),
    "rloo_lora": ("rloo", "lora", {}),
    "distillation": ("distillation", "full", {"max_completion_length": 12, "max_steps": 3, "save_steps": 3}),
    "distillation_lora": ("distillation", "lora", {"max_completion_length": 12, "max_steps": 3, "save_steps": 3}),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_same_as_plain_pytorch(recipe: str, stage: int, tmp_path: Path) -> None:
    method, adapter, options = RECIPES[recipe]
    case = Run(method=method, adapter=adapter, stage=stage, options=options)
    # KTO averages over the ranks' own batches, RLOO and distillation sample by rank: the oracle runs on as many.
    assert_same_training(run(case, tmp_path), without_engine(case, processes=case.processes))
