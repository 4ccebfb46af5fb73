"""Saved adapters: the same bytes for every method of saving and every stage, and they reproduce the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.reference import assert_same_numbers
from tests.support.requirements import requires
from tests.trl import material
from tests.trl.runs import ADAPTERS, EVALUATION_BATCH, STAGES, STEPS, TOLERANCE, Outcome, Run, run, without_engine

pytestmark = [requires(modules=("trl", "peft")), pytest.mark.slow]
ADAPTED = [name for name in ADAPTERS if name != "full"]
_RUNS: dict[tuple[str, int], tuple[Outcome, Path]] = {}


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def trained(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A function from (adapter, stage) to the outcome and folder of a run, created once for all tests."""

    def of(adapter: str, stage: int) -> tuple[Outcome, Path]:
        if (adapter, stage) not in _RUNS:
            folder = tmp_path_factory.mktemp(f"{adapter}-{stage}")
            _RUNS[adapter, stage] = run(Run(adapter=adapter, stage=stage), folder), folder
        return _RUNS[adapter, stage]

    return of


@pytest.mark.parametrize("adapter", list(ADAPTERS))
def test_every_way_to_save_writes_the_same_bytes(adapter: str, stage: int, trained) -> None:
    """A run's checkpoints had the adapter, but its final save was a file of 40 bytes, or the reverse."""
    outcome, _ = trained(adapter, stage)
    assert outcome.weights, "an empty file"
    assert all(tensor.numel() for tensor in outcome.weights.values())
    assert outcome.saved["save_steps"] == outcome.saved["save_model"] == outcome.saved["save_pretrained"]


@pytest.mark.parametrize("adapter", list(ADAPTERS))
def test_stages_save_the_same_bytes(adapter: str, stage: int, trained) -> None:
    """fp32, two ranks, no clipping: each weight's gradient is one sum of two numbers, so nothing depends on layout."""
    outcome, first = trained(adapter, stage)[0], trained(adapter, STAGES[0])[0]
    if stage < 3:
        assert outcome.saved == first.saved
        return
    # At stage 3 weights have other addresses. PyTorch's vectorised CPU kernels then end at other elements, and the last
    # elements of a vector differ in the last digit. Any larger difference is an error.
    assert {name: tensor.shape for name, tensor in outcome.weights.items()} == {
        name: tensor.shape for name, tensor in first.weights.items()
    }
    for name, tensor in outcome.weights.items():
        torch.testing.assert_close(tensor, first.weights[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adapter", ["lora", "lora_and_modules"])
def test_bf16_adapters_are_whole_in_every_file(adapter: str, stage: int, tmp_path: Path) -> None:
    outcome = run(Run(adapter=adapter, stage=stage, options={"bf16": True}), tmp_path)
    assert outcome.saved["save_steps"] == outcome.saved["save_model"] == outcome.saved["save_pretrained"]
    weights = outcome.weights
    plain = without_engine(Run(adapter=adapter)).weights
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in plain.items()
    }
    # Six steps in bf16 stay close to those in fp32: rounding has 8 bits, and an update of Adam is as large as the rate.
    for name, tensor in weights.items():
        assert (tensor.float() - plain[name]).norm() <= 0.15 * plain[name].norm(), name


@pytest.mark.parametrize("adapter", ADAPTED)
def test_reloading_gives_the_loss_that_training_saw(adapter: str, stage: int, trained) -> None:
    outcome, folder = trained(adapter, stage)
    loss = _evaluate(folder / "model", folder / "out" / "saved")
    assert_same_numbers([loss], [outcome.evaluation["eval_loss"]], TOLERANCE, "evaluation losses")


@pytest.mark.parametrize("adapter", ["lora", "lora_and_modules"])
def test_a_resumed_run_ends_with_the_same_bytes(adapter: str, stage: int, tmp_path: Path) -> None:
    half = {"save_steps": STEPS // 2, "save_only_model": False}
    first = run(Run(adapter=adapter, stage=stage, options=half), tmp_path / "first")
    checkpoint = tmp_path / "first" / "out" / f"checkpoint-{STEPS // 2}"
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    trained = sum(tensor.numel() for tensor in first.weights.values())
    assert size < 20 * trained + 150_000, "the frozen base is in the checkpoint"
    resumed = Run(adapter=adapter, stage=stage, options={**half, "resume_from_checkpoint": checkpoint})
    assert run(resumed, tmp_path / "second").saved["save_model"] == first.saved["save_model"]


def _evaluate(base: Path, adapter: Path) -> float:
    """The evaluation of the script, in plain PyTorch and PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    tokenizer = material.tokenizer()
    texts = [row["text"] + material.END for row in material.rows("sft", material.EVALUATED)]
    losses = []
    for start in range(0, len(texts), EVALUATION_BATCH):
        batch = tokenizer(texts[start : start + EVALUATION_BATCH], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with torch.no_grad():
            losses.append(model(**batch, labels=labels).loss.item())
    return sum(losses) / len(losses)
