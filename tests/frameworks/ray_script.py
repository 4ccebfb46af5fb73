"""Ray Train starts the ranks of an unmodified Trainer script: ray_script.py STORAGE [flags of trainer_script.py]."""

from __future__ import annotations

import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(settings: dict[str, list[str]]) -> None:
    """One rank; Ray has created the process group."""
    from transformers import HfArgumentParser, TrainingArguments

    from tests.end_to_end.trainer_script import ScriptArguments, run

    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    run(*parser.parse_args_into_dataclasses(settings["words"]))


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"words": sys.argv[2:]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1]),
    ).fit()
