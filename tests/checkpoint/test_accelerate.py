"""accelerate's save_state and load_state: model, optimizer, schedule and random states, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.ranks import run_ranks


def prepared(seed: int) -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator, DeepSpeedPlugin

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    return (accelerator, *accelerator.prepare(model, optimizer, schedule))


def train(parts: tuple[Any, Any, Any, Any], steps: int) -> list[float]:
    accelerator, model, optimizer, schedule = parts
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(2, 5)).square().mean()  # inputs and dropout depend on the random state
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_saving(rank: int, folder: str) -> list[float]:
    torch.manual_seed(rank)
    parts = prepared(0)
    train(parts, 3)
    parts[0].save_state(folder)
    return train(parts, 4)


def run_loading(rank: int, folder: str) -> list[float]:
    parts = prepared(8)
    parts[0].load_state(folder)
    return train(parts, 4)


def test_load_state_continues_where_save_state_was_called(tmp_path: Path) -> None:
    expected = run_ranks(run_saving, 2, str(tmp_path), init=False)
    assert (tmp_path / "pytorch_model" / "mp_rank_00_model_states.pt").is_file()
    assert run_ranks(run_loading, 2, str(tmp_path), init=False) == expected
