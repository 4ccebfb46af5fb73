"""A script for any deepspeed: trains a model with every kind of parameter, saves, loads, and writes its results.

    torchrun --nproc-per-node 2 interchange_script.py '{"folder": ..., "stage": 2, "dtype": "bf16", ...}'

Keys: `load` and `save` (folders or null), `steps` [first, last), `config` (sections to add), `universal`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

ROWS = 6


class Model(nn.Module):
    """Two param groups, a frozen layer, a tied embedding, buffers of two dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(19, 12)
        self.frozen = nn.Linear(12, 12)
        self.up = nn.Linear(12, 17)
        self.down = nn.Linear(17, 12)
        self.norm = nn.LayerNorm(12)
        self.batch = nn.BatchNorm1d(12, affine=False)
        self.head = nn.Linear(12, 19, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The cross entropy of predicting the previous token."""
        hidden = self.frozen(self.embed(tokens))
        hidden = self.norm(hidden + self.down(torch.relu(self.up(hidden))))
        hidden = self.batch(hidden.float()).to(hidden.dtype)
        return nn.functional.cross_entropy(self.head(hidden).float(), tokens.roll(1))


def config(case: dict[str, Any]) -> dict[str, Any]:
    """The ds.json of the case."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}},
    }
    if case["dtype"] == "bf16":
        settings["bf16"] = {"enabled": True}
    for key, section in case.get("config", {}).items():
        settings[key] = {**settings.get(key, {}), **section}
    return settings


def main() -> None:
    """Run the case with this script's model."""
    case = json.loads(sys.argv[1])
    model = Model(case.get("seed", 0))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config(case))
    rank, world = engine.global_rank, engine.world_size

    def loss_of() -> torch.Tensor:
        tokens = torch.randint(19, (ROWS * world,))[ROWS * rank :][:ROWS]
        loss: torch.Tensor = engine(tokens)
        return loss

    train(engine, case, loss_of)


def train(engine: Any, case: dict[str, Any], loss_of: Callable[[], torch.Tensor]) -> None:
    """Load, train and save as the case says; rank 0 writes losses, norms and what was loaded.

    Args:
        loss_of: of the next batch, for which torch has been seeded.
    """
    client_state = None
    if case.get("load"):
        path, client_state = engine.load_checkpoint(case["load"])
        assert path is not None, "nothing was loaded"
    losses, norms = [], []
    for step in range(*case["steps"]):
        torch.manual_seed(100 + step)
        loss = loss_of()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
        if case.get("save") and step + 1 == case["save_after"]:
            engine.save_checkpoint(case["save"], client_state={"note": ["hello", 1]})
    if engine.global_rank == 0:
        note = None if client_state is None else client_state.get("note")
        figures = {"losses": losses, "norms": norms, "note": note, "steps": engine.global_steps, "lr": engine.get_lr()}
        Path(case["out"]).write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
