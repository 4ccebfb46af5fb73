"""Whether what training makes can be saved: asked at the start, not after hours at the first save."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hf_zero.checkpoint import CheckpointError
from hf_zero.comm import Collectives


def check_output_folder(folder: str, collectives: Collectives) -> None:
    """Refuse, on every rank, a folder in which some rank cannot make files. Collective.

    Raises:
        CheckpointError: naming the ranks and what the system says.
    """
    found = collectives.gather_objects(_obstacle(Path(folder)))
    hindered = [(rank, why) for rank, why in enumerate(found) if why]
    if hindered:
        ranks = ", ".join(str(rank) for rank, _ in hindered)
        problem = f"cannot be written to by rank {ranks}: {hindered[0][1]}"
        raise CheckpointError(folder, problem, "give an output_dir that every rank can write to, or save_strategy='no'")


def _obstacle(folder: Path) -> str:
    """Why nothing can be made in a folder that is there or is to be made; "" if it can."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a folder"
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{os.strerror(errno.EACCES)} ({there})"
    return ""
