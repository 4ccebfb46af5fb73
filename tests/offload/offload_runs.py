"""Training runs of AwkwardMLP, with and without offload, for ranks of `run_ranks`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_zero import initialize
from hf_zero.offload.placement import Departures
from hf_zero.optim.adam8 import AdamW8bit
from tests.support.models import AwkwardMLP, mlp_batches

ROWS = 12  # divisible by 1, 2, 3 and 4 ranks
# Small models are below every threshold: with the defaults nothing of them would be sharded.
SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


EIGHT_BITS: tuple[Any, dict[str, Any]] = (AdamW8bit, {"lr": 1e-2})
WHOLE_BLOCKS = {"sub_group_size": 256}  # with sub-groups of other sizes, states of 8 bits have other blocks


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        zero: keys of zero_optimization.
        optimizer: a class of torch.optim or hf_zero and its options; default: AdamW from the config.
    """

    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    bf16: bool = True
    accumulation: int = 1
    clip: float = 0.0
    steps: int = 4
    optimizer: tuple[Any, dict[str, Any]] | None = None
    sections: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        name = "" if self.optimizer is None else f"-{self.optimizer[0].__name__}"
        return f"stage{self.stage}-{'bf16' if self.bf16 else 'fp32'}-{self.accumulation}-{self.clip}{name}"

    def in_folder(self, folder: Path) -> Run:
        """The same, on a drive that is this folder."""
        zero = {
            key: {**value, "nvme_path": str(folder)} if isinstance(value, dict) and "nvme_path" in value else value
            for key, value in self.zero.items()
        }
        return replace(self, zero=zero)

    def config(self, world: int) -> dict[str, Any]:
        zero = {"stage": self.stage, "reduce_bucket_size": 150, **(SHARDED if self.stage == 3 else {}), **self.zero}
        return {
            "train_micro_batch_size_per_gpu": ROWS // world,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.bf16},
            "zero_optimization": zero,
            **self.sections,
        }


def engine_for(run: Run, world: int) -> Any:
    model = AwkwardMLP()
    kind, options = run.optimizer or (torch.optim.AdamW, {"lr": 1e-2})
    decayed = [p for name, p in model.named_parameters() if "bias" not in name]
    spared = [p for name, p in model.named_parameters() if "bias" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    engine, *_ = initialize(model=model, optimizer=kind(groups, **options), config=run.config(world))
    return engine


def train(engine: Any, run: Run, rank: int, world: int, *, first: int = 0, steps: int | None = None) -> list[float]:
    """Losses and norms; the used parameters differ between ranks and micro-batches."""
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    numbers = []
    last = first + (run.steps if steps is None else steps)
    for batch in mlp_batches(last * run.accumulation, ROWS)[first * run.accumulation :]:
        mine = {key: value.chunk(world)[rank].to(dtype) for key, value in batch.items()}
        loss = engine(**mine, flag=rank == 0 and engine.micro_steps % run.accumulation == 0)
        engine.backward(loss)
        engine.step()
        numbers.append(loss.item())
        if engine.micro_steps % run.accumulation == 0:
            numbers.append(engine.get_global_grad_norm())
    return numbers


def waits_for_gradients() -> set[str]:
    """How the trace of the late device names the host's waits for gradients on their way to host memory."""
    lines, first = inspect.getsourcelines(Departures._wait_for_first)
    return {f"placement.py:{line} waits" for line in range(first, first + len(lines))}


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}


def train_run(rank: int, world: int, run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = engine_for(run, world)
    return train(engine, run, rank, world), weights_of(engine)


def assert_same_bits(
    outcome: tuple[list[float], dict[str, torch.Tensor]], expected: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    assert outcome[0] == expected[0], "losses and norms"
    assert outcome[1].keys() == expected[1].keys()
    different = [name for name, value in outcome[1].items() if not torch.equal(value, expected[1][name])]
    assert not different, f"other bits in {different}"
