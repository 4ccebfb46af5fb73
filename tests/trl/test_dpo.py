"""DPOTrainer gives the losses and weights of plain PyTorch, for every kind of reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.reference import assert_same_numbers
from tests.support.requirements import requires
from tests.trl.runs import TOLERANCE, Run, assert_same_training, on_every_stage, run, without_engine

pytestmark = requires(modules=("trl", "peft"))
REFERENCES: dict[str, tuple[str, dict[str, object]]] = {
    "reference_model": ("full", {"reference": True}),
    "reference_by_trl": ("full", {}),
    "adapter_switched_off": ("lora", {}),
    "precomputed": ("full", {"precompute_ref_log_probs": True}),
    "precomputed_without_adapter": ("lora", {"precompute_ref_log_probs": True}),
    "copy_of_the_adapter": ("lora", {"wrap_first": True}),
    "following_reference": ("full", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
}


@pytest.mark.parametrize(("stage", "reference"), on_every_stage(REFERENCES, quick="reference_model"))
def test_same_as_plain_pytorch(stage: int, reference: str, tmp_path: Path) -> None:
    adapter, options = REFERENCES[reference]
    case = Run(method="dpo", adapter=adapter, stage=stage, options=options)
    result, expected = run(case, tmp_path), without_engine(case)
    assert_same_training(result, expected)
    for name in ("rewards/chosen", "rewards/rejected", "logps/chosen"):
        # Rewards are differences of two sums of logarithms of size 10 to 100, which have fewer digits.
        errors = [abs(a - b) for a, b in zip(result.column(name), expected.column(name), strict=True)]
        assert max(errors) < 1e-3, f"{name}: {errors}"
    assert_same_numbers(result.losses[:1], [0.6931471805599453], TOLERANCE, "first loss (log 2: policy = reference)")
