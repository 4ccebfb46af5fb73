"""Writes objects like torch.save, but streams tensors and does not need to import their classes.

torch.save can neither write a tensor that is never whole in memory, nor name DeepSpeed's classes in a pickle while
another object has that name in this process (a real DeepSpeed, or none).

Nor can torch.save under `torch.serialization.skip_data`, which leaves room for bytes that are written later. It stores
0 as the checksums of these records, so zipfile and `check_records` find the file damaged until both headers of each
record are rewritten, which takes most of the code below. Tensors that are not whole in memory would have to be
FakeTensors, which are private to torch: a meta tensor is saved without a record, and any other allocates its full size.
Where the records are is only known after reading the file again, through `torch._C`.

A torch file is a ZIP archive of uncompressed records, each starting at a multiple of 64 bytes:

    local header, name, padding | record | local header, name, padding | record | ... | directory

Sizes are known in advance, so all offsets are planned first and records can be written in any order; only their
checksums are added to the headers afterwards.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, _weights_only_unpickler

from hf_zero.checkpoint.deepspeed import classes
from hf_zero.checkpoint.files.stream import (
    Arriving,
    Awaited,
    Record,
    Streamed,
    Written,
    created,
    of_entries,
    streamed,
    write_records,
    written,
)
from hf_zero.errors import CheckpointError

ALIGN_BYTES = 64
WriteRecords = Callable[[int, Sequence[Record]], list[int]]  # like `stream.write_records`
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_DIRECTORY = struct.Struct("<IHHHHHHIIIHHHHHII")
_ZIP64_END = struct.Struct("<IQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_SIZES64 = struct.Struct("<HHQQ")  # id, length, size, stored size
_ENTRY64 = struct.Struct("<HHQQQ")  # the same with the header's offset
_TIME, _DATE = 0, 33  # 1980-01-01, so that equal content gives equal bytes
_LIMIT32 = 0xFFFFFFFF
_VERSION64, _UTF8 = 45, 0x800
_PROTOCOL = 2  # torch's own choice, which its restricted reader supports best


@dataclass(frozen=True, slots=True)
class ArchiveRecord(Record):
    """One record of the archive, with its name and the place of its header."""

    name: bytes
    header_offset: int


def write_torch_file(path: Path, value: object, write: WriteRecords = write_records) -> Written:
    """Write `value` to `path` and fsync it; tensors and `Streamed` leaves become records.

    `path` must not exist: to replace a file, write under another name first.

    Raises:
        TypeError: if `value` contains an object that a restricted reader would reject.
    """
    members = _plan(value, path)
    with created(path) as file:
        checksums = write(file, members)
        return _finish(file, path, members, checksums)


def write_torch_file_as_it_comes(path: Path, arriving: Arriving) -> Written:
    """`write_torch_file` for tensors that arrive in batches: leaves are `Awaited`, and each arrives once."""
    members = _plan(arriving.content, path)
    place = {id(member.content): number for number, member in enumerate(members)}
    checksums = [0] * len(members)
    with created(path) as file:
        # No variable may reference a batch while the next one is created.
        while (batch := next(arriving.batches, None)) is not None:
            numbers = [place.pop(id(awaited)) for awaited, _ in batch]
            records = [Record(members[number].offset, content) for number, (_, content) in zip(numbers, batch)]
            assert all(records[i].num_bytes == members[number].num_bytes for i, number in enumerate(numbers))
            for number, checksum in zip(numbers, write_records(file, records), strict=True):
                checksums[number] = checksum
            del batch, records
        rest = list(place.values())
        for number, checksum in zip(rest, write_records(file, [members[n] for n in rest]), strict=True):
            checksums[number] = checksum
        return _finish(file, path, members, checksums)


def _plan(value: object, path: Path) -> tuple[ArchiveRecord, ...]:
    pickled, contents = _pickle(value, path.name)
    stem = path.name.split(".")[0] or "archive"
    return place_records(
        [
            (f"{stem}/data.pkl", pickled),
            (f"{stem}/byteorder", sys.byteorder.encode()),
            *((f"{stem}/data/{key}", content) for key, content in enumerate(contents)),
            (f"{stem}/version", b"3\n"),
        ]
    )


def _finish(file: int, path: Path, members: Sequence[ArchiveRecord], checksums: Sequence[int]) -> Written:
    """Write headers and directory, which need the checksums."""
    heads = archive_headers(members, checksums)
    all_checksums = [*checksums, *write_records(file, heads)]
    os.fsync(file)
    return written(path, [*members, *heads], all_checksums)


def _pickle(value: object, name: str) -> tuple[bytes, list[Streamed | Awaited]]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    strangers = sorted(pickler.named - _readable_globals())
    if strangers:
        raise TypeError(
            f"{name} would hold {', '.join(strangers)}, which torch.load(weights_only=True) refuses to build. "
            "Save plain values (numbers, text, lists, dicts, tensors) in client_state and scheduler states instead."
        )
    return buffer.getvalue(), pickler.contents


def _readable_globals() -> set[str]:
    """Globals that torch's restricted reader allows by default, and those that the user has added."""
    allowed = set(_weights_only_unpickler._get_allowed_globals())
    # torch lists them under Python 2 names, which pickles of protocol 2 use.
    return allowed | {name.replace("builtins.", "__builtin__.") for name in allowed}


class _Storage:
    """Represents one record while pickling.

    Attributes:
        is_untyped: the dtype is newer than torch's classes of storages (float8, uint16), so it goes with the tensor.
    """

    def __init__(self, key: int, content: Streamed | Awaited) -> None:
        self.is_untyped = content.dtype in torch.storage._new_dtypes()
        size = content.num_bytes if self.is_untyped else content.numel
        kind = torch.UntypedStorage if self.is_untyped else _storage_class(content.dtype)
        self.id = ("storage", kind, str(key), "cpu", size)


def _storage_class(dtype: torch.dtype) -> type:
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    if name is None:
        raise TypeError(f"a tensor of dtype {dtype} cannot be written to a torch file")
    return getattr(torch, name)  # type: ignore[no-any-return]


# The Python pickler, because the one in C cannot write a class under a name that is not importable.
class _Pickler(pickle._Pickler):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._file = file
        self.contents: list[Streamed | Awaited] = []
        self.named: set[str] = set()  # globals that the reader needs
        self._storages: dict[object, _Storage] = {}
        self._alive: list[object] = []  # keeps objects alive so that addresses stay unique

    def persistent_id(self, obj: object) -> Any:
        return obj.id if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Tensor):
            if obj.layout != torch.strided or obj.is_quantized or obj.is_complex() and obj.is_conj():
                return NotImplemented
            return self._reduce(streamed(obj), self._identity(obj))
        if isinstance(obj, (Streamed, Awaited)):
            return self._reduce(obj, id(obj))
        return NotImplemented

    def save_global(self, obj: Any, name: str | None = None) -> None:
        home = classes.HOMES.get(obj) if isinstance(obj, type) else None
        if home is None:
            start = self._file.tell()
            super().save_global(obj, name)  # type: ignore[misc]
            self._note(start)
            return
        self.write(pickle.GLOBAL + f"{home}\n{obj.__name__}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]

    def _note(self, start: int) -> None:
        """Record the module and name of the GLOBAL instruction that was just written."""
        self._file.seek(start)
        pickled = self._file.read()
        if pickled.startswith(pickle.GLOBAL):
            module, name = pickled[1:].split(b"\n")[:2]
            self.named.add(f"{module.decode()}.{name.decode()}")

    def _reduce(self, content: Streamed | Awaited, identity: object) -> Any:
        storage = self._storages.get(identity)
        if storage is None:
            storage = _Storage(len(self.contents), content)
            self.contents.append(content)
            self._storages[identity] = storage
            self._alive.append(content)
        strides = torch.empty(content.shape, device="meta").stride()
        arguments: tuple[Any, ...] = (storage, 0, content.shape, strides, False, OrderedDict())
        if storage.is_untyped:
            return torch._utils._rebuild_tensor_v3, (*arguments, content.dtype)
        return torch._utils._rebuild_tensor_v2, arguments

    def _identity(self, tensor: Tensor) -> object:
        """A key that is equal for tensors with the same memory and shape, so that tied weights are written once."""
        self._alive.append(tensor)
        if tensor.numel() == 0:
            return id(tensor)
        return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device)


def why_unreadable(value: object) -> str | None:
    """The reason why `value` could not be written or read back; None if it can."""
    try:
        _pickle(value, "the file")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def plain(value: Any) -> Any:
    """`value` with subclasses of dict, list, str and numbers (config classes, numpy scalars) as builtins."""
    if value is None or isinstance(value, (bool, torch.Size, Tensor, torch.dtype, OrderedDict)):
        return value
    simple: type[Any]
    for simple in (int, float, str, bytes):
        if isinstance(value, simple):
            return simple(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(plain(entry) for entry in value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def place_records(contents: Sequence[tuple[str, Streamed | Awaited | bytes]]) -> tuple[ArchiveRecord, ...]:
    """Assign offsets to all records, in order."""
    members, cursor = [], 0
    for name, content in contents:
        encoded = name.encode()
        fixed = _LOCAL.size + len(encoded) + _SIZES64.size
        padding = -(cursor + fixed + 4) % ALIGN_BYTES + 4  # including the padding's 4-byte header
        member = ArchiveRecord(cursor + fixed + padding, content, encoded, header_offset=cursor)
        members.append(member)
        cursor = member.offset + member.num_bytes
    return tuple(members)


def archive_headers(members: Sequence[ArchiveRecord], checksums: Sequence[int]) -> list[Record]:
    """Everything except the records' data: local headers, and the directory at the end."""
    headers = [
        Record(m.header_offset, _local_header(m, checksum)) for m, checksum in zip(members, checksums, strict=True)
    ]
    start = members[-1].offset + members[-1].num_bytes
    entries = b"".join(_directory_entry(m, checksum) for m, checksum in zip(members, checksums, strict=True))
    return [*headers, Record(start, entries + _directory_end(len(members), start, len(entries)))]


def _local_header(member: ArchiveRecord, checksum: int) -> bytes:
    size = member.num_bytes
    sizes = _SIZES64.pack(1, 16, size, size)
    padding = member.offset - member.header_offset - _LOCAL.size - len(member.name) - len(sizes)
    extra = sizes + struct.pack("<2sH", b"FB", padding - 4) + bytes(padding - 4)
    fields = (0x04034B50, _VERSION64, _UTF8, 0, _TIME, _DATE, checksum, _LIMIT32, _LIMIT32)
    return _LOCAL.pack(*fields, len(member.name), len(extra)) + member.name + extra


def _directory_entry(member: ArchiveRecord, checksum: int) -> bytes:
    size = member.num_bytes
    is_large = size >= _LIMIT32 or member.header_offset >= _LIMIT32
    extra = _ENTRY64.pack(1, 24, size, size, member.header_offset) if is_large else b""
    shown_size, shown_offset = (_LIMIT32, _LIMIT32) if is_large else (size, member.header_offset)
    fields = (0x02014B50, _VERSION64, _VERSION64, _UTF8, 0, _TIME, _DATE, checksum, shown_size, shown_size)
    return _DIRECTORY.pack(*fields, len(member.name), len(extra), 0, 0, 0, 0, shown_offset) + member.name + extra


def _directory_end(count: int, start: int, num_bytes: int) -> bytes:
    tail = _END.pack(0x06054B50, 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), num_bytes, min(start, _LIMIT32), 0)
    if count < 0xFFFF and start < _LIMIT32:
        return tail
    fields = (0x06064B50, _ZIP64_END.size - 12, _VERSION64, _VERSION64, 0, 0, count, count, num_bytes, start)
    return _ZIP64_END.pack(*fields) + _ZIP64_LOCATOR.pack(0x07064B50, 0, start + num_bytes, 1) + tail


# Reads torch files: memory-mapped, without running any code from them.


# The description of a checkpoint with 100,000 parameters takes about 30 MB; anything much larger is invalid.
MAX_PICKLE_BYTES = 1 << 30
MAX_RECORDS = 1 << 20

RESTORE = "restore it from a copy, or load an older checkpoint"
IN_PIECES = "hf_zero_in_pieces"
"""Key of a tensor's description in a checkpoint in host memory: (file, first byte, bytes) of its parts, dtype, shape.

The files only contain values and are next to the folder of the tag; a part without a file name is zeros. An empty file
represents one on another host. As a key of the whole content it says that there are such tensors.
"""


@functools.cache
def _known() -> list[tuple[Any, str]]:
    """Classes that are allowed in addition to torch's: DeepSpeed's states, and numpy numbers and arrays, which users
    put into `client_state`, under their names in numpy 1 and 2."""
    core: Any = getattr(numpy, "_core", None) or numpy.core
    allowed: list[Any] = [numpy.dtype, numpy.ndarray, *{type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdFD"}]
    known = [(each, f"{each.__module__}.{each.__name__}") for each in allowed]
    for home in ("numpy.core.multiarray", "numpy._core.multiarray"):
        known += [(getattr(core.multiarray, name), f"{home}.{name}") for name in ("scalar", "_reconstruct")]
    return known + [(each, f"{home}.{each.__name__}") for each, home in classes.HOMES.items()]


def read_torch_file(path: Path, *, stays_in_parts: Callable[[Any], bool] = lambda key: False) -> Any:
    """Read `path`; tensors of torch's zip format stay in the file until they are accessed.

    Args:
        stays_in_parts: keys below which a tensor in several parts is returned as `Streamed`, to avoid unnecessary
            copies.

    Raises:
        CheckpointError: if the file is missing, damaged, or names a class that checkpoints do not need.
    """
    if not path.is_file():
        raise CheckpointError(path, "this file of the checkpoint is missing", RESTORE)
    is_zip = _starts_like_a_zip(path)
    if is_zip:
        check_container(path)
    try:
        with torch.serialization.safe_globals([*_known()]):
            content = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
        if isinstance(content, dict) and content.pop(IN_PIECES, False):
            folder, mapped = path.parent.parent, dict[str, Tensor]()
            values = {key: _put_together(value, folder, mapped) for key, value in content.items()}
            return {key: value if stays_in_parts(key) else _materialised(value) for key, value in values.items()}
        return content
    except pickle.UnpicklingError as error:
        raise _refusal(path, error, is_zip) from error
    except Exception as error:
        problem = f"cannot be read ({type(error).__name__}: {_first_line(error)})"
        raise CheckpointError(path, problem, RESTORE) from error


def _put_together(value: Any, folder: Path, mapped: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict) or IN_PIECES not in value:
        return of_entries(value, lambda entry: _put_together(entry, folder, mapped))
    parts = []
    for name, start, num_bytes in value[IN_PIECES]:
        if not name:
            parts.append(torch.zeros(num_bytes, dtype=torch.uint8))
            continue
        if name not in mapped:
            path = folder / Path(name).name
            if not path.stat().st_size:  # on another host, whose ranks read it: fill with NaN
                parts.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
                continue
            mapped[name] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        parts.append(mapped[name].narrow(0, start, num_bytes))
    dtype, shape = getattr(torch, value["dtype"]), tuple(value["shape"])
    if len(parts) == 1:
        return parts[0].view(dtype).view(shape)
    return Streamed(dtype, shape, tuple(part.view(dtype) for part in parts))


def _materialised(value: Any) -> Any:
    return value.materialise() if isinstance(value, Streamed) else of_entries(value, _materialised)


def check_container(path: Path) -> None:
    """Raise an error unless the archive's directory only describes plain records inside the file."""
    num_bytes = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(path, f"is truncated or damaged ({_first_line(error)})", RESTORE) from error
    if len(members) > MAX_RECORDS:
        raise CheckpointError(path, f"has {len(members)} records, more than {MAX_RECORDS}", RESTORE)
    if len({member.filename for member in members}) < len(members):
        raise CheckpointError(path, "has two records of the same name", RESTORE)
    for member in members:
        is_plain = member.compress_type == zipfile.ZIP_STORED and member.compress_size == member.file_size
        if not is_plain or member.header_offset + member.file_size > num_bytes:
            problem = f"its record {member.filename!r} is compressed or larger than the file ({num_bytes} bytes)"
            raise CheckpointError(path, problem, RESTORE)
        if member.filename.endswith("data.pkl") and member.file_size > MAX_PICKLE_BYTES:
            raise CheckpointError(path, f"its pickle is too large ({member.file_size} bytes)", RESTORE)


def check_records(path: Path) -> None:
    """Raise an error unless every record of a zip file matches the checksum in the file."""
    if not path.is_file():
        raise CheckpointError(path, "this file of the checkpoint is missing", RESTORE)
    if not _starts_like_a_zip(path):
        return  # the old stream format has none
    check_container(path)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, zlib.error, EOFError, ValueError) as error:
        raise CheckpointError(path, f"is truncated or damaged ({_first_line(error)})", RESTORE) from error
    if damaged is not None:
        raise CheckpointError(path, f"record {damaged!r} differs from its checksum: the file is damaged", RESTORE)


def _starts_like_a_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _refusal(path: Path, error: Exception, is_zip: bool) -> CheckpointError:
    strangers = _foreign_globals(path, error, is_zip)
    if not strangers:
        return CheckpointError(path, f"cannot be read ({_first_line(error)})", RESTORE)
    return CheckpointError(
        path,
        f"asks to run or build {', '.join(strangers)}, which may do anything on this machine; hf_zero only builds "
        "tensors, numpy's numbers and arrays, plain containers and DeepSpeed's four state classes",
        "if it is in your own client_state, save plain values there; if you trust the file, allow the class with "
        "torch.serialization.add_safe_globals([...]); otherwise do not load it",
    )


def _foreign_globals(path: Path, error: Exception, is_zip: bool) -> list[str]:
    # A class that the pickle does not name: `numpy.dtype` creates dtypes, which have separate classes.
    if made := re.findall(r"but got <class '([\w.]+)'>", str(error)):
        return sorted(set(made))
    if is_zip:
        known = {name for _, name in _known()}
        try:
            return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - known)
        except Exception:  # a pickle too damaged to be listed
            return []
    return sorted(set(re.findall(r"GLOBAL ([\w.]+)", str(error))))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
