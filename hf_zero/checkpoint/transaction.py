"""Writes a checkpoint atomically: write to a temporary folder, fsync, rename, and update `latest` last.

    1  the leader creates  root/.TAG.RANDOM.partial                           all ranks receive its name
    2  every rank writes its files there, fsynced                             all ranks report files or an error
    3  the leader adds the manifest, renames the folder to root/TAG
    4  the leader replaces  root/latest                                       all ranks learn that it is done

After a kill at any moment `latest` names a complete folder, and at most one folder that starts with a dot is left over.
Whether the output folder is writable is checked at the start, not after hours (`check_output_folder`).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.files import crc
from hf_zero.checkpoint.files.stream import NUM_THREADS, Arriving, Written, sync_folder, write_records, write_small
from hf_zero.checkpoint.files.torch_file import (
    RESTORE,
    WriteRecords,
    check_records,
    write_torch_file,
    write_torch_file_as_it_comes,
)
from hf_zero.comm import Collectives
from hf_zero.errors import CheckpointError
from hf_zero.log import logger
from hf_zero.staging import PARTIAL, StagingFolder, alone_in

# The list of a checkpoint's files with sizes and checksums, and the check of a folder against it.


MAX_BYTES = 64 << 20  # 100,000 ranks would take 20 MB
_PART_BYTES = 64 << 20
_READ_BYTES = 4 << 20  # size of the reused read buffer


def write_manifest(folder: Path, files: Iterable[Written]) -> None:
    """Write the manifest into `folder` and fsync it."""
    in_order = sorted(files, key=attrgetter("name"))
    body = {"format": 1, "files": {file.name: {"bytes": file.num_bytes, "crc32": file.crc32} for file in in_order}}
    write_small(folder / ds.MANIFEST, (json.dumps({**body, "crc32": _seal(body)}, indent=1) + "\n").encode())


def read_manifest(folder: Path) -> dict[str, Written] | None:
    """The files in the manifest of `folder`; None if it has none (DeepSpeed writes none).

    Raises:
        CheckpointError: if the manifest itself is damaged.
    """
    path = folder / ds.MANIFEST
    if not path.exists():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError(path, f"has {path.stat().st_size} bytes, far more than a list of files", RESTORE)
    try:
        stated: Any = json.loads(path.read_bytes())
        seal = stated.pop("crc32")
        files = {
            str(name): Written(str(name), int(entry["bytes"]), int(entry["crc32"]))
            for name, entry in stated["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(path, f"is damaged ({type(error).__name__})", RESTORE) from error
    if seal != _seal(stated):
        raise CheckpointError(path, "is damaged: it differs from its own checksum", RESTORE)
    for name in files:
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointError(path, f"lists {name!r}, which is not a file of this folder", RESTORE)
    return files


def files_to_check(folder: Path) -> list[Written | Path]:
    """Check presence and sizes, reject foreign files, and return the files whose content can be checked.

    Raises:
        CheckpointError: names the file that is missing, has another size, or is not part of the checkpoint.
    """
    listed = read_manifest(folder)
    present = {entry.name for entry in folder.iterdir() if entry.name.endswith((ds.MODEL_SUFFIX, ds.OPTIMIZER_SUFFIX))}
    if listed is None:
        return [folder / name for name in sorted(present)]
    for name, file in listed.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(path, "this file of the checkpoint is missing", RESTORE)
        size = path.stat().st_size
        if size != file.num_bytes:
            kind = "truncated" if size < file.num_bytes else "not the file that was written"
            raise CheckpointError(path, f"is {kind}: {size} bytes instead of {file.num_bytes}", RESTORE)
    foreign = sorted(present - set(listed))
    if foreign:
        raise CheckpointError(folder / foreign[0], "does not belong to this checkpoint", "move it out of the folder")
    return list(listed.values())


def check_content(folder: Path, file: Written | Path) -> None:
    """Raise CheckpointError unless the bytes are those that were written."""
    if isinstance(file, Path):
        check_records(file)
    elif checksum_of(folder / file.name) != file.crc32:
        raise CheckpointError(folder / file.name, "differs from its checksum: the file is damaged", RESTORE)


def check_folder(folder: Path) -> None:
    """Check every file of one checkpoint, in this process only."""
    for file in files_to_check(folder):
        check_content(folder, file)


def checksum_of(path: Path) -> int:
    """CRC-32 of a whole file, reading a few parts concurrently."""
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
            return checksum ^ 1  # the file has been truncated meanwhile
        checksum = crc.checksum(buffer[:count], checksum)
        start += count
    return checksum


def holds_states(folder: Path) -> bool:
    """Whether there are state files of a checkpoint in the folder."""
    return any(ds.parse(entry.name) for entry in folder.iterdir())


def tag_folders(root: Path) -> list[Path]:
    """The folders of all checkpoints in `root`."""
    entries = sorted(root.iterdir()) if root.is_dir() else []
    return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".") and holds_states(entry)]


def intact_alternatives(root: Path, broken: str, also: Sequence[Path] = ()) -> list[Path]:
    """The newest other intact checkpoint, if any; only one, because checking it reads it completely."""
    others = [folder for place in (root, *also) for folder in tag_folders(place) if folder.name != broken]
    for folder in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            check_folder(folder)
        except (CheckpointError, OSError):
            continue
        return [folder]
    return []


def _seal(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


_REPLACED = ".replaced"
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD

# Written next to the checkpoints, for `./zero_to_fp32.py . pytorch_model.bin`.
ZERO_TO_FP32 = '''\
#!/usr/bin/env python
"""Ordinary weights from the sharded checkpoint in this folder:  ./zero_to_fp32.py . pytorch_model.bin  (or --help)."""

import sys

try:
    from hf_zero.zero_to_fp32 import main
except ImportError as error:
    sys.exit(f"this script needs hf_zero: pip install hf_zero ({error})")

if __name__ == "__main__":
    sys.exit(main())
'''


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of a checkpoint.

    Attributes:
        is_leader: whether this rank creates and renames folders: rank 0, or one rank per node under
            `use_node_local_storage`.
        node: equal for ranks that share a folder.
        save_latest: whether to write this checkpoint to `latest`.
        adds_script: whether to write zero_to_fp32.py next to it.
    """

    root: Path
    tag: str
    is_leader: bool
    node: str
    save_latest: bool
    adds_script: bool

    @property
    def final(self) -> Path:
        return self.root / self.tag


def write_checkpoint(
    place: Destination, files: Mapping[str, Any], collectives: Collectives, write: WriteRecords = write_records
) -> None:
    """Write this rank's `files` (name -> content) of one checkpoint. Collective.

    Args:
        write: writes records to a file.

    Raises:
        CheckpointError: on every rank, if it failed on any; the folder of the tag is unchanged.
    """
    staging: StagingFolder | None = None

    def prepare() -> str:
        nonlocal staging
        if not place.is_leader:
            return ""
        for leftover in leftovers(place.root):
            logger.warning("%s is from an interrupted save; it is not a checkpoint and can be deleted", leftover)
        staging = StagingFolder(place.final.parent, place.final.name)
        return str(staging.path)

    try:
        folders = _all_or_nothing(place, collectives, "create the folder", prepare)
        partial = Path(next(path for node, path in folders if path and node == place.node))
        reports = _all_or_nothing(place, collectives, "write its files", lambda: _write_files(partial, files, write))
        _all_or_nothing(place, collectives, "finish the checkpoint", lambda: _finish(place, partial, reports))
    except CheckpointError:
        if staging is not None:
            staging.remove()
        raise
    finally:
        if staging is not None:
            staging.release()


def _all_or_nothing(
    place: Destination, collectives: Collectives, what: str, act: Callable[[], Any]
) -> list[tuple[str, Any]]:
    """Run `act` on every rank and wait for all. Returns (node, result) of every rank."""
    problem, result = "", None
    try:
        result = act()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    outcomes: Sequence[Any] = collectives.gather_objects((place.node, result, problem))
    failed = [(rank, text) for rank, (_, _, text) in enumerate(outcomes) if text]
    if failed:
        rank, text = failed[0]
        raise CheckpointError(
            place.final,
            f"was not written: rank {rank} could not {what} ({text})",
            "free disk space or give a writable folder; earlier checkpoints are unchanged",
        )
    return [(node, value) for node, value, _ in outcomes]


def leftovers(root: Path) -> list[Path]:
    return sorted(root.glob(f".*{PARTIAL}")) if root.is_dir() else []


def _write_files(folder: Path, files: Mapping[str, Any], write: WriteRecords) -> list[Written]:
    # Other ranks wait for this rank's part of arriving tensors, so these come first, even if writing fails.
    in_order = sorted(files.items(), key=lambda item: not isinstance(item[1], Arriving))
    return [_write_file(folder / name, content, write) for name, content in in_order]


def _write_file(path: Path, content: Any, write: WriteRecords) -> Written:
    if not isinstance(content, Arriving):
        return write_torch_file(path, content, write)
    try:
        return write_torch_file_as_it_comes(path, content)
    finally:
        for _ in content.batches:
            pass


def _finish(place: Destination, partial: Path, reports: Sequence[tuple[str, list[Written]]]) -> None:
    if not place.is_leader:
        return
    write_manifest(partial, [file for node, files in reports if node == place.node for file in files])
    sync_folder(partial)
    move_into_place(partial, place.final)
    if place.adds_script:
        _add_script(place.root)
    if place.save_latest:
        write_small(place.root / ds.LATEST, place.tag.encode())


def move_into_place(new: Path, final: Path) -> None:
    """Rename `new` to `final`. An existing folder is exchanged atomically if the system supports it, then removed. Of a
    symbolic link only the link is removed."""
    with alone_in(final.parent):
        if not os.path.lexists(final):
            new.rename(final)
        elif _exchange(new, final):
            sync_folder(final.parent)
            _remove(new)
        else:
            old = new.with_name(f"{new.name.removesuffix(PARTIAL)}{_REPLACED}{PARTIAL}")
            final.rename(old)
            new.rename(final)
            sync_folder(final.parent)
            _remove(old)
    sync_folder(final.parent)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one system call; False if there is no such call."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(call(_HERE, os.fsencode(first), _HERE, os.fsencode(second), ctypes.c_uint(_EXCHANGE)) == 0)


def _add_script(root: Path) -> None:
    source = ZERO_TO_FP32.encode()
    path = root / ds.SCRIPT
    if not path.is_file() or path.read_bytes() != source:
        write_small(path, source)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def check_output_folder(folder: str, collectives: Collectives) -> None:
    """Raise an error on every rank if some rank cannot create files in the folder. Collective.

    Raises:
        CheckpointError: names the ranks and the system's error.
    """
    obstacles = collectives.gather_objects(_obstacle(Path(folder)))
    hindered = [(rank, why) for rank, why in enumerate(obstacles) if why]
    if hindered:
        ranks = ", ".join(str(rank) for rank, _ in hindered)
        problem = f"cannot be written to by rank {ranks}: {hindered[0][1]}"
        raise CheckpointError(folder, problem, "give an output_dir that every rank can write to, or save_strategy='no'")


def _obstacle(folder: Path) -> str:
    """The reason why no file can be created in a folder, existing or not; "" if one can."""
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
