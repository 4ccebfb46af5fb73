"""An unmodified Trainer compresses by ds.json alone: with its own optimizer or the config's, with a teacher, and after
resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.extras.compression.compressed_model import compression_of
from hf_zero.extras.compression.export import redundancy_clean
from tests.extras.compression.models import EIGHT_BIT_INPUTS, HEADS, ROWS, SNIP, bert_batches, tiny_bert
from tests.support.ranks import run_ranks

STUDENT = {"enabled": True, "module_name_prefix": "bert.encoder.layer", "teacher_layer": [1, 3]}


def _config(stage: int, has_optimizer: bool, has_more: bool) -> dict[str, Any]:
    techniques: dict[str, Any] = {"layer_reduction": STUDENT, "row_pruning": ROWS, "head_pruning": HEADS}
    if has_more:
        techniques |= {"sparse_pruning": SNIP, "activation_quantization": EIGHT_BIT_INPUTS}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "compression_training": techniques,
        "hf_zero": {"distillation": {}},
    }
    if has_optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    return config


def run_trainer(rank: int, folder: str, config: dict[str, Any], steps: int, resumes_from: int | None) -> dict[str, Any]:
    """One training, resumed or not; then cleaning. In a separate process: Accelerate takes one plugin per process."""
    import hf_zero

    hf_zero.install()
    from transformers import Trainer, TrainingArguments

    rows = [{key: value[0] for key, value in batch.items()} for batch in bert_batches(4 * steps, rows=1)]
    arguments = TrainingArguments(
        output_dir=folder, deepspeed=config, per_device_train_batch_size=2, max_steps=steps, report_to=[], use_cpu=True,
        save_steps=2, logging_steps=1, learning_rate=0.01, disable_tqdm=True,
    )  # fmt: skip
    model = tiny_bert(4)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=None if resumes_from is None else f"{folder}/checkpoint-{resumes_from}")
    trainer.save_model(f"{folder}/saved")
    compressed = compression_of(model)
    assert compressed is not None
    state = compressed.state_dict()
    redundancy_clean(trainer.model_wrapped, config)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=rows[0]["input_ids"][None]).logits
    if rank == 0:
        model.save_pretrained(f"{folder}/small")
    return {
        "updates": state["updates"],
        "known layers": sorted({*state["masks"], *state["ranges"]}),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "logits": logits.tolist(),
        "shapes": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "saved layers": json.loads(Path(folder, "saved", "config.json").read_text())["num_hidden_layers"],
    }


@pytest.mark.parametrize(
    ("stage", "ranks", "has_optimizer", "has_more", "steps"),
    [
        (2, 1, False, False, 3),
        (3, 1, True, False, 3),
        pytest.param(1, 2, True, True, 6, marks=pytest.mark.slow),
        pytest.param(3, 2, False, True, 6, marks=pytest.mark.slow),
    ],
)
def test_ds_json_alone(stage: int, ranks: int, has_optimizer: bool, has_more: bool, steps: int, tmp_path: Path) -> None:
    config = _config(stage, has_optimizer, has_more)
    whole, *_ = run_ranks(run_trainer, ranks, str(tmp_path), config, steps, None, init=False)
    assert whole["updates"] == steps and whole["saved layers"] == 2
    assert len(whole["known layers"]) > 2 if has_more else len(whole["known layers"]) == 2
    assert not [name for name in whole["shapes"] if "scores" in name or "encoder.layer.2" in name]
    for layer in ("bert.encoder.layer.0", "bert.encoder.layer.1"):
        assert whole["shapes"][f"{layer}.intermediate.dense.weight"] == [12, 16]
        assert whole["shapes"][f"{layer}.attention.self.query.weight"] == [8, 16]
    resumed, *_ = run_ranks(run_trainer, ranks, str(tmp_path), config, steps, 2, init=False)
    assert resumed["updates"] == steps and resumed["known layers"] == whole["known layers"]
    assert len(resumed["losses"]) == steps
    torch.testing.assert_close(torch.tensor(resumed["losses"]), torch.tensor(whole["losses"]))
    torch.testing.assert_close(torch.tensor(resumed["logits"]), torch.tensor(whole["logits"]))


def _train_the_small_one(rank: int, folder: str) -> list[float]:
    """Trains the cleaned model like any other at stage 3, loaded in shards."""
    import hf_zero

    hf_zero.install()
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    arguments = TrainingArguments(
        output_dir=f"{folder}/again", deepspeed=dict.fromkeys(keys, "auto") | {"zero_optimization": zero}, max_steps=2,
        per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no", logging_steps=1,
        learning_rate=0.01, lr_scheduler_type="constant", disable_tqdm=True, optim="sgd",
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/small", trust_remote_code=True)
    rows = [{key: value[0] for key, value in batch.items()} for batch in bert_batches(8, rows=1)]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(f"{folder}/again/saved")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_saved_at_stage_3_and_loaded_again(tmp_path: Path) -> None:
    """On two ranks: the weights before cleaning, from Trainer and from the checkpoint; and the cleaned model, which is
    loaded without hf_zero, and trained further in shards."""
    from transformers import AutoModelForSequenceClassification

    from hf_zero.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint

    def loaded(name: str) -> Any:
        found = AutoModelForSequenceClassification.from_pretrained(tmp_path / name, trust_remote_code=True)
        return found.eval()

    config = _config(3, False, True)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    whole, *_ = run_ranks(run_trainer, 2, str(tmp_path), config, 4, None, init=False)
    exact = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "checkpoint-4"))
    for name, value in loaded("saved").named_parameters():
        assert torch.equal(value, exact[name]), name
    ids = bert_batches(1, rows=1)[0]["input_ids"]
    with torch.no_grad():
        assert loaded("small")(input_ids=ids).logits.tolist() == whole["logits"]
    losses, others = run_ranks(_train_the_small_one, 2, str(tmp_path), init=False)
    assert losses == others and len(losses) == 2
    again, before = dict(loaded("again/saved").named_parameters()), dict(loaded("small").named_parameters())
    assert {name: list(value.shape) for name, value in again.items()} == whole["shapes"]
    assert not torch.equal(again["classifier.weight"], before["classifier.weight"])
