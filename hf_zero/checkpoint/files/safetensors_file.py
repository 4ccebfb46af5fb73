"""Writes safetensors files tensor by tensor: a JSON header, then the bytes at the places that it names."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.files.stream import Record, Streamed, Written, write_records, written

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def write_safetensors(
    path: Path, tensors: Mapping[str, Streamed], metadata: Mapping[str, str], progress: Any = None
) -> Written:
    """Write `tensors` to the new file `path`, fsynced. Widest elements first, so that every tensor is aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    cursor, contents = 0, []
    for name, content in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        end = cursor + content.num_bytes
        header[name] = {"dtype": _name(content), "shape": list(content.shape), "data_offsets": [cursor, end]}
        contents.append((cursor, content))
        cursor = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    records = [Record(0, struct.pack("<Q", len(encoded)) + encoded)]
    records += [Record(start + offset, content) for offset, content in contents]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        checksums = write_records(file, records, progress)
        os.fsync(file)
    finally:
        os.close(file)
    return written(path, records, checksums)


def _name(content: Streamed) -> str:
    if content.dtype not in _NAMES:
        raise TypeError(f"safetensors files hold no {content.dtype}; write a .bin file instead")
    return _NAMES[content.dtype]
