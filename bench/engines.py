"""One training step in each engine, set up as its users would: bf16, AdamW, clipping at 1.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0

Step = Callable[[torch.Tensor], torch.Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def ds_config(
    stage: int, micro_batch: int, adam: str, *, released: bool = False, precision: str = "bf16"
) -> dict[str, object]:
    """The ds.json for hf_zero and DeepSpeed; with `released`, stage 3 keeps no unit gathered for its backward."""
    zero: dict[str, object] = {"stage": stage}
    if released:
        zero["stage3_max_reuse_distance"] = 0
    parameters: dict[str, object] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    if adam == "torch":
        parameters["torch_adam"] = True
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP_NORM,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": parameters},
        "steps_per_print": 1_000_000,
    }


def build_ds_step(model: nn.Module, config: dict[str, object]) -> Step:
    """hf_zero or DeepSpeed, whichever is imported as `deepspeed`."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine_step(engine)


def engine_step(engine: Any) -> Step:
    """Forward, backward and update of an engine of hf_zero or DeepSpeed."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def build_ddp_step(model: nn.Module) -> Step:
    """Trainer without a ZeRO engine: fp32 weights, autocast, torch's fused AdamW."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
    return _autocast_step(wrapped, autocast=True)


def build_fsdp2_step(
    model: nn.Module, reshard: bool, shard_size: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Step:
    """fully_shard per block; `reshard` frees whole parameters between forward and backward. A `shard_size` smaller
    than the number of ranks makes it HSDP: sharded within groups, replicated across them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    if shard_size is None:
        mesh = init_device_mesh("cpu", (world,))
    else:
        mesh = init_device_mesh("cpu", (world // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return _autocast_step(model, autocast=False)


def build_compute_step(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Step:
    """Forward and backward in one precision, without optimizer and communication: the time that no engine can avoid."""
    model.to(dtype)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def _autocast_step(model: nn.Module, autocast: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
