"""Finds a checkpoint in a folder and lists its state files; only reads `latest` and the manifest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.transaction import files_to_check, holds_states, tag_folders
from hf_zero.errors import CheckpointError

_MAX_TAG_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Folder:
    """One checkpoint: the folder of its tag and the state files in it, by rank.

    `model_files` only has the key 0 if all ranks share one file (stages 0 to 2). With tensor parallelism there is a
    `Folder` for each part, with the files of the ranks that hold this part.
    """

    path: Path
    tag: str
    model_files: dict[int, Path]
    optimizer_files: dict[int, Path]
    model_file_per_rank: bool
    is_universal: bool


def find(directory: str | os.PathLike[str], tag: str | None = None) -> Sequence[Folder]:
    """Find the checkpoint `tag` in `directory` (default: the one that `latest` names), for every tensor rank.

    `directory` may also be the folder of a tag itself.

    Raises:
        CheckpointError: if there is none, or its files are not those of one checkpoint.
    """
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError(root, "is not a folder", "give the folder that holds the checkpoint")
    if tag is None:
        tag = tag_in_latest(root)
    if tag is not None:
        return list_files(root / str(tag), str(tag))
    if holds_states(root):
        return list_files(root, root.resolve().name)
    raise CheckpointError(
        root,
        f"has neither a file {ds.LATEST!r} nor state files of a checkpoint",
        "give the folder that save_checkpoint wrote to, or the tag",
    )


def tag_in_latest(root: Path, *names: str) -> str | None:
    """The tag in `latest`, or in the corresponding file of a universal checkpoint; None without such a file."""
    for name in names or (ds.LATEST, ds.LATEST_UNIVERSAL):
        path = root / name
        if path.is_dir():
            fix = "move it away, and pass the tag; the next save writes the file"
            raise CheckpointError(path, "is a folder, but should be a file with the tag of the newest checkpoint", fix)
        if path.is_file():
            with path.open("rb") as file:
                content = file.read(_MAX_TAG_BYTES + 1)
            return _plain_tag(path, content)
    return None


def _plain_tag(path: Path, content: bytes) -> str:
    fix = "write the name of a checkpoint folder next to this file into it, or pass the tag"
    try:
        tag = content.decode().strip()
    except UnicodeDecodeError:
        raise CheckpointError(path, "is not text", fix) from None
    parts = PurePath(tag).parts
    if not tag or len(content) > _MAX_TAG_BYTES or "\0" in tag or "\n" in tag:
        raise CheckpointError(path, "does not contain the name of a checkpoint", fix)
    if PurePath(tag).is_absolute() or ".." in parts:
        raise CheckpointError(path, f"points outside its folder ({tag!r}); hf_zero does not follow it", fix)
    return tag


def list_files(path: Path, tag: str) -> Sequence[Folder]:
    """List the state files in the folder of one tag, by tensor rank, after checking presence and size of all files in
    its manifest."""
    if not path.is_dir():
        raise CheckpointError(path, f"there is no checkpoint with the tag {tag!r}", _other_tags(path.parent))
    if (path / ds.UNIVERSAL_FOLDER).is_dir():
        return _universal(path, tag)
    files_to_check(path)  # names the missing file; the code below only sees that some are missing
    folders: dict[int, Folder] = {}
    for entry in sorted(path.iterdir()):
        if not entry.name.endswith((ds.MODEL_SUFFIX, ds.OPTIMIZER_SUFFIX)):
            continue
        parsed = ds.parse(entry.name)
        if parsed is None:
            raise CheckpointError(
                entry,
                "is not a file of a ZeRO checkpoint (those of pipelines and of DeepSpeed's expert parallelism are not "
                "supported), or is in the wrong folder",
                "convert the checkpoint with the program that wrote it, or move the stray file away",
            )
        is_shared = parsed.kind == "model" and parsed.rank is None
        folder = folders.setdefault(parsed.mp_rank, Folder(path, tag, {}, {}, True, False))
        if is_shared:
            folders[parsed.mp_rank] = folder = replace(folder, model_file_per_rank=False)
        files = folder.model_files if parsed.kind == "model" else folder.optimizer_files
        rank = parsed.rank or 0
        if rank in files:
            raise CheckpointError(entry, f"belongs to the same rank as {files[rank].name}", "remove the stray file")
        files[rank] = entry
    by_rank = [folders.get(rank, Folder(path, tag, {}, {}, True, False)) for rank in range(max(folders, default=0) + 1)]
    for folder in by_rank:
        _check_ranks(folder)
    return by_rank


def _universal(path: Path, tag: str) -> Sequence[Folder]:
    """Weights and states are whole, but the model files are those of the checkpoint that was converted."""
    files: dict[int, dict[int, Path]] = {}
    per_rank = False
    for entry in sorted(path.iterdir()):
        parsed = ds.parse(entry.name)
        if parsed is not None and parsed.kind == "model":
            files.setdefault(parsed.mp_rank, {})[parsed.rank or 0] = entry
            per_rank |= parsed.rank is not None
    return [Folder(path, tag, files.get(rank, {}), {}, per_rank, True) for rank in range(max(files, default=0) + 1)]


def _check_ranks(folder: Folder) -> None:
    if not folder.model_files:
        raise CheckpointError(
            folder.path, f"has no *{ds.MODEL_SUFFIX} file", "this is not a checkpoint, or its files are lost"
        )
    for files in (folder.model_files, folder.optimizer_files):
        missing = sorted(set(range(max(files, default=-1) + 1)) - set(files))
        if missing:
            raise CheckpointError(
                folder.path,
                f"has {next(iter(files.values())).name}, but the state file of rank {missing[0]} is missing",
                "restore it from a copy, or load an older checkpoint; with use_node_local_storage collect the files of "
                "all nodes in one folder",
            )
    num_model, num_optimizer = len(folder.model_files), len(folder.optimizer_files)
    # A model without an optimizer has no optimizer files; the model files say whether this is one.
    if folder.model_file_per_rank and num_optimizer and num_model != num_optimizer:
        raise CheckpointError(
            folder.path,
            f"has {num_model} model files and {num_optimizer} optimizer files; stage 3 writes one of each per rank",
            "restore the missing files from a copy, or load an older checkpoint",
        )


def _other_tags(root: Path) -> str:
    if not root.is_dir():
        return ""
    tags = [folder.name for folder in tag_folders(root)]
    return f"tags here: {', '.join(tags)}" if tags else "no other tag is here either"
