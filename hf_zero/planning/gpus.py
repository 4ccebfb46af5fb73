"""The GPUs that plans know, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """Bytes and what is reached per second, of FLOPs in 16 bits and of bytes: about 0.6 and 0.9 of the data sheet."""

    capacity: float
    flops: float
    memory: float
    link: float  # to others in the host
    host_link: float
    host_memory: float = 64e9  # of the hosts that are sold or rented with it, for each GPU


# All words of a name must be words of the driver's name: "NVIDIA A100-SXM4-40GB" is an a100-40, an h1000 is no h100.
GPUS = {
    "b300": Gpu(288e9, 1350e12, 7.2e12, 740e9, 55e9, 256e9),
    "b200": Gpu(180e9, 1350e12, 7.2e12, 740e9, 55e9, 256e9),
    "gh200": Gpu(96e9, 590e12, 3.6e12, 370e9, 400e9, 480e9),
    "h200": Gpu(141e9, 590e12, 4.3e12, 370e9, 55e9, 256e9),
    "h100": Gpu(80e9, 590e12, 3.0e12, 370e9, 55e9, 256e9),
    "h800": Gpu(80e9, 590e12, 3.0e12, 165e9, 55e9, 256e9),
    "h20": Gpu(96e9, 89e12, 3.6e12, 370e9, 55e9, 256e9),
    "a100": Gpu(80e9, 187e12, 1.8e12, 250e9, 25e9, 128e9),
    "a100-40": Gpu(40e9, 187e12, 1.4e12, 250e9, 25e9, 128e9),
    "a800": Gpu(80e9, 187e12, 1.8e12, 165e9, 25e9, 128e9),
    "l40s": Gpu(48e9, 217e12, 0.78e12, 22e9, 25e9, 128e9),
    "l20": Gpu(48e9, 72e12, 0.78e12, 22e9, 25e9, 128e9),
    "l4": Gpu(24e9, 73e12, 0.27e12, 22e9, 25e9),
    "a10": Gpu(24e9, 75e12, 0.54e12, 22e9, 25e9),
    "a10g": Gpu(24e9, 42e12, 0.54e12, 22e9, 25e9),
    "a6000": Gpu(48e9, 93e12, 0.69e12, 22e9, 25e9),
    "5090": Gpu(32e9, 126e12, 1.61e12, 40e9, 50e9),
    "4090": Gpu(24e9, 124e12, 0.9e12, 20e9, 25e9),
    "3090": Gpu(24e9, 53e12, 0.84e12, 20e9, 25e9),
    "v100": Gpu(32e9, 75e12, 0.81e12, 120e9, 12e9),
    "t4": Gpu(16e9, 32e12, 0.29e12, 10e9, 12e9),
    "mi250": Gpu(64e9, 109e12, 1.44e12, 100e9, 25e9, 128e9),  # one of its two dies, each a device of its own
    "mi250x": Gpu(64e9, 115e12, 1.44e12, 100e9, 25e9, 128e9),
    "mi300x": Gpu(192e9, 650e12, 4.8e12, 300e9, 55e9, 256e9),
    "mi325x": Gpu(256e9, 650e12, 5.4e12, 300e9, 55e9, 256e9),
    "mi355x": Gpu(288e9, 1150e12, 7.2e12, 380e9, 55e9, 256e9),
}


def known_gpu(name: str) -> Gpu | None:
    """The one that a driver's or a user's `name` means."""
    words = words_of(name)
    known = [key for key in GPUS if words_of(key) <= words]
    return GPUS[max(known, key=len)] if known else None


def words_of(name: str) -> set[str]:
    return {word.removesuffix("gb") for word in re.split(r"[^a-z0-9]+", name.lower()) if word}
