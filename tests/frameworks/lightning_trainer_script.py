"""A LightningModule with Trainer: fit, checkpoint, resume, test. Started by test_lightning.py on every rank."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from lightning_material import (
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

ACCUMULATE = 2


class Module(pl.LightningModule):
    """`divisor`: Trainer divides the loss by ACCUMULATE even if its strategy also does, so DeepSpeed's norm is half of
    DDP's, and the reference has to divide once more."""

    def __init__(self, divisor: int) -> None:
        super().__init__()
        self.divisor = divisor
        self.losses: list[float] = []
        self.tested: list[float] = []

    def configure_model(self) -> None:
        """At stage 3 Lightning calls this inside deepspeed.zero.Init."""
        if not hasattr(self, "model"):
            torch.manual_seed(3)
            self.model = Model()

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = self.model.loss(batch[0])
        self.losses.append(float(loss.detach()))
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss / self.divisor

    def test_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.tested.append(float(self.model.loss(batch[0])))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, eps=EPS)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def ranks_for(stage: int | None) -> dict[str, Any]:
    if stage is None:
        return {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    strategy = DeepSpeedStrategy(stage=stage)
    strategy.config["zero_optimization"].update(NOTHING_RESIDENT)
    return {"accelerator": on_cpu(CUDAAccelerator), "strategy": strategy, **one_rank_per_node()}


def main() -> None:
    arguments = parse()
    folder = arguments.output
    trainer = pl.Trainer(
        **ranks_for(arguments.stage),
        max_steps=arguments.steps,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=arguments.steps // 2, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(ACCUMULATE if arguments.stage is None else 1)
    trainer.fit(module, loader(), ckpt_path=arguments.resume)
    trainer.test(module, loader(), verbose=False)
    torch.save({"losses": module.losses, "tested": module.tested}, folder / f"rank{trainer.global_rank}.pt")
    if trainer.is_global_zero and arguments.stage is not None:
        convert_zero_checkpoint_to_fp32_state_dict(folder / f"step={arguments.steps}.ckpt", folder / "whole.pt")


if __name__ == "__main__":
    main()
