"""A UNet learns to denoise images, in a typical training loop of diffusers' users with Accelerate.

Only the saving at the end mentions an engine: at stage 3 it gathers the whole weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from deepspeed.zero import GatheredParameters
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

SIZE, IMAGES, BATCH, ACCUMULATION = 16, 32, 2, 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--adam_epsilon", type=float, required=True)
    parser.add_argument("--max_grad_norm", type=float, required=True)
    parser.add_argument("--resume_from_checkpoint", type=Path, default=None)
    return parser.parse_args()


def new_unet() -> UNet2DModel:
    """About 140 thousand parameters, with attention below the first resolution."""
    return UNet2DModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(12, 24),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=3,
    )


def images() -> list[torch.Tensor]:
    """Stripes of various widths and directions, from -1 to 1."""
    line = torch.linspace(-3, 3, SIZE)
    return [
        torch.sin((1 + number % 5) * line[:, None] + (number % 3 - 1) * line[None, :] + number).unsqueeze(0)
        for number in range(IMAGES)
    ]


def save_ema_beside_the_state(accelerator: Accelerator, ema: Any) -> None:
    """Includes the averaged weights in `save_state` and `load_state`."""

    def save(models: list[torch.nn.Module], weights: list[object], folder: str) -> None:
        if accelerator.is_main_process:
            ema.save_pretrained(f"{folder}/unet_ema")

    def load(models: list[torch.nn.Module], folder: str) -> None:
        ema.load_state_dict(type(ema).from_pretrained(f"{folder}/unet_ema", UNet2DModel).state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def main() -> None:
    args = parse()
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # the checkpoint contains its state
    )
    # Its module checks at import whether stage 3 is enabled; imported earlier, `ema.step` fails there.
    from diffusers.training_utils import EMAModel

    set_seed(3)
    unet = new_unet()
    ema = EMAModel(unet.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=unet.config)
    save_ema_beside_the_state(accelerator, ema)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-3, eps=args.adam_epsilon)
    loader = DataLoader(images(), batch_size=BATCH, shuffle=True)
    updates = args.epochs * len(loader) // ACCUMULATION  # of one process; each update advances the schedule by all
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=updates)
    unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)
    ema.to(accelerator.device)

    set_seed(5, device_specific=True)  # the ranks draw different noise
    updates_per_epoch = len(loader) // ACCUMULATION
    step = 0
    if args.resume_from_checkpoint is not None:
        accelerator.load_state(str(args.resume_from_checkpoint))
        step = int(args.resume_from_checkpoint.name.split("-")[1])
    numbers: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
    for epoch in range(step // updates_per_epoch, args.epochs):
        loader.set_epoch(epoch)  # otherwise a resumed run shuffles as in the first epoch
        unet.train()
        summed = 0.0
        for clean in loader:
            noise = torch.randn_like(clean)
            times = torch.randint(noise_scheduler.config.num_train_timesteps, (len(clean),), device=clean.device)
            with accelerator.accumulate(unet):
                loss = mse_loss(unet(noise_scheduler.add_noise(clean, noise, times), times).sample, noise)
                summed += accelerator.gather(loss.detach()).mean().item() / ACCUMULATION
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(unet.parameters())
                step += 1
                for key, value in (("losses", summed), ("norms", norm), ("rates", schedule.get_last_lr()[0])):
                    numbers[key].append(float(value))
                summed = 0.0
                if step % updates_per_epoch == 0:
                    accelerator.save_state(str(args.output_dir / f"checkpoint-{step}"))

    accelerator.wait_for_everyone()
    unet = accelerator.unwrap_model(unet)
    with GatheredParameters(list(unet.parameters())):
        if accelerator.is_main_process:
            unet.save_pretrained(args.output_dir / "unet")
    if accelerator.is_main_process:
        ema.save_pretrained(args.output_dir / "unet_ema")
        (args.output_dir / "numbers.json").write_text(json.dumps(numbers))
    accelerator.end_training()


if __name__ == "__main__":
    main()
