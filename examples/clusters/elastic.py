"""Elastic training: any number of ranks, the same global batch, resumed from the last checkpoint.

torchrun restarts the ranks whenever a machine is lost or joins. At each start this script divides the global batch
among the current ranks, so that the losses match those of an uninterrupted run. Run this on each of two to four
machines, where `head` is a host that all of them reach:

    torchrun --nnodes 2:4 --nproc-per-node 8 --max-restarts 20 --rdzv-backend c10d --rdzv-endpoint head:29400 \\
        examples/clusters/elastic.py --global_batch_size 192 --per_device_train_batch_size 4 \\
        --deepspeed configs/zero3.json --output_dir /shared/run --do_train --bf16 --save_strategy steps --save_steps 100

`--per_device_train_batch_size` is the largest that fits on a device. All other arguments are those of train_clm.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_clm  # noqa: E402 (examples/ is not a package)


def share(global_batch: int, most_per_rank: int, world_size: int) -> tuple[int, int]:
    """Returns the micro-batch size and the gradient accumulation steps of every rank.

    Raises:
        ValueError: if the ranks cannot divide the batch evenly.
    """
    per_rank, left = divmod(global_batch, world_size)
    if left:
        raise ValueError(
            f"--global_batch_size {global_batch} cannot be shared among {world_size} ranks: choose one that is "
            "divisible by every world size that the job may have, such as 192 for 8, 16, 24 and 32"
        )
    micro_batch = max(size for size in range(1, min(most_per_rank, per_rank) + 1) if per_rank % size == 0)
    return micro_batch, per_rank // micro_batch


def arguments_of_this_start(words: list[str], world_size: int) -> list[str]:
    """Arguments of train_clm.py for this world size."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--global_batch_size", type=int, required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    own, others = parser.parse_known_args(words)
    micro_batch, accumulation = share(own.global_batch_size, own.per_device_train_batch_size, world_size)
    batch = ["--per_device_train_batch_size", str(micro_batch), "--gradient_accumulation_steps", str(accumulation)]
    return ["--resume_from_checkpoint", "last", *batch, *others]


if __name__ == "__main__":
    train_clm.main(arguments_of_this_start(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1"))))
