"""`python -m hf_zero.ds_to_universal --input_folder TAG --output_folder FOLDER` writes a universal checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_zero.quantities import parse_all

_WITHOUT_EFFECT = "accepted, and not needed here"


def main(arguments: argparse.Namespace | Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: words or the result of `parse_arguments`; default: the command line.
    """
    options = arguments if isinstance(arguments, argparse.Namespace) else parse_arguments(arguments)
    from rich.console import Console  # after parsing arguments, because importing torch takes seconds

    from hf_zero.checkpoint import CheckpointError, open_checkpoint
    from hf_zero.checkpoint.deepspeed.universal import convert_to_universal
    from hf_zero.log import tracked

    source, target = Path(options.input_folder), Path(options.output_folder).resolve()
    try:
        names = list(open_checkpoint(source).shapes)
        steps = iter(tracked(names, "converting"))
        convert_to_universal(source, target, lambda _name: next(steps, None))
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(f"ds_to_universal: {error}")
        return 1
    say = Console(highlight=False, soft_wrap=True, markup=False)
    say.print(f"Converted {len(names)} parameters of {source} to {target}")
    say.print('Load it with "checkpoint": {"load_universal": true} from the folder around it')
    return 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hf_zero.ds_to_universal", description=__doc__)
    parser.add_argument("--input_folder", required=True, help="folder of a tag, such as output/global_step100")
    parser.add_argument("--output_folder", required=True, help="folder to write; the file latest_universal goes beside")
    for flag in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(flag, type=int, default=1, help=_WITHOUT_EFFECT)
    parser.add_argument("--keep_temp_folder", action="store_true", help=_WITHOUT_EFFECT)
    parser.add_argument("--no_strict", dest="strict", action="store_false", help=_WITHOUT_EFFECT)
    parser.add_argument("--inject_missing_state", action="store_true", help=_WITHOUT_EFFECT)
    return parse_all(parser, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
