"""Reads torch files from others: memory-mapped, without running any code in them."""

from __future__ import annotations

import pickle
import re
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.deepspeed import classes
from hf_zero.errors import CheckpointError

# The description of a checkpoint of 100,000 parameters takes about 30 MB; what is larger is not a description.
MAX_PICKLE_BYTES = 1 << 30
MAX_RECORDS = 1 << 20

_KNOWN = [(known, f"{home}.{known.__name__}") for known, home in classes.HOMES.items()]
_RESTORE = "restore it from a copy, or load an older checkpoint"
IN_PIECES = "hf_zero_in_pieces"
"""Key of what stands for a tensor of a checkpoint in host memory: (file, first byte, bytes) of its parts, dtype, shape.

The files, with nothing in them but values, lie beside the folder of the tag; without a name they are zeros. As a key of
the whole content it says that there are such tensors.
"""


def read_torch_file(path: Path) -> Any:
    """The content of `path`; tensors of torch's zip format stay in the file until they are touched.

    Raises:
        CheckpointError: for a file that is missing, damaged, or names a class that a checkpoint does not need.
    """
    if not path.is_file():
        raise CheckpointError(path, "this file of the checkpoint is missing", _RESTORE)
    is_zip = _starts_like_a_zip(path)
    if is_zip:
        check_container(path)
    try:
        with torch.serialization.safe_globals(list(_KNOWN)):
            content = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
        if isinstance(content, dict) and content.pop(IN_PIECES, False):
            return _put_together(content, path.parent.parent, {})
        return content
    except pickle.UnpicklingError as error:
        raise _refusal(path, error, is_zip) from error
    except Exception as error:
        problem = f"cannot be read ({type(error).__name__}: {_first_line(error)})"
        raise CheckpointError(path, problem, _RESTORE) from error


def _put_together(value: Any, folder: Path, mapped: dict[str, Tensor]) -> Any:
    if isinstance(value, OrderedDict):
        return OrderedDict((key, _put_together(entry, folder, mapped)) for key, entry in value.items())
    if isinstance(value, dict) and IN_PIECES not in value:
        return {key: _put_together(entry, folder, mapped) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_together(entry, folder, mapped) for entry in value)
    if not isinstance(value, dict):
        return value
    parts = []
    for name, start, num_bytes in value[IN_PIECES]:
        if not name:
            parts.append(torch.zeros(num_bytes, dtype=torch.uint8))
            continue
        if name not in mapped:
            path = folder / Path(name).name
            mapped[name] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        parts.append(mapped[name].narrow(0, start, num_bytes))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.view(getattr(torch, value["dtype"])).view(value["shape"])


def check_container(path: Path) -> None:
    """Raise unless the archive's directory describes plain records that lie inside the file."""
    num_bytes = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(path, f"is truncated or damaged ({_first_line(error)})", _RESTORE) from error
    if len(members) > MAX_RECORDS:
        raise CheckpointError(path, f"announces {len(members)} records, more than {MAX_RECORDS}", _RESTORE)
    if len({member.filename for member in members}) < len(members):
        raise CheckpointError(path, "holds two records of one name", _RESTORE)
    for member in members:
        is_plain = member.compress_type == zipfile.ZIP_STORED and member.compress_size == member.file_size
        if not is_plain or member.header_offset + member.file_size > num_bytes:
            problem = f"its record {member.filename!r} is compressed or larger than the file ({num_bytes} bytes)"
            raise CheckpointError(path, problem, _RESTORE)
        if member.filename.endswith("data.pkl") and member.file_size > MAX_PICKLE_BYTES:
            raise CheckpointError(path, f"its description takes {member.file_size} bytes", _RESTORE)


def check_records(path: Path) -> None:
    """Raise unless every record of a zip file has the checksum that the file itself states."""
    if not path.is_file():
        raise CheckpointError(path, "this file of the checkpoint is missing", _RESTORE)
    if not _starts_like_a_zip(path):
        return  # the old stream format states none
    check_container(path)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, zlib.error, EOFError, ValueError) as error:
        raise CheckpointError(path, f"is truncated or damaged ({_first_line(error)})", _RESTORE) from error
    if damaged is not None:
        raise CheckpointError(path, f"record {damaged!r} differs from its checksum: the file is damaged", _RESTORE)


def _starts_like_a_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _refusal(path: Path, error: Exception, is_zip: bool) -> CheckpointError:
    strangers = _foreign_globals(path, error, is_zip)
    if not strangers:
        return CheckpointError(path, f"cannot be read ({_first_line(error)})", _RESTORE)
    return CheckpointError(
        path,
        f"asks to run or build {', '.join(strangers)}, which may do anything on this machine; hf_zero builds tensors, "
        "plain containers and the four state classes of DeepSpeed only",
        "if it is in your own client_state, save plain values there; if you trust the file, allow the class with "
        "torch.serialization.add_safe_globals([...]); otherwise do not load it",
    )


def _foreign_globals(path: Path, error: Exception, is_zip: bool) -> list[str]:
    if is_zip:
        known = {name for _, name in _KNOWN}
        try:
            return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - known)
        except Exception:  # a pickle so broken that it cannot even be listed
            return []
    return sorted(set(re.findall(r"GLOBAL ([\w.]+)", str(error))))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
