"""The engine trains, monitors, saves and resumes without DeepSpeed's names, which a subclass adds.

`engine.step` used `self.get_lr`, which only existed in the table of DeepSpeed's names, through torch's `__getattr__`. A
mistake in that table would have broken training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.api import entry
from hf_zero.api.engine import ZeroEngine
from hf_zero.step.optimizer import ZeroOptimizer


def config(folder: Path, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "csv_monitor": {"enabled": True, "output_path": str(folder / "csv")},
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "hf_zero": {"broadcast_buffers": True},
    }


def train(engine: Any, steps: int) -> list[torch.Tensor]:
    losses = []
    for step in range(2 * steps):
        batch = torch.ones(4, 6, dtype=torch.float16) * (1 + step % 3)
        loss = engine(batch).float().square().mean()
        losses.append(engine.backward(loss).detach().clone())
        engine.step()
    return losses


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"stage": 3}])
def test_an_engine_without_them_trains_saves_and_resumes(zero: dict[str, Any], tmp_path: Path) -> None:
    def engine() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        data = [torch.ones(6)] * 16
        built = entry.initialize(model, config(tmp_path, zero), training_data=data, engine_class=ZeroEngine)
        assert len(built.training_dataloader) == 4 and type(built.optimizer) is ZeroOptimizer
        return built

    first = engine()
    assert not hasattr(first, "zero_optimization_stage"), "the names are really gone"
    train(first, 2)
    first.save_checkpoint(str(tmp_path / "saved"))
    expected = train(first, 2)
    first.destroy()
    second = engine()
    assert second.load_checkpoint(str(tmp_path / "saved"))[0] is not None
    assert train(second, 2) == expected and second.global_steps == 4
    assert second.get_lr() == [pytest.approx(0.01)] and second.get_mom() == [(0.9, 0.999)]
    second.destroy()
