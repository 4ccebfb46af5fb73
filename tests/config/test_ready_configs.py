"""The files in configs/ resolve once Trainer has filled in its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import ConfigError, load_config, resolve

FOLDER = Path(__file__).parents[2] / "configs"
ALL = sorted(FOLDER.glob("*.json"))

# What transformers writes instead of "auto" for a model of hidden size 64 on 2 ranks.
TRAINER = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "reduce_bucket_size": 4096,
    "stage3_prefetch_bucket_size": 3686,
    "stage3_param_persistence_threshold": 640,
    "enabled": True,
    "lr": 5e-5,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 5e-5,
    "warmup_num_steps": 1,
    "total_num_steps": 100,
}


def filled(tree: dict[str, Any]) -> dict[str, Any]:
    def value(key: str, held: Any) -> Any:
        return filled(held) if isinstance(held, dict) else TRAINER[key] if held == "auto" else held

    return {key: value(key, held) for key, held in tree.items()}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_resolves_after_trainer(path: Path) -> None:
    config = load_config(path)
    assert config == json.loads(path.read_text()), "transformers reads plain JSON only"
    resolved = resolve(filled(config), world_size=2)
    assert resolved.zero.stage == int(path.name[len("zero")])
    assert resolved.precision.model == ("fp16" if "fp16" in path.name else "bf16")
    assert resolved.batch.train_batch_size == 8
    assert resolved.zero.bucket_numel == 4096
    assert not [note for note in resolved.notes if '"auto"' in note]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_without_trainer_only_the_batch_size_is_missing(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(path), world_size=2)
    assert len(caught.value.problems) == 1
    assert "per_device_train_batch_size" in str(caught.value)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_offload_goes_where_the_name_says(path: Path) -> None:
    zero = resolve(filled(load_config(path)), world_size=2).zero
    wanted = "nvme" if "nvme" in path.name else "cpu" if "offload" in path.name else None
    assert (zero.offload_optimizer and zero.offload_optimizer.device) == wanted
    assert (zero.offload_param and zero.offload_param.device) == (wanted if zero.stage == 3 else None)


def test_every_file_is_in_the_readme() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert len(ALL) == 10
    for path in ALL:
        assert f"`{path.name}`" in readme
