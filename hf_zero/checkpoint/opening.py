"""`open_checkpoint` returns a view of a checkpoint folder of any writer and stage; checks that ranks make together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_zero.checkpoint.deepspeed.folder import Folder, find
from hf_zero.checkpoint.deepspeed.keys import UNIVERSAL_FOLDER
from hf_zero.checkpoint.deepspeed.read import Shapes, read_sharded, read_stage_0, read_universal
from hf_zero.checkpoint.files.stream import Written
from hf_zero.checkpoint.tensor_ranks import in_parts, joined, saved_cuts
from hf_zero.checkpoint.transaction import check_content, files_to_check, intact_alternatives
from hf_zero.checkpoint.view import CheckpointView
from hf_zero.comm import Collectives
from hf_zero.errors import CheckpointError
from hf_zero.layout.cuts import Cut

T = TypeVar("T")


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
    folders = find(directory, tag)
    if len(folders) == 1:
        return view_of(folders[0], groups)
    return joined([view_of(folder) for folder in folders], with_optimizer=False)


def view_of_part(
    folders: Sequence[Folder],
    groups: Sequence[Shapes] | None,
    cuts: Mapping[str, Cut],
    part: tuple[int, int],
    *,
    with_optimizer: bool = True,
) -> CheckpointView:
    """This tensor rank's part of a checkpoint, however many ranks per tensor group have written it.

    Args:
        folders: as `find` returns them.
        groups: as for `open_checkpoint`, with the shapes of this rank's parts.
        cuts: how the model's parameters are cut; empty without tensor parallelism.
        part: which parts of the weights this rank holds, and how many ranks hold all of them.

    Raises:
        CheckpointError: it cannot be put together, or is of another model.
    """
    rank, size = part
    if len(folders) == size:
        view = view_of(folders[rank], groups)
        if size == 1 or saved_cuts(view) in (None, cuts):
            return view
    shapes = groups and [{name: cuts[name].shape if name in cuts else s for name, s in g.items()} for g in groups]
    views = [view_of(folder, shapes if len(folders) == 1 else None) for folder in folders]
    whole = views[0] if len(views) == 1 else joined(views, with_optimizer=with_optimizer)
    return in_parts(whole, cuts, rank, with_optimizer=with_optimizer) if cuts else whole


def view_of(folder: Folder, groups: Sequence[Shapes] | None = None) -> CheckpointView:
    """The view of files that have been found already."""
    if folder.is_universal:
        return read_universal(folder)
    if not folder.optimizer_files and not folder.model_file_per_rank:
        return read_stage_0(folder, groups)
    return read_sharded(folder)


def together(act: Callable[[], T], collectives: Collectives) -> T:
    """Run `act` on every rank; when it fails on one, all raise that rank's error. Collective."""
    error: Exception | None = None
    result: Any = None
    try:
        result = act()
    except (CheckpointError, RuntimeError, OSError, ValueError) as caught:
        error = caught
    for rank, theirs in enumerate(collectives.gather_objects(None if error is None else _portable(error))):
        if isinstance(theirs, Exception):
            raise error if error is not None and rank == collectives.rank else theirs
    return result  # type: ignore[no-any-return]


def check_together(folder: Folder, collectives: Collectives) -> None:
    """Every file present, of the right size and content, and nothing foreign. Collective.

    Universal checkpoints have no list of their files: each is checked against the checksums in it, and reading finds
    out what is missing.
    """
    files = together(lambda: _files(folder), collectives)

    def check_mine() -> None:
        for file in files[collectives.rank :: collectives.size]:
            check_content(folder.path, file)

    together(check_mine, collectives)


def _files(folder: Folder) -> Sequence[Written | Path]:
    if not folder.is_universal:
        return files_to_check(folder.path)
    return [*folder.model_files.values(), *sorted((folder.path / UNIVERSAL_FOLDER).glob("**/*.pt"))]


def name_alternative(error: CheckpointError, root: Path, tag: str, collectives: Collectives) -> CheckpointError:
    """The same error with an intact older checkpoint to turn to, if there is one. Collective."""
    alternatives = None
    if collectives.rank == 0:
        # Trainer keeps every checkpoint in a folder of its own: look beside this one, too.
        siblings = [path for path in root.resolve().parent.glob("checkpoint-*") if path.resolve() != root.resolve()]
        alternatives = intact_alternatives(root, tag, siblings)
    everybodys = collectives.gather_objects(alternatives)[0]
    if not isinstance(everybodys, list) or not everybodys:
        return error
    return CheckpointError(error.path, error.problem, f"{error.fix}. Intact: {everybodys[0]}")


def _portable(error: Exception) -> Exception:
    """An error that can travel to other ranks."""
    return error if isinstance(error, CheckpointError) else RuntimeError(f"{type(error).__name__}: {error}")
