"""Expert parallelism enabled by the config alone, with an unmodified Trainer and Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from transformers.distributed import DistributedConfig

from tests.experts.training import batches, in_one_process, model_of
from tests.support.models import Samples
from tests.support.one_process import CLIP
from tests.support.ranks import run_ranks

TOLERANCE, WORLD, STEPS = 1e-5, 2, 4


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        **more,
    }


def _by_trainer(rank: int, stage: int, folder: str, tensor: int = 1) -> dict[str, Any]:
    """The model is saved at the end, and evaluated once before."""
    experts, cut = {"enabled": True, "autoep_size": 2 * tensor}, {"autotp_size": tensor}
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        deepspeed=_config(stage, expert_parallel=experts, tensor_parallel=cut),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_grad_norm=CLIP,
        num_train_epochs=1,
        learning_rate=1e-3,
        adam_epsilon=1e-4,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/first", attn_implementation="eager")
    rows = Samples(batches(WORLD * STEPS))
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=default_data_collator)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/last")
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"norms": norms, "evaluated": evaluated}


@pytest.mark.parametrize(
    ("stage", "tensor"),
    [pytest.param(1, 1, marks=pytest.mark.slow), (3, 1), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_trainer(stage: int, tensor: int, tmp_path: Path) -> None:
    """The weights come from `from_pretrained`, at stage 3 under zero.Init, and the saved model is complete. Ranks of a
    tensor group see the same samples."""
    model = model_of("deepseek")  # without a router loss, of which Trainer takes the sum over ranks
    model.save_pretrained(tmp_path / "first")
    plain = in_one_process(model, batches(WORLD * STEPS), together=WORLD)
    told = run_ranks(_by_trainer, WORLD * tensor, stage, str(tmp_path), tensor, timeout_s=280)
    for each in told:
        assert each["norms"] == pytest.approx(plain.norms, abs=1e-4)  # as rounded in the log
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    for name, value in saved.named_parameters():
        assert (value - plain.weights[name]).abs().max() <= 1e-4, name


def _by_accelerator(rank: int, stage: int, folder: str, expected: dict[str, torch.Tensor]) -> tuple[float, int]:
    plugin = DeepSpeedPlugin(hf_ds_config=_config(stage) | {"train_micro_batch_size_per_gpu": 2})
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    wanted = DistributedConfig(ep_size=2, fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=wanted, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    rows = DataLoader(Samples(batches(WORLD * STEPS)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, rows)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    apart = max(float((state[name] - value).abs().max()) for name, value in expected.items()) if state else 0.0
    return apart, model.groups.along("expert").size


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_experts_that_the_program_asks_for(stage: int, tmp_path: Path) -> None:
    """A user loaded a model by `from_pretrained(distributed_config=DistributedConfig(...))` with expert parallelism
    under accelerate and ZeRO-3, which hung (transformers#45548): DTensors were created from weights that zero.Init had
    partitioned. The engine now distributes the experts of such a model."""
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    expected = in_one_process(model, batches(WORLD * STEPS), together=WORLD).weights
    for apart, size in run_ranks(_by_accelerator, WORLD, stage, str(tmp_path), expected, timeout_s=280):
        assert apart <= 1e-4 and size == 2
