"""Megatron's indexed files: rows of integers of different lengths, NAME.bin beside NAME.idx, read through a mapping.

.idx   "MMIDIDX\\0\\0"  uint64 version 1  uint8 dtype  uint64 rows N  uint64 documents D
       N x int32 lengths   N x int64 offsets in bytes   D x int64 documents (rows at which they begin)
.bin   the rows, little endian
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_zero.staging import alone_in, staging_file

Integers = NDArray[Any]
MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_DTYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint16,
    7: np.uint32,
    8: np.uint64,
}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def fitting_dtype(low: int, high: int) -> Any:
    """The smallest unsigned type for values from `low` to `high`; a signed one if there are negative ones."""
    kinds = (np.int8, np.int16, np.int32, np.int64) if low < 0 else (np.uint8, np.uint16, np.uint32, np.uint64)
    for kind in kinds:
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return kind
    raise ValueError(f"no integer type holds both {low} and {high}")


def write_rows(prefix: str | os.PathLike[str], rows: Iterable[Sequence[int] | Integers], dtype: Any) -> None:
    """Write all rows as one document; the files appear complete or not at all."""
    path = os.fspath(prefix)
    kind = np.dtype(dtype)
    lengths: list[int] = []
    names = [Path(f"{path}.bin"), Path(f"{path}.idx")]
    part, index = map(staging_file, names)
    with open(part, "wb") as file:
        for row in rows:
            values = np.asarray(row, dtype=kind)
            lengths.append(values.size)
            file.write(values.astype(kind.newbyteorder("<")).tobytes())
    offsets = np.zeros(len(lengths), np.int64)
    if lengths:
        offsets[1:] = np.cumsum(lengths[:-1]) * kind.itemsize
    with open(index, "wb") as file:
        file.write(MAGIC + _HEAD.pack(1, _CODES[kind], len(lengths), 2))
        file.write(np.asarray(lengths, "<i4").tobytes() + offsets.astype("<i8").tobytes())
        file.write(np.asarray([0, len(lengths)], "<i8").tobytes())
    with alone_in(names[0].parent):  # two files that belong together
        os.replace(part, names[0])
        os.replace(index, names[1])


class IndexedRows:
    """Rows of one pair of files, by number.

    Raises:
        FileNotFoundError: a file is missing; ValueError: it is none of this format, or shorter than it says.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        path = os.fspath(prefix)
        index = Path(f"{path}.idx").read_bytes()
        if not index.startswith(MAGIC):
            raise ValueError(f"{path}.idx is no index of Megatron's format (it begins with {index[:9]!r})")
        version, code, number, documents = _HEAD.unpack_from(index, len(MAGIC))
        start = len(MAGIC) + _HEAD.size
        if version != 1 or code not in _DTYPES or len(index) < start + 12 * number + 8 * documents:
            raise ValueError(f"{path}.idx is damaged, or of a version ({version}, dtype {code}) that is not known")
        self.dtype = np.dtype(_DTYPES[code])
        self.lengths: Integers = np.frombuffer(index, "<i4", number, start)
        self._offsets: Integers = np.frombuffer(index, "<i8", number, start + 4 * number)
        size = os.path.getsize(f"{path}.bin")
        needed = int(self.lengths.sum()) * self.dtype.itemsize
        if size < needed:
            raise ValueError(f"{path}.bin has {size} bytes, and its index expects {needed}")
        empty: Integers = np.zeros(0, self.dtype)
        self._values = np.memmap(f"{path}.bin", self.dtype.newbyteorder("<"), "r") if size else empty

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Integers:
        start = int(self._offsets[number]) // self.dtype.itemsize
        return np.asarray(self._values[start : start + int(self.lengths[number])], dtype=self.dtype)

    def flat(self) -> Integers:
        """All rows after one another."""
        return np.asarray(self._values[: int(self.lengths.sum())], dtype=self.dtype)
