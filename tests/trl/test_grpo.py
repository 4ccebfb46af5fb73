"""GRPOTrainer, with generation in the loop: the same random numbers give the same completions, losses and weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.requirements import requires
from tests.trl.runs import STAGES, Run, assert_same_training, on_every_stage, run, without_engine

pytestmark = requires(modules=("trl", "peft"))
RECIPES: dict[str, tuple[str, dict[str, object]]] = {
    "full": ("full", {}),
    "reference": ("full", {"beta": 0.1}),
    "lora": ("lora", {}),
    "adapter_switched_off": ("lora", {"beta": 0.1}),
    "several_updates_per_generation": (
        "full",
        {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 4, "save_steps": 4},
    ),
    "no_gathering": ("full", {"ds3_gather_for_generation": False}),
}


@pytest.mark.parametrize(("stage", "recipe"), on_every_stage(RECIPES, quick="reference"))
def test_same_as_plain_pytorch(stage: int, recipe: str, tmp_path: Path) -> None:
    """Ranks whose completions end at different lengths hung at stage 3: one waited in a gather forever."""
    adapter, options = RECIPES[recipe]
    case = Run(method="grpo", adapter=adapter, stage=stage, options=options)
    # Every rank samples with its own seed: the oracle is plain PyTorch on as many ranks.
    result, expected = run(case, tmp_path), without_engine(case, processes=case.processes)
    assert_same_training(result, expected)
    for name in ("reward", "completions/mean_length", "num_tokens"):
        assert result.column(name) == expected.column(name)
    lengths = zip(result.column("completions/min_length"), result.column("completions/max_length"))
    assert any(shortest < longest for shortest, longest in lengths)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_policy_reference_and_reward_model_in_one_process(stage: int, tmp_path: Path) -> None:
    options = {"beta": 0.1, "reward_model": tmp_path / "reward_model"}
    case = Run(method="grpo", stage=stage, options=options)
    result, expected = run(case, tmp_path), without_engine(case, processes=case.processes)
    assert_same_training(result, expected)
