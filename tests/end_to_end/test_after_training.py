"""Typical actions after training: evaluate, predict, save the model and load it back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.parity import STEPS, Case, expected, outcome, rows, run_script
from tests.end_to_end.trainer_script import EVALUATED
from tests.support.models import VOCABULARY, stack, tiny_llama
from tests.support.ranks import run_ranks


# Below stage 3, the example of tests/examples/test_train_clm.py evaluates, saves and is loaded by default.
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)), 3])
def test_evaluate_predict_save_and_load(stage: int, tmp_path: Path) -> None:
    case = Case(stage=stage, processes=2, tied=stage in (1, 3))
    run_ranks(run_script, 2, [*case.words(tmp_path), "--evaluate", "True"], init=False)
    numbers = outcome(tmp_path).numbers

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    losses = []
    with torch.no_grad():
        for start in range(0, EVALUATED, 16):  # the concurrent batches of the two ranks, 8 rows each
            losses.append(float(model(**stack(rows(STEPS)[start : start + 16])).loss))
    # Trainer also averages these losses; so the saved model equals the evaluated one.
    assert numbers["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert numbers["test_loss"] == pytest.approx(numbers["eval_loss"], rel=1e-6)
    assert numbers["predictions_shape"] == [EVALUATED, 16, VOCABULARY]
    assert numbers["eval_loss"] < 0.8 * math.log(VOCABULARY), "the model has not learned"

    reference = tiny_llama(tied=case.tied)
    reference.load_state_dict(expected(case.recipe, case.tied).weights)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_bf16_run_saves_what_it_trained(stage: int, tmp_path: Path) -> None:
    case = Case(stage=stage, processes=2, bf16=True)
    run_ranks(run_script, 2, case.words(tmp_path), init=False)
    result = outcome(tmp_path)
    assert {weight.dtype for weight in result.weights.values()} == {torch.bfloat16}
    assert result.losses[-1] < 0.8 * result.losses[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
