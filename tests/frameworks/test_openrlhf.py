"""OpenRLHF's commands with hf_zero: the same training as plain PyTorch's, saved and resumed."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import load_file

from tests.frameworks.environments import run
from tests.frameworks.material import write_language_model
from tests.frameworks.runs import EPS, STEPS, Left, assert_same_runs
from tests.trl.material import sentences

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]
SAMPLES, EPOCHS = 24, 2  # 8 samples per update: 6 updates
SFT: list[object] = ["--data.input_key", "input", "--data.output_key", "output"]
METHODS: dict[str, list[object]] = {
    "train_sft": SFT,
    "train_sft with LoRA": [*SFT, "--ds.lora.rank", 4, "--ds.lora.target_modules", "q_proj"],
    "train_dpo": ["--data.prompt_key", "input", "--data.chosen_key", "output", "--data.rejected_key", "other"],
}


def train(folder: Path, method: str, stage: int | None, resume: Path | None = None) -> Path:
    """One command on two ranks, with the engine at this stage or (None) plain PyTorch. Returns the folder it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    model, rows = write_language_model(folder / "model"), folder / "rows.json"
    texts = sentences(SAMPLES + 1)
    rows.write_text(
        json.dumps(
            [{"input": f"Tell {i}.", "output": text, "other": texts[i + 1]} for i, text in enumerate(texts[:-1])]
        )
    )
    command = method.split()[0]
    arguments = ["--model.model_name_or_path", model, "--data.dataset", rows]
    arguments += ["--train.micro_batch_size", 2, "--train.batch_size", 8, "--train.max_epochs", EPOCHS]
    arguments += ["--adam.lr", 5e-3, "--adam.eps", EPS, "--max_norm", 0.5, "--ds.attn_implementation", "eager"]
    arguments += ["--ckpt.output_dir", folder / "out", "--ckpt.path", folder / "checkpoints"]
    arguments += ["--logger.tensorboard_dir", folder / "logs", "--logger.wandb.run_name", "run"]
    arguments += ["--ds.zero_stage", 0 if stage is None else stage, *METHODS[method]]
    if command == "train_dpo":
        arguments += ["--ref.model_name_or_path", model]
    if stage is not None:
        arguments += ["--ckpt.save_steps", STEPS // 2]
    if resume is not None:
        shutil.copytree(resume / f"global_step{STEPS // 2}", folder / "checkpoints" / f"global_step{STEPS // 2}")
        (folder / "checkpoints" / "latest").write_text(f"global_step{STEPS // 2}")
        arguments += ["--ckpt.load_enable"]
    engine = "plain" if stage is None else "deepspeed"
    run("openrlhf", "openrlhf_script.py", [engine, f"openrlhf.cli.{command}", *arguments])
    return folder


def left_by(folder: Path) -> Left:
    """Mean losses of the updates, and the final saved weights."""
    lines = [json.loads(line) for line in (folder / "logs" / "run" / "scalars.jsonl").read_text().splitlines()]
    losses = [line["value"] for line in lines if line["name"] == "train/loss_mean"]
    adapter = folder / "out" / "adapter_model.bin"  # written at stage 3
    if adapter.exists():
        return Left(losses, torch.load(adapter))
    (file,) = (folder / "out").glob("*.safetensors")
    return Left(losses, load_file(file))


@cache
def without_an_engine(method: str) -> Path:
    return train(Path(mkdtemp(prefix="openrlhf_plain_")), method, None)


@pytest.mark.parametrize(
    ("stage", "method"),
    [(2, "train_sft"), (3, "train_sft"), (3, "train_sft with LoRA"), (2, "train_dpo"), (3, "train_dpo")],
)
def test_same_as_plain_pytorch(stage: int, method: str, tmp_path: Path) -> None:
    zero = train(tmp_path / "zero", method, stage)
    assert_same_runs(left_by(zero), left_by(without_an_engine(method)))

    resumed = left_by(train(tmp_path / "resumed", method, stage, resume=zero / "checkpoints"))
    whole = left_by(zero)
    assert_same_runs(resumed, Left(whole.losses[STEPS // 2 :], whole.weights), 0.0)
