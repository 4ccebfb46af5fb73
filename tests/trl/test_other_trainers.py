"""KTO, RLOO and reward models: TRL's other stable trainers, compared with plain PyTorch."""

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
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_same_as_plain_pytorch(recipe: str, stage: int, tmp_path: Path) -> None:
    method, adapter, options = RECIPES[recipe]
    case = Run(method=method, adapter=adapter, stage=stage, options=options)
    # KTO averages over the ranks' own batches and RLOO samples by rank: the oracle runs on as many ranks.
    assert_same_training(run(case, tmp_path), without_engine(case, processes=case.processes))
