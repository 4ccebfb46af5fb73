"""`open_checkpoint` returns a view of a checkpoint of any writer and stage; and collective checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_zero.checkpoint.deepspeed.folder import Folder, find
from hf_zero.checkpoint.deepspeed.keys import MODEL_SUFFIX, UNIVERSAL_FOLDER
from hf_zero.checkpoint.deepspeed.read import Shapes, read_sharded, read_stage_0, read_universal
from hf_zero.checkpoint.deepspeed.tensor_parts import SavedParts
from hf_zero.checkpoint.files.stream import Written
from hf_zero.checkpoint.tensor_ranks import in_parts, joined, saved_parts_of
from hf_zero.checkpoint.transaction import check_content, files_to_check, intact_alternatives
from hf_zero.checkpoint.view import CheckpointView
from hf_zero.comm import Collectives
from hf_zero.errors import CheckpointError
from hf_zero.layout.cuts import Cut

T = TypeVar("T")


def open_checkpoint(
    directory: str | os.PathLike[str], tag: str | None = None, *, with_optimizer: bool = False
) -> CheckpointView:
    """Open the checkpoint `tag` in `directory` (default: the latest) as intervals of mapped files.

    Checks presence and sizes of all files, but not checksums, which would read everything.

    Args:
        with_optimizer: whether optimizer states are needed, too, of a checkpoint in parts of tensor ranks.

    Raises:
        CheckpointError: names the file that is missing, damaged, foreign or from another checkpoint, or says why parts
            cannot be joined.
    """
    views = [view_of(folder) for folder in find(directory, tag)]
    return views[0] if len(views) == 1 else joined(views, with_optimizer=with_optimizer)


def view_of_part(
    folders: Sequence[Folder],
    groups: Sequence[Shapes] | None,
    cuts: Mapping[str, Cut],
    part: tuple[int, int],
    *,
    with_optimizer: bool = True,
) -> CheckpointView:
    """This tensor rank's part of a checkpoint written with any number of ranks per tensor group.

    Args:
        folders: the result of `find`.
        groups: names and shapes of the expected optimizer groups, with the shapes of this rank's parts; needed for the
            optimizer state of a stage 0 checkpoint of DeepSpeed, which has no names.
        cuts: how the parameters are split of which files have parts; empty without tensor parallelism.
        part: (index of this rank's parts of the weights, number of ranks that hold all parts).

    Raises:
        CheckpointError: if it cannot be assembled, or belongs to another model.
    """
    rank, size = part
    if len(folders) == size and not (size > 1 and folders[0].is_universal):
        view = view_of(folders[rank], groups)
        if size == 1 or (saved := saved_parts_of(view)) is None or saved == SavedParts(cuts):
            return view
    shapes = groups and [{name: cuts[name].shape if name in cuts else s for name, s in g.items()} for g in groups]
    views = [view_of(folder, shapes if len(folders) == 1 else None) for folder in folders]
    whole = views[0] if len(views) == 1 else joined(views, with_optimizer=with_optimizer)
    return in_parts(whole, cuts, rank, with_optimizer=with_optimizer) if cuts else whole


def view_of(folder: Folder, groups: Sequence[Shapes] | None = None) -> CheckpointView:
    """The view of files that have already been found."""
    if folder.is_universal:
        return read_universal(folder)
    if not folder.optimizer_files and not folder.model_file_per_rank:
        return read_stage_0(folder, groups)
    return read_sharded(folder)


def together(act: Callable[[], T], collectives: Collectives) -> T:
    """Run `act` on every rank; if it fails on one, all raise that rank's error. Collective."""
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
    """Check that every file is present with the right size and content, and no file is foreign. Collective.

    Universal checkpoints have no manifest: each file is checked against the checksums in it, and reading detects
    missing files.
    """
    files = together(lambda: _files(folder), collectives)

    def check_mine() -> None:
        for file in files[collectives.rank :: collectives.size]:
            check_content(folder.path, file)

    together(check_mine, collectives)


def _files(folder: Folder) -> Sequence[Written | Path]:
    if not folder.is_universal:
        return files_to_check(folder.path)
    models = sorted(folder.path.glob(f"*{MODEL_SUFFIX}"))  # of all tensor ranks
    return [*models, *sorted((folder.path / UNIVERSAL_FOLDER).glob("**/*.pt"))]


def name_alternative(error: CheckpointError, root: Path, tag: str, collectives: Collectives) -> CheckpointError:
    """The error with the name of an intact older checkpoint, if there is one. Collective."""
    alternatives = None
    if collectives.rank == 0:
        # Trainer keeps every checkpoint in a separate folder: also search the folders next to this one.
        siblings = [path for path in root.resolve().parent.glob("checkpoint-*") if path.resolve() != root.resolve()]
        alternatives = intact_alternatives(root, tag, siblings)
    everybodys = collectives.gather_objects(alternatives)[0]
    if not isinstance(everybodys, list) or not everybodys:
        return error
    return CheckpointError(error.path, error.problem, f"{error.fix}. Intact: {everybodys[0]}")


def _portable(error: Exception) -> Exception:
    """An error that can be sent to other ranks."""
    return error if isinstance(error, CheckpointError) else RuntimeError(f"{type(error).__name__}: {error}")
