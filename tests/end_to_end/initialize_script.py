"""A plain script with deepspeed.initialize, without Trainer: trains a linear layer for a few steps.

torchrun --nproc-per-node 2 initialize_script.py ds.json [rank that raises in its third forward]
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from torch import nn


class Model(nn.Module):
    """A linear layer that may have a bug."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.calls_until_fault = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of the output."""
        self.calls_until_fault -= 1
        if self.calls_until_fault == 0:
            raise RuntimeError("a fault in the user's model")
        output: torch.Tensor = self.linear(x)
        return output.square().mean()


def main() -> None:
    """Trains, and prints a message at the end."""
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
    if len(sys.argv) > 2 and torch.distributed.get_rank() == int(sys.argv[2]):
        model.calls_until_fault = 3
    for _ in range(20):
        engine.backward(engine(torch.randn(4, 5)))
        engine.step()
    sys.stdout.write("trained\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
