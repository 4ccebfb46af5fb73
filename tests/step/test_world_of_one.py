"""Stage 3 in a single process: nothing stays partitioned, whatever zero.Init has done before."""

from __future__ import annotations

import torch
from torch import nn

from hf_zero import initialize
from hf_zero.api.zero_init import Init
from tests.support.ranks import run_each

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3},
}


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def run_one(rank: int, trains: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    with Init(config_dict_or_path=CONFIG):
        model = build()
    config = CONFIG if trains else {key: value for key, value in CONFIG.items() if key != "optimizer"}
    engine, *_ = initialize(model=model, config=config)
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(2, 5)).square().mean()
        losses.append(loss.item())
        if trains:
            engine.backward(loss)
            engine.step()
    return losses, dict(model.state_dict())


def test_a_model_born_in_shards_has_its_values() -> None:
    """Weights loaded under zero.Init by one process stayed NaN, because a single rank never gathered them."""
    model = build()
    steps = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    losses, expected = [], {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        loss = model(torch.ones(2, 5)).square().mean()
        losses.append(loss.item())
        loss.backward()
        steps.step()
        steps.zero_grad()
    [(trained_losses, trained)], [(forward_losses, weights)] = run_each(run_one, 1, [(True,), (False,)])
    torch.testing.assert_close(trained_losses, losses)
    torch.testing.assert_close(trained, dict(model.state_dict()))
    torch.testing.assert_close(forward_losses, losses[:1] * 3)
    torch.testing.assert_close(weights, expected)
