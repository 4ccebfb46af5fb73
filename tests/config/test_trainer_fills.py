"""The files in configs/: Trainer fills them, and the resolver accepts the result as the name of the file says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hf_zero
from hf_zero.config import Findings, load_config, resolve
from tests.config.building import error_of
from tests.support.launch import LAUNCHER_VARIABLES
from tests.support.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "configs"
ALL = sorted(FOLDER.glob("*.json"))


def run_filling(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    """In a process of its own: transformers asks for DeepSpeed when it is imported, and keeps the config in globals."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name)
    hf_zero.install()
    from transformers import TrainingArguments

    Findings.absent_folders = lambda self: iter(())  # type: ignore[method-assign]  # this machine has no /local_nvme
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    found = {}
    for path in ALL:
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed=str(path),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            learning_rate=2e-4,
            adam_beta2=0.95,
            weight_decay=0.01,
            max_grad_norm=0.5,
            warmup_steps=4,
            bf16="fp16" not in path.name,
            fp16="fp16" in path.name,
            use_cpu=True,
            report_to=[],
        )
        arguments.hf_deepspeed_config.trainer_config_finalize(arguments, model, 100)
        found[path.name] = json.loads(json.dumps(arguments.hf_deepspeed_config.config))
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    (found,) = run_ranks(run_filling, 1, str(tmp_path_factory.mktemp("out")), init=False)
    return dict(found)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_ready_config_resolves_once_transformers_has_filled_it(path: Path, filled: dict[str, dict[str, Any]]) -> None:
    assert load_config(path) == json.loads(path.read_text()), "transformers reads plain JSON only"
    resolved = resolve(filled[path.name], world_size=1)
    assert not [note for note in resolved.notes if '"auto"' in note]
    assert (resolved.batch.micro_batch_size, resolved.batch.accumulation_steps) == (3, 2)
    assert resolved.gradients.clip_norm == 0.5 and resolved.zero.bucket_numel == 64 * 64
    assert resolved.precision.model == ("fp16" if "fp16" in path.name else "bf16")
    if resolved.optimizer is not None:
        assert resolved.optimizer.params == {"lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    if resolved.scheduler is not None:
        steps = {"warmup_num_steps": 4, "total_num_steps": 100}
        assert resolved.scheduler.params == {"warmup_min_lr": 0.0, "warmup_max_lr": 2e-4, **steps}
    zero = resolved.zero
    assert zero.stage == int(path.name[len("zero")])
    place = "nvme" if "nvme" in path.name else "cpu" if "offload" in path.name else None
    assert (zero.offload_optimizer and zero.offload_optimizer.device) == place
    assert (zero.offload_param and zero.offload_param.device) == (place if zero.stage == 3 else None)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_ready_config_without_trainer_lacks_only_the_batch_size(path: Path) -> None:
    error = error_of(load_config(path), world_size=2)
    assert len(error.problems) == 1 and "per_device_train_batch_size" in str(error)


def test_every_ready_config_is_in_the_readme() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert len(ALL) == 10
    for path in ALL:
        assert f"`{path.name}`" in readme
