"""Files that are either there in full or not at all, also after a power cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_zero.checkpoint.files.stream import Record, checksum_of_records, write_at
from hf_zero.staging import staging_file


@dataclass(frozen=True, slots=True)
class Written:
    """What a finished file must look like when it is read again."""

    name: str
    num_bytes: int
    crc32: int


def written(path: Path, records: Sequence[Record], checksums: Sequence[int]) -> Written:
    """The description of a file that `records` fill completely."""
    num_bytes = max(record.offset + record.num_bytes for record in records)
    return Written(path.name, num_bytes, checksum_of_records(records, checksums))


def write_small(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step, fsynced."""
    partial = staging_file(path)
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_at(file, content, 0)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(partial, path)
    sync_folder(path.parent)


def into_place(path: Path, write: Callable[[Path], Written]) -> Written:
    """Let `write` make a file under a temporary name beside `path`, then rename it; nothing is left of a failure."""
    partial = staging_file(path)
    try:
        result = write(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return Written(path.name, result.num_bytes, result.crc32)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable; file systems that cannot are let be."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
