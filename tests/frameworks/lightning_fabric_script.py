"""A Fabric loop: trains, saves, and resumes from another run. Started by test_lightning.py on every rank."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from lightning_material import (
    BATCH,
    CLIP,
    EPS,
    LEARNING_RATE,
    NOTHING_RESIDENT,
    Model,
    loader,
    on_cpu,
    one_rank_per_node,
    parse,
)


def fabric_for(stage: int | None) -> Fabric:
    if stage is None:
        return Fabric(accelerator="cpu", devices=2, strategy="ddp")
    strategy = DeepSpeedStrategy(stage=stage, logging_batch_size_per_gpu=BATCH)
    strategy.config["gradient_clipping"] = CLIP
    strategy.config["zero_optimization"].update(NOTHING_RESIDENT)
    return Fabric(accelerator=on_cpu(CUDAAccelerator), strategy=strategy, **one_rank_per_node())


def main() -> None:
    arguments = parse()
    fabric = fabric_for(arguments.stage)
    fabric.launch()
    fabric.seed_everything(3)
    with fabric.init_module():
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    model, optimizer = fabric.setup(model, optimizer)
    model.mark_forward_method("loss")
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if arguments.resume is not None:
        fabric.load(arguments.resume, state)
    losses = []
    for number, (tokens,) in enumerate(fabric.setup_dataloaders(loader())):
        if not state["step"] <= number < arguments.steps:
            continue
        loss = model.loss(tokens)
        fabric.backward(loss)
        if arguments.stage is None:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
        state["step"] = number + 1
        if state["step"] in (arguments.steps // 2, arguments.steps):
            fabric.save(arguments.output / f"step{state['step']}", state)
    if fabric.is_global_zero:
        torch.save(losses, arguments.output / "losses.pt")
        if arguments.stage is not None:
            convert_zero_checkpoint_to_fp32_state_dict(
                arguments.output / f"step{arguments.steps}", arguments.output / "whole.pt"
            )


if __name__ == "__main__":
    main()
