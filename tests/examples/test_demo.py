"""The demo: the command it runs, the picture it draws, and the check of the saved model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import demo
import pytest
import torch
from datasets import Dataset
from demo import Machine, quiet_environment, training_command
from demo_report import History, draw_loss_curve, mean_loss
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments

from tests.examples.conftest import EXAMPLES


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_command_on_two_cores(tmp_path: Path) -> None:
    command = training_command(Machine(2, "cpu"), 600, tmp_path)
    assert command[1:6] == ["-m", "hf_zero", "launch", "--num_gpus", "2"]
    assert option(command, "--deepspeed").endswith("configs/zero2_bf16.json")
    assert "--use_cpu" in command and "--bf16" in command
    assert option(command, "--per_device_train_batch_size") == str(demo.SEQUENCES_PER_STEP // 2)


def test_a_processor_that_only_emulates_bf16_gets_fp32(tmp_path: Path) -> None:
    """On a processor without native bf16 products a step of the demo took ten seconds, and the whole demo two hours."""
    command = training_command(Machine(2, "cpu", "fp32"), 600, tmp_path)
    assert option(command, "--deepspeed").endswith("configs/zero2.json") and "--bf16" not in command


def test_a_slow_machine_trains_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """800 steps took three minutes on one machine and eighteen on another."""
    chosen = []
    for seconds in (1e-5, 3e-3, 6e-3, 1.0):
        monkeypatch.setattr(demo, "seconds_of_products", lambda dtype, seconds=seconds: seconds)
        chosen.append(demo.steps_for(Machine(2, "cpu", "fp32")))
    assert chosen[0] == demo.MAX_STEPS and chosen[-1] == demo.MIN_STEPS
    assert demo.MAX_STEPS > chosen[1] > chosen[2] >= demo.MIN_STEPS
    assert demo.steps_for(Machine(1, "cuda")) == demo.MAX_STEPS


@pytest.mark.parametrize("num_gpus", [1, 3, 64])
def test_command_on_gpus(tmp_path: Path, num_gpus: int) -> None:
    command = training_command(Machine(num_gpus, "cuda"), 600, tmp_path)
    assert option(command, "--num_gpus") == str(num_gpus)
    assert "--use_cpu" not in command
    assert int(option(command, "--per_device_train_batch_size")) >= 1


def test_training_arguments_accept_the_command(tmp_path: Path) -> None:
    command = training_command(Machine(2, "cpu"), 2, tmp_path)
    arguments = command[command.index(str(demo.SCRIPT)) + 1 :]
    arguments = [*arguments[2:]]  # without --deepspeed, which would start a process group
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    training_args, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    assert training_args.max_steps == 2
    assert {name for name in unknown if name.startswith("--")} == {f"--{name}" for name in (*demo.MODEL, *demo.DATA)}


def test_environment_of_the_person_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    environment = quiet_environment(Machine(2, "cpu"))
    assert (environment["OMP_NUM_THREADS"], environment["HF_HUB_OFFLINE"]) == ("7", "1")


@pytest.fixture
def output_folder(tmp_path: Path) -> Path:
    """Small versions of the files that a Trainer writes."""
    log = [
        {"step": 0, "eval_loss": 8.4, "eval_runtime": 1.0},
        {"step": 1, "loss": 8.3},
        {"step": 10, "loss": 5.0},
        {"step": 10, "eval_loss": 5.1, "eval_runtime": 2.0},
        {"step": 20, "loss": 4.0},
        {"step": 20, "train_runtime": 33.0, "train_loss": 5.5},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 20, "log_history": log}))
    (tmp_path / "eval_results.json").write_text(json.dumps({"eval_loss": 4.2}))
    return tmp_path


def test_history_is_read(output_folder: Path) -> None:
    history = History.read(output_folder)
    assert history.train == [(1, 8.3), (10, 5.0), (20, 4.0)]
    assert history.held_out == [(0, 8.4), (10, 5.1), (20, 4.2)]
    assert (history.first_loss, history.last_loss, history.final_held_out_loss) == (8.3, 4.0, 4.2)
    assert history.train_seconds == 30.0


def test_loss_curve_is_a_picture(output_folder: Path) -> None:
    path = output_folder / "loss.png"
    draw_loss_curve(History.read(output_folder), 4096, "a title", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_mean_loss_is_the_loss_of_all_blocks() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (5, 12))
    blocks = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    whole = model(input_ids=ids, labels=ids).loss.item()
    assert mean_loss(model, blocks, batch_size=2) == pytest.approx(whole, rel=1e-5)


def test_other_weights_are_noticed() -> None:
    """The tolerance of the reload check is far below the difference that new weights would cause."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    ids = torch.arange(24).reshape(2, 12)
    blocks = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    trained = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for _ in range(20):
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(mean_loss(trained, blocks) - mean_loss(LlamaForCausalLM(config), blocks)) > 10 * demo.LOSS_TOLERANCE


@pytest.mark.slow
def test_the_whole_demo_in_few_steps(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--steps", "4", "--output", str(output)],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_ZERO": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 steps, 4,096 tokens" in done.stdout
    assert "the same" in done.stdout and "NOT" not in done.stdout
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "sample.py.txt").read_text().startswith(demo.PROMPT)
    assert (output / "model.safetensors").exists()


def test_too_few_steps_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--steps", "1"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "at least 2 are needed" in done.stderr
