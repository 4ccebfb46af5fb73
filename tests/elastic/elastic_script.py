"""A user's own loop with elastic batch sizes and a curriculum, saved after every update and resumed at the start.

torchrun ... elastic_script.py FOLDER UPDATES [UPDATE]: in update UPDATE the last rank of a job of several exits,
together with the agent that started it, like a lost host. FOLDER/losses.jsonl gets a line per update: its number, the
number of ranks, the samples of its batch in order of ranks and micro-batches, and the mean loss before the update.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
from torch import nn
from torch.utils.data import Dataset

SAMPLES, WIDTH = 96, 6


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers, with their index and difficulty."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return {"index": torch.tensor(index), "difficulty": torch.tensor(1 + index % 12), "x": x, "y": x.sin()}


def make_model() -> nn.Module:
    """The same model on every rank and in the reference."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def config_of(folder: Path) -> dict[str, Any]:
    """ds.json: a batch of 8 on 1, 2 or 4 ranks; easy samples first."""
    metric = {
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "index_to_sample_path": str(folder / "analysis/difficulty/difficulty_index_to_sample"),
        "index_to_metric_path": str(folder / "analysis/difficulty/difficulty_index_to_metric"),
        "min_difficulty": 4,
        "max_difficulty": 12,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 1},
    }
    sampling = {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"difficulty": metric}}}
    return {
        "elasticity": {"enabled": True, "version": 0.1, "max_train_batch_size": 8, "micro_batch_sizes": [2, 4]},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "data_efficiency": {"enabled": True, "seed": 7, "data_sampling": {"enabled": True, **sampling}},
    }


def analyze(folder: Path) -> None:
    """Write the metric's files."""
    DataAnalyzer(
        Rows(),
        metric_names=["difficulty"],
        metric_functions=[lambda rows: torch.stack([row["difficulty"] for row in rows])],
        metric_types=["single_value_per_sample"],
        save_path=str(folder / "analysis"),
        batch_size=32,
        collate_fn=list,
    ).run_map_reduce()


def main() -> None:
    """Train up to the last update, resuming from the last checkpoint."""
    folder, updates = Path(sys.argv[1]), int(sys.argv[2])
    lost_at = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    model = make_model()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(folder), training_data=Rows()
    )
    if (folder / "checkpoints/latest").exists():
        engine.load_checkpoint(str(folder / "checkpoints"))
    ranks, steps = dist.get_world_size(), engine.gradient_accumulation_steps()
    losses, samples = [], []
    for batch in loader:
        if engine.global_steps == lost_at and ranks > 1 and dist.get_rank() == ranks - 1:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.mse_loss(engine(batch["x"]), batch["y"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        samples += batch["index"].tolist()
        if len(losses) == steps:
            record(folder, engine.global_steps, losses, samples)
            engine.save_checkpoint(str(folder / "checkpoints"))
            losses, samples = [], []
        if engine.global_steps == updates:
            break
    dist.destroy_process_group()


def record(folder: Path, update: int, losses: list[float], samples: list[int]) -> None:
    """Write one line for all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (losses, samples))
    if dist.get_rank() == 0:
        loss = sum(sum(one) for one, _ in everyone) / sum(len(one) for one, _ in everyone)
        line = {"update": update, "ranks": len(everyone), "samples": [of for _, of in everyone], "loss": loss}
        with (folder / "losses.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
