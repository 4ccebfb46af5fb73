"""The list of a checkpoint's files with sizes and checksums, and the check of a folder against it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.files import crc
from hf_zero.checkpoint.files.stream import NUM_THREADS, Written, write_small
from hf_zero.checkpoint.files.torch_reader import check_records
from hf_zero.errors import CheckpointError

_RESTORE = "restore it from a copy, or load an older checkpoint"
MAX_BYTES = 64 << 20  # 100,000 ranks would take 20 MB
_PART_BYTES = 64 << 20
_READ_BYTES = 4 << 20  # read again and again into the same memory


def write_manifest(folder: Path, files: Iterable[Written]) -> None:
    """Put the list into `folder`, fsynced."""
    body = {
        "format": 1,
        "files": {file.name: {"bytes": file.num_bytes, "crc32": file.crc32} for file in sorted(files, key=_by_name)},
    }
    write_small(folder / ds.MANIFEST, (json.dumps({**body, "crc32": _seal(body)}, indent=1) + "\n").encode())


def read_manifest(folder: Path) -> dict[str, Written] | None:
    """The files that belong to `folder`; None when it has no list (DeepSpeed writes none).

    Raises:
        CheckpointError: when the list itself is damaged.
    """
    path = folder / ds.MANIFEST
    if not path.exists():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError(path, f"takes {path.stat().st_size} bytes, far more than a list of files", _RESTORE)
    try:
        stated: Any = json.loads(path.read_bytes())
        seal = stated.pop("crc32")
        files = {
            str(name): Written(str(name), int(entry["bytes"]), int(entry["crc32"]))
            for name, entry in stated["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(path, f"is damaged ({type(error).__name__})", _RESTORE) from error
    if seal != _seal(stated):
        raise CheckpointError(path, "is damaged: it differs from its own checksum", _RESTORE)
    for name in files:
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointError(path, f"lists {name!r}, which is not a file of this folder", _RESTORE)
    return files


def files_to_check(folder: Path) -> list[Written | Path]:
    """Everything in `folder` whose content can be checked, after the cheap checks: presence, size, nothing foreign.

    Raises:
        CheckpointError: naming the file that is missing, of another size, or not part of the checkpoint.
    """
    listed = read_manifest(folder)
    present = {entry.name for entry in folder.iterdir() if entry.name.endswith((ds.MODEL_SUFFIX, ds.OPTIMIZER_SUFFIX))}
    if listed is None:
        return [folder / name for name in sorted(present)]
    for name, file in listed.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(path, "this file of the checkpoint is missing", _RESTORE)
        size = path.stat().st_size
        if size != file.num_bytes:
            kind = "truncated" if size < file.num_bytes else "not the one that was written"
            raise CheckpointError(path, f"is {kind}: {size} bytes instead of {file.num_bytes}", _RESTORE)
    foreign = sorted(present - set(listed))
    if foreign:
        raise CheckpointError(folder / foreign[0], "does not belong to this checkpoint", "move it out of the folder")
    return list(listed.values())


def check_content(folder: Path, file: Written | Path) -> None:
    """Raise CheckpointError unless the bytes are those that were written."""
    if isinstance(file, Path):
        check_records(file)
    elif checksum_of(folder / file.name) != file.crc32:
        raise CheckpointError(folder / file.name, "differs from its checksum: the file is damaged", _RESTORE)


def check_folder(folder: Path) -> None:
    """Check every file of one checkpoint, in this process alone."""
    for file in files_to_check(folder):
        check_content(folder, file)


def checksum_of(path: Path) -> int:
    """CRC-32 of a whole file, read in a few parts at once."""
    size = path.stat().st_size
    starts = range(0, size, _PART_BYTES)
    with path.open("rb") as file, ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hf_zero_check") as pool:
        lengths = [min(_PART_BYTES, size - start) for start in starts]
        parts = list(pool.map(lambda place: _checksum_at(file.fileno(), *place), zip(starts, lengths, strict=True)))
    total = 0
    for part, length in zip(parts, lengths, strict=True):
        total = crc.combine(total, part, length)
    return total


def _checksum_at(file: int, start: int, length: int) -> int:
    checksum, stop = 0, start + length
    buffer = memoryview(bytearray(min(_READ_BYTES, length)))
    while start < stop:
        count = os.preadv(file, [buffer[: stop - start]], start)
        if not count:
            return checksum ^ 1  # shorter than it was a moment ago
        checksum = crc.checksum(buffer[:count], checksum)
        start += count
    return checksum


def intact_alternatives(root: Path, broken: str, also: Sequence[Path] = ()) -> list[Path]:
    """Other checkpoints that are whole, newest first, at most one of them: finding out reads it completely."""
    folders = [entry for place in (root, *also) if place.is_dir() for entry in place.iterdir() if entry.is_dir()]
    candidates = [
        folder
        for folder in folders
        if folder.name != broken and not folder.name.startswith(".") and any(ds.parse(p.name) for p in folder.iterdir())
    ]
    for folder in sorted(candidates, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            check_folder(folder)
        except (CheckpointError, OSError):
            continue
        return [folder]
    return []


def _seal(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _by_name(file: Written) -> str:
    return file.name
