"""`open_checkpoint`: a folder in, a view out, whoever wrote it and at whatever stage."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hf_zero.checkpoint.deepspeed.folder import Folder, find
from hf_zero.checkpoint.deepspeed.read_sharded import read_sharded
from hf_zero.checkpoint.deepspeed.read_whole import Shapes, read_stage_0, read_universal
from hf_zero.checkpoint.view import CheckpointView


def open_checkpoint(
    directory: str | os.PathLike[str], tag: str | None = None, groups: Sequence[Shapes] | None = None
) -> CheckpointView:
    """The checkpoint `tag` in `directory` (default: the latest), as plain intervals of mapped files.

    Args:
        groups: names and shapes of the optimizer groups that the caller expects; needed for the optimizer state of a
            stage 0 checkpoint of DeepSpeed, which has no names.

    Presence and sizes of all files are checked, not their checksums: that would read everything.

    Raises:
        CheckpointError: naming the file that is missing, damaged, foreign or not part of one checkpoint.
    """
    return view_of(find(directory, tag), groups)


def view_of(folder: Folder, groups: Sequence[Shapes] | None = None) -> CheckpointView:
    """The view of files that have been found already."""
    if folder.is_universal:
        return read_universal(folder, groups)
    if not folder.optimizer_files and not folder.model_file_per_rank:
        return read_stage_0(folder, groups)
    return read_sharded(folder)
