"""Usage from the documentation of transformers, accelerate and DeepSpeed, as documented there.

Each test is one kind of usage from these pages, in our own words. Users start by pasting such blocks, so each of them
runs, or raises an error that names the unsupported part.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from deepspeed.utils.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from torch import Tensor, nn
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments
from transformers.integrations import HfDeepSpeedConfig
from transformers.trainer_utils import get_last_checkpoint

from tests.support.launch import alone_is_not_distributed
from tests.support.models import tiny_llama, tiny_llama_config, token_rows
from tests.support.ranks import run_each, run_ranks

T5 = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 32,
    "decoder_start_token_id": 0,
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def _born_in_init(rank: int) -> None:
    with deepspeed.zero.Init():
        model = T5ForConditionalGeneration(T5Config(**T5))
    assert all(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "optimizer": ADAMW}
    engine, _, _, _ = deepspeed.initialize(model=model, config_params=config)
    ids = torch.tensor([[1, 2, 3]])
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    assert engine.global_steps == 1


def test_a_model_built_inside_zero_init_needs_nothing_before_it() -> None:
    run_ranks(_born_in_init, 2)


# transformers: "ZeRO inference" without Trainer, and loading with HfDeepSpeedConfig.


def _inference(rank: int, weights: str) -> list[int]:
    deepspeed.init_distributed()
    hidden = 16
    config = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": 0.9 * hidden * hidden,
            "stage3_param_persistence_threshold": 10 * hidden,
        },
        "steps_per_print": 2000,
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    }
    kept = HfDeepSpeedConfig(config)
    model = T5ForConditionalGeneration.from_pretrained(weights)
    assert kept.is_zero3() and hasattr(next(model.parameters()), "ds_tensor")
    engine = deepspeed.initialize(model=model, config_params=config)[0]
    engine.module.eval()
    prompt = torch.tensor([[3 + rank, 4, 5]])
    with torch.no_grad():
        found: Tensor = engine.module.generate(prompt, synced_gpus=True, max_new_tokens=4 + 3 * rank)
    return found[0].tolist()


def test_inference_with_parameters_in_shards_generates_what_the_plain_model_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**T5)).eval()
    model.save_pretrained(tmp_path)
    found = run_ranks(_inference, 2, str(tmp_path))
    for rank, tokens in enumerate(found):
        expected = model.generate(torch.tensor([[3 + rank, 4, 5]]), max_new_tokens=4 + 3 * rank)
        assert tokens == expected[0].tolist()


def _cell(rank: int, folder: str) -> int:
    alone_is_not_distributed()
    os.chdir(folder)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    args = TrainingArguments("out", deepspeed="ds.json", max_steps=2, report_to=[], use_cpu=True)
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=token_rows(16))
    trainer.train()
    return int(trainer.state.global_step)


def test_a_notebook_trains_with_one_process_and_the_environment_of_five_variables(tmp_path: Path) -> None:
    """Launchers set these; a notebook has none, so the pages tell users to set them in a cell."""
    (tmp_path / "ds.json").write_text(json.dumps(_auto_config(3)))
    assert run_ranks(_cell, 1, str(tmp_path), init=False) == [2]


def _auto_config(stage: int) -> dict[str, Any]:
    return {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        },
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
        },
        **dict.fromkeys(
            (
                "gradient_accumulation_steps",
                "gradient_clipping",
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
            ),
            "auto",
        ),
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


# transformers: fp32 weights after training, online and offline.


def _weights_after_training(rank: int, folder: str) -> None:
    args = TrainingArguments(
        folder, deepspeed=_auto_config(3), max_steps=2, save_steps=2, report_to=[], use_cpu=True, learning_rate=1e-2
    )
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=token_rows(16))
    trainer.train()
    checkpoint = get_last_checkpoint(folder)
    assert checkpoint is not None
    trainer.model_wrapped.save_checkpoint(f"{folder}/checkpoint-final")
    expected = get_fp32_state_dict_from_zero_checkpoint(checkpoint)
    again = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/checkpoint-final")
    loaded = load_state_dict_from_zero_checkpoint(trainer.model, checkpoint)
    own = loaded.state_dict()
    for name, value in expected.items():
        assert torch.equal(value, again[name]) and torch.equal(own[name], value), name
    plain = LlamaForCausalLM(tiny_llama_config())
    plain.load_state_dict(expected)
    rows = {name: torch.tensor([values]) for name, values in token_rows(1)[0].items()}
    torch.testing.assert_close(loaded.cpu()(**rows).loss, plain(**rows).loss)


def _own_script(rank: int, folder: str) -> None:
    """In a process that starts at once; tests/checkpoint starts an interpreter."""
    os.chdir(folder)
    sys.argv = ["zero_to_fp32.py", ".", "pytorch_model.bin"]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("zero_to_fp32.py", run_name="__main__")
    assert not ended.value.code


def test_weights_are_loaded_back_and_the_checkpoint_brings_its_own_script(tmp_path: Path) -> None:
    run_ranks(_weights_after_training, 2, str(tmp_path))
    folder = tmp_path / "checkpoint-2"
    run_ranks(_own_script, 1, str(folder), init=False)
    written = folder / "pytorch_model.bin"
    found: dict[str, Tensor] = {}
    for part in [written] if written.is_file() else written.glob("*.bin"):  # one file, or a folder of shards
        found.update(torch.load(part))
    assert found.keys() == get_fp32_state_dict_from_zero_checkpoint(str(folder)).keys()


# DeepSpeed: getting started.


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss: Tensor = (self.layer(x) - y).square().mean()
        return loss


def _getting_started(rank: int, folder: str) -> None:
    Path(folder, "ds_config.json").write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "gradient_accumulation_steps": 1,
                "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
                "zero_optimization": True,
            }
        )
    )
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", f"{folder}/ds_config.json"])
    data = [(torch.randn(4), torch.randn(1)) for _ in range(32)]
    model = Regression()
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data
    )
    assert engine.zero_optimization_stage() == 1 and optimizer is engine.optimizer
    for step, batch in enumerate(loader):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        # The page uses the loss, a number, as the tag.
        engine.save_checkpoint(folder, 0.25 + step, client_state={"step": step})
    assert step == 3
    path, client_state = engine.load_checkpoint(folder, 2.25)
    assert path is not None and client_state["step"] == 2 and engine.global_steps == 3


def test_getting_started_with_a_loader_of_the_engine_and_a_number_for_a_tag(tmp_path: Path) -> None:
    run_ranks(_getting_started, 2, str(tmp_path))


# DeepSpeed: parameters of one module that other modules read.


class Biased(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.bias


class Logits(nn.Module):
    """A table that is read outside its module, and a parameter that is returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle = nn.Embedding(12, 8), Biased(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, bias = self.middle(self.table(tokens))
        logits = torch.tanh(hidden + bias) @ self.table.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _external(rank: int, stage: int, registers: bool) -> list[float]:
    with deepspeed.zero.Init(enabled=stage == 3):
        model = Logits()
    if registers:
        deepspeed.zero.register_external_parameter(model, model.table.weight)
    limits = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage, **limits}, "optimizer": ADAMW}
    engine = deepspeed.initialize(model=model, config=config)[0]
    losses = []
    for step in range(3):
        loss = engine(torch.arange(6).reshape(2, 3) + step + rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_parameters_that_other_modules_read_and_return() -> None:
    """Registered, as DeepSpeed's page has it, or not."""
    plain, *sharded = run_each(_external, 2, [(0, False), (3, True), (3, False)])
    for losses in sharded:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), rtol=1e-5, atol=0.0)


# accelerate: several models.


def _student_and_teacher(rank: int, folder: str) -> None:
    # As printed, with trailing commas.
    teacher_file, student_file = Path(folder, f"zero3_{rank}.json"), Path(folder, f"zero2_{rank}.json")
    teacher_file.write_text(
        """{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "overlap_comm": true,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": "auto",
        "stage3_max_reuse_distance": "auto", }, "train_micro_batch_size_per_gpu": 1}"""
    )
    student_file.write_text(
        """{"bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto",
        "weight_decay": "auto", "torch_adam": true, "adam_w_mode": true}}, "scheduler": {"type": "WarmupLR", "params":
        {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}, "zero_optimization":
        {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, }, "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto", "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", }"""
    )
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=str(student_file)),
        "teacher": DeepSpeedPlugin(hf_ds_config=str(teacher_file)),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins, cpu=True)
    assert accelerator.deepspeed_plugin is plugins["student"]
    student = tiny_llama()
    optimizer = DummyOptim(student.parameters(), lr=1e-2)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=1)
    rows = [{name: torch.tensor(values) for name, values in row.items()} for row in token_rows(8)]
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    student, optimizer, scheduler, loader = accelerator.prepare(student, optimizer, scheduler, loader)
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(tiny_llama(seed=1))
    before = student.module.lm_head.weight.detach().clone()
    with deepspeed.zero.GatheredParameters([teacher.module.lm_head.weight]):
        fixed = teacher.module.lm_head.weight.detach().clone()
    teacher.eval()
    student.train()
    for batch in loader:
        with torch.no_grad():
            guide = teacher(**batch)
        loss = guide.loss + student(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert student.global_steps == 4 and not torch.equal(before, student.module.lm_head.weight)
    with deepspeed.zero.GatheredParameters([teacher.module.lm_head.weight]):
        assert torch.equal(fixed, teacher.module.lm_head.weight)


def test_a_student_and_its_teacher(tmp_path: Path) -> None:
    run_ranks(_student_and_teacher, 2, str(tmp_path))


# Documented settings that are unsupported or malformed.


def _refusal(section: dict[str, Any]) -> str:
    config = {"train_batch_size": 1, "optimizer": ADAMW, **section}
    with pytest.raises(Exception) as caught:
        deepspeed.initialize(model=Regression(), config=config)
    return str(caught.value)


def _refused(rank: int) -> None:
    said = _refusal(
        {
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 8,
                "zero_quantized_gradients": True,
                "zenflow": {"topk_ratio": 0.05},
            }
        }
    )
    assert "zero_optimization.zenflow" in said and "zero_quantized" not in said and "hpz" not in said


def test_what_is_printed_and_not_built_is_named() -> None:
    run_ranks(_refused, 1)
