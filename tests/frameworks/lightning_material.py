"""What both Lightning scripts share: arguments, model, and an accelerator with DeepSpeedStrategy's code and no GPU."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, ROWS, BATCH = 61, 9, 32, 2
LEARNING_RATE, EPS, CLIP = 5e-3, 1e-6, 0.5
NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0}  # by default parameters of this size are not sharded


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=None, help="none: DDP")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None)
    return parser.parse_args()


class Model(nn.Module):
    """Sizes that two ranks do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 15)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(15), nn.Linear(15, 31), nn.GELU(), nn.Linear(31, 15)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(15)
        self.head = nn.Linear(15, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).cumsum(1)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Different batches, the same on each call; an epoch ends halfway, because Lightning resumes from there."""
    start = torch.arange(ROWS).unsqueeze(1)
    return DataLoader(
        TensorDataset((start * 7 + torch.arange(LENGTH) * (1 + start % 3)) % VOCABULARY), batch_size=BATCH
    )


def on_cpu(accelerator: type) -> object:
    """Lightning's CUDAAccelerator, the only one that its strategy accepts, with the CPU as its only device.

    This replaces the test's device, but nothing of the strategy. The strategy requires numbered devices, and there is
    no second CPU; so each rank is a separate node with one device (`one_rank_per_node`).
    """

    class CPU(accelerator):  # type: ignore[misc, valid-type]
        def setup_device(self, device: torch.device) -> None:
            assert device.type == "cpu"

        def get_device_stats(self, device: object) -> dict[str, object]:
            return {}

        @staticmethod
        def parse_devices(devices: int) -> list[int]:
            return list(range(devices))

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("cpu", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

    return CPU()


def one_rank_per_node() -> dict[str, int]:
    """Arguments of Fabric and Trainer for the ranks started by torch's launcher."""
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return {"devices": 1, "num_nodes": int(os.environ["WORLD_SIZE"])}
