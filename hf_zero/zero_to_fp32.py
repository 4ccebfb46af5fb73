"""`python -m hf_zero.zero_to_fp32 CHECKPOINT_DIR OUTPUT` writes consolidated weights from a sharded checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.quantities import parse_all

if TYPE_CHECKING:
    from rich.console import Console

    from hf_zero.checkpoint import CheckpointView
    from hf_zero.checkpoint.consolidate import Target, Weights

_OUTPUT = (
    "OUTPUT ending in .bin or .pt is one torch file, in .safetensors one safetensors file; anything else is a folder "
    "with shards and an index, as from_pretrained reads it"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse_all(_parser(), sys.argv[1:] if arguments is None else arguments)
    from rich.console import Console  # after parsing arguments, because importing torch takes seconds

    from hf_zero.checkpoint import CheckpointError, open_checkpoint
    from hf_zero.checkpoint.consolidate import DTYPES, target_for, weights_of
    from hf_zero.checkpoint.transaction import check_folder

    say = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    try:
        view = open_checkpoint(options.checkpoint_dir, options.tag)
        if options.verify:
            check_folder(view.folder.path)
        target = target_for(view, Path(options.output), options.safetensors, options.max_shard_size)
        weights = weights_of(view, dtype=DTYPES[options.dtype], exclude_frozen=options.exclude_frozen)
        _announce(say, view, weights, options)
        written = _write_with_progress(weights, target)
        num_bytes = sum(path.stat().st_size for path in written)
        files = f"{written[0]}" if len(written) == 1 else f"{len(written)} files in {options.output}"
        say.print(f"Wrote {files} ({f'{num_bytes / 1e9:.2f} GB' if num_bytes >= 1e7 else f'{num_bytes:,} bytes'})")
    except (CheckpointError, ValueError, OSError, TypeError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(f"zero_to_fp32: {error}")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hf_zero.zero_to_fp32", description=__doc__, epilog=_OUTPUT)
    parser.add_argument("checkpoint_dir", help="the folder that holds the checkpoint, such as output/checkpoint-100")
    parser.add_argument("output", metavar="OUTPUT", help="file or folder to write")
    parser.add_argument("-t", "--tag", help="which checkpoint in the folder; default: the one that `latest` names")
    # DeepSpeed's script spells them with underscores.
    parser.add_argument("--safetensors", "--safe_serialization", action="store_true", help="shards as safetensors")
    parser.add_argument("--max-shard-size", "--max_shard_size", default="5GB", help="of a folder's shards (5GB)")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of floating tensors (fp32)")
    parser.add_argument(
        "--exclude-frozen", "--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out"
    )
    parser.add_argument("--verify", action="store_true", help="check the checksums of all files first")
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    return parser


def _announce(say: Console, view: CheckpointView, weights: Weights, options: argparse.Namespace) -> None:
    from hf_zero.checkpoint.view import MASTER

    say.print(f"Processing zero checkpoint at {view.folder.tag}")
    say.print(f"Detected checkpoint of type zero stage {view.stage}, world_size: {view.world}")
    if MASTER not in view.elements or not view.shapes:
        say.print("It holds no fp32 master weights with names; the model's own weights are written")
    say.print(f"Saving {options.dtype} state dict to {options.output} (total_numel={weights.num_parameters})")


def _write_with_progress(weights: Weights, target: Target) -> list[Path]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from hf_zero.checkpoint.consolidate import write_weights

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    screen = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=screen, transient=True, disable=not screen.is_terminal
    ) as progress:
        task = progress.add_task("writing", total=weights.num_bytes)
        return list(write_weights(weights, target, lambda num_bytes: progress.advance(task, num_bytes)))


if __name__ == "__main__":
    sys.exit(main())
