"""The ZIP container of torch files: uncompressed records, each starting at a multiple of 64 bytes.

    local header, name, padding | record | local header, name, padding | record | ... | directory

Sizes are known before the first byte is written, so every place is planned first and the records can be written in any
order; only their checksums come later and are put into the headers then.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from hf_zero.checkpoint.files.stream import Awaited, Record, Streamed

ALIGN_BYTES = 64
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_DIRECTORY = struct.Struct("<IHHHHHHIIIHHHHHII")
_ZIP64_END = struct.Struct("<IQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_SIZES64 = struct.Struct("<HHQQ")  # id, length, size, stored size
_ENTRY64 = struct.Struct("<HHQQQ")  # and the header's offset
_TIME, _DATE = 0, 33  # 1980-01-01: the same content gives the same bytes
_LIMIT32 = 0xFFFFFFFF
_VERSION64, _UTF8 = 45, 0x800


@dataclass(frozen=True, slots=True)
class Member:
    """One record of the archive with its place."""

    name: bytes
    content: Streamed | Awaited | bytes
    header_offset: int
    offset: int

    @property
    def record(self) -> Record:
        return Record(self.offset, self.content)


def plan(contents: Sequence[tuple[str, Streamed | Awaited | bytes]]) -> tuple[Member, ...]:
    """Placements for all records, in order."""
    members, cursor = [], 0
    for name, content in contents:
        encoded = name.encode()
        fixed = _LOCAL.size + len(encoded) + _SIZES64.size
        padding = -(cursor + fixed + 4) % ALIGN_BYTES + 4  # four bytes announce the padding
        member = Member(encoded, content, cursor, cursor + fixed + padding)
        members.append(member)
        cursor = member.offset + member.record.num_bytes
    return tuple(members)


def headers(members: Sequence[Member], checksums: Sequence[int]) -> list[Record]:
    """Everything but the records: local headers, and the directory at the end."""
    found = [Record(m.header_offset, _local(m, checksum)) for m, checksum in zip(members, checksums, strict=True)]
    start = members[-1].offset + members[-1].record.num_bytes
    entries = b"".join(_entry(m, checksum) for m, checksum in zip(members, checksums, strict=True))
    return [*found, Record(start, entries + _end(len(members), start, len(entries)))]


def _local(member: Member, checksum: int) -> bytes:
    size = member.record.num_bytes
    sizes = _SIZES64.pack(1, 16, size, size)
    padding = member.offset - member.header_offset - _LOCAL.size - len(member.name) - len(sizes)
    extra = sizes + struct.pack("<2sH", b"FB", padding - 4) + bytes(padding - 4)
    fields = (0x04034B50, _VERSION64, _UTF8, 0, _TIME, _DATE, checksum, _LIMIT32, _LIMIT32)
    return _LOCAL.pack(*fields, len(member.name), len(extra)) + member.name + extra


def _entry(member: Member, checksum: int) -> bytes:
    size = member.record.num_bytes
    is_large = size >= _LIMIT32 or member.header_offset >= _LIMIT32
    extra = _ENTRY64.pack(1, 24, size, size, member.header_offset) if is_large else b""
    shown_size, shown_offset = (_LIMIT32, _LIMIT32) if is_large else (size, member.header_offset)
    fields = (0x02014B50, _VERSION64, _VERSION64, _UTF8, 0, _TIME, _DATE, checksum, shown_size, shown_size)
    return _DIRECTORY.pack(*fields, len(member.name), len(extra), 0, 0, 0, 0, shown_offset) + member.name + extra


def _end(count: int, start: int, num_bytes: int) -> bytes:
    tail = _END.pack(0x06054B50, 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), num_bytes, min(start, _LIMIT32), 0)
    if count < 0xFFFF and start < _LIMIT32:
        return tail
    fields = (0x06064B50, _ZIP64_END.size - 12, _VERSION64, _VERSION64, 0, 0, count, count, num_bytes, start)
    return _ZIP64_END.pack(*fields) + _ZIP64_LOCATOR.pack(0x07064B50, 0, start + num_bytes, 1) + tail
