"""Trains tiny models of many architectures through deepspeed.initialize, whichever package has that name.

torchrun --nproc-per-node 2 architecture_script.py OUT STAGE STEPS --names llama t5 [--source FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig

from tests.support.architectures import ARCHITECTURES, Architecture, share

ROWS = 12  # divisible by 1, 2, 3 and 4 ranks
LEARNING_RATE = 1e-3
# Adam divides by the gradient's own size: with the usual 1e-8 a gradient that is zero except for rounding would move
# its weight by a whole step in a random direction.
EPS = 1e-6
BUILT, FROM_CONFIG = "built", "from_config"


@dataclass(frozen=True)
class Run:
    """One rank's observations: its own losses, the global norms, and the whole model before and after."""

    losses: list[float]
    norms: list[float]
    start: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    trained: list[str]


def ds_config(stage: int, world: int) -> dict[str, Any]:
    """Buckets and limits so small that the tiny models need several of everything."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 8000, "allgather_bucket_size": 8000}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        zero |= {"stage3_prefetch_bucket_size": 4000, "stage3_max_live_parameters": 20000}
    adam = {"lr": LEARNING_RATE, "eps": EPS, "weight_decay": 0.0, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": ROWS // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
        "steps_per_print": 1_000_000,
    }


def train_architecture(rank: int, name: str, stage: int, steps: int, source: str = BUILT) -> Run:
    """Trains a tiny model, created by `make_model`."""
    world = dist.get_world_size()
    architecture = ARCHITECTURES[name]
    config = ds_config(stage, world)
    # transformers checks for this object while it is alive: from then on models are partitioned on creation.
    alive = HfDeepSpeedConfig(config) if source != BUILT else None
    model = make_model(architecture, source, name).train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    start = whole(dict(model.named_parameters()), stage)
    losses, norms = [], []
    for batch in architecture.batches(steps, ROWS):
        loss = architecture.loss(engine, share(batch, rank, world))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    weights = whole(dict(model.named_parameters()), stage)
    buffers = {key: value.detach().clone() for key, value in model.named_buffers()}
    engine.destroy()
    del alive
    trained = [key for key, value in model.named_parameters() if value.requires_grad]
    return Run(losses, norms, start, weights, buffers, trained)


def make_model(architecture: Architecture, source: str, name: str) -> Any:
    """BUILT: an ordinary model; FROM_CONFIG: as by AutoModel.from_config; otherwise loaded from a folder of folders."""
    if source == BUILT:
        return architecture.build()
    model_class = getattr(transformers, architecture.model_class)
    if source == FROM_CONFIG:
        torch.manual_seed(dist.get_rank())  # ranks with different random weights end up with rank 0's model
        return model_class._from_config(architecture.config())
    return model_class.from_pretrained(f"{source}/{name}")


def whole(tensors: dict[str, nn.Parameter], stage: int) -> dict[str, Tensor]:
    """Copies of whole parameters. Collective at stage 3."""
    gathered = deepspeed.zero.GatheredParameters(list(tensors.values())) if stage == 3 else nullcontext()
    with gathered:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def main(words: Sequence[str]) -> None:
    """Trains each of the models; every rank writes its observations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("stage", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--source", default=BUILT)
    options = parser.parse_args(words)
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    for name in options.names:
        run = train_architecture(rank, name, options.stage, options.steps, options.source)
        torch.save(asdict(run), options.out / f"{name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
