"""Torch files as written and read by hf_zero: compatible with torch, DeepSpeed's classes inert, others refused."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.checkpoint import CheckpointError
from hf_zero.checkpoint.consolidate import write_safetensors
from hf_zero.checkpoint.deepspeed import classes
from hf_zero.checkpoint.files import stream
from hf_zero.checkpoint.files.crc import checksum, combine
from hf_zero.checkpoint.files.stream import Arriving, Awaited, Streamed, streamed
from hf_zero.checkpoint.files.torch_file import (
    check_records,
    read_torch_file,
    write_torch_file,
    write_torch_file_as_it_comes,
)

WEIGHT = torch.arange(35.0).view(5, 7)


def content() -> dict[str, Any]:
    return {
        "weight": WEIGHT,
        "tied": WEIGHT.detach(),
        "transposed": WEIGHT.t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, dtype=torch.bfloat16),
        "counts": torch.arange(3),
        "flags": torch.tensor([True, False]),
        "parts": Streamed(torch.bfloat16, (4, 5), (torch.arange(12.0), torch.arange(8.0))),
        "shape": torch.Size((2, 3)),
        "stage": classes.ZeroStageEnum(2),
        "scaler": classes.DynamicLossScaler(cur_scale=512.0),
        "slices": [OrderedDict(a=classes.fragment_address(3, 4))],
        "plain": {"text": "ä", "numbers": [1, 2.5, None, True]},
    }


def test_torch_reads_what_we_write_and_so_do_we(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    written = write_torch_file(path, content())
    data = path.read_bytes()
    assert (written.num_bytes, written.crc32) == (len(data), zlib.crc32(data))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    check_records(path)
    allowed = [(known, f"{home}.{known.__name__}") for known, home in classes.HOMES.items()]
    with torch.serialization.safe_globals(allowed):
        by_torch = [torch.load(path, weights_only=True, mmap=mmap) for mmap in (True, False)]
    for read in (*by_torch, read_torch_file(path)):
        expected = content()
        parts = expected.pop("parts").materialise()
        assert torch.equal(read.pop("parts"), parts)
        for key, value in expected.items():
            same = torch.equal(value, read[key]) if isinstance(value, torch.Tensor) else value == read[key]
            assert same, key
        assert read["weight"].data_ptr() == read["tied"].data_ptr() and read["weight"].data_ptr() % 64 == 0
        assert type(read["stage"]) is classes.ZeroStageEnum


NEWER = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", NEWER, ids=str)
def test_dtypes_without_a_storage_of_their_own(dtype: torch.dtype, tmp_path: Path) -> None:
    """A checkpoint with such a buffer, or a frozen float8 weight, was refused. torch writes them as bytes, and their
    dtype with the tensor."""
    values = torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(2, 3)
    write_torch_file(tmp_path / "ours.pt", {"a": values, "tied": values, "none": values[:0]})
    torch.save({"a": values, "tied": values, "none": values[:0]}, tmp_path / "torchs.pt")
    for name in ("ours", "torchs"):
        path = tmp_path / f"{name}.pt"
        for read in (torch.load(path, weights_only=True), read_torch_file(path)):
            assert read["a"].dtype == read["none"].dtype == dtype and read["none"].shape == (0, 3)
            assert torch.equal(read["a"].view(torch.uint8), values.view(torch.uint8))
            assert read["a"].data_ptr() == read["tied"].data_ptr()


def test_tensors_that_arrive_later_make_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches come in any order, in spans written by several threads, cast on the way, some without waiting."""
    monkeypatch.setattr(stream, "CHUNK_BYTES", 64)
    monkeypatch.setattr(stream, "_SPAN_BYTES", 256)
    whole = {"a": torch.arange(500.0), "b": torch.arange(77), "c": WEIGHT, "d": WEIGHT.bfloat16()}
    write_torch_file(tmp_path / "x.pt", whole)
    awaited = {key: Awaited(value.dtype, tuple(value.shape)) for key, value in whole.items() if key != "c"}
    first = [(awaited["d"], Streamed(torch.bfloat16, (35,), (WEIGHT.view(-1)[:3], WEIGHT.view(-1)[3:])))]
    second = [(awaited[key], streamed(whole[key])) for key in ("b", "a")]
    arriving = Arriving({**whole, **awaited}, iter([first, second]))
    (tmp_path / "later").mkdir()
    written = write_torch_file_as_it_comes(tmp_path / "later" / "x.pt", arriving)
    data = (tmp_path / "later" / "x.pt").read_bytes()
    assert data == (tmp_path / "x.pt").read_bytes() and written.crc32 == zlib.crc32(data)


@pytest.mark.parametrize("refuses", ["nothing", "open", "pwrite"])
def test_large_records_are_written_past_the_cache_where_that_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """Two asynchronous saves took forty steps, and each waited for the one before: copying 1.8 GB into the page cache
    and writing it from there cost more than two seconds of the two processors, which were busy training."""
    direct = [0]
    original_open, original_pwrite = os.open, os.pwrite

    def is_direct(flags: int) -> bool:
        return bool(flags & os.O_DIRECT)

    def opens(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if refuses == "open" and is_direct(flags):
            raise OSError(errno.EINVAL, "Invalid argument")
        return original_open(path, flags, *rest, **more)

    def pwrites(file: int, block: Any, offset: int) -> int:
        if is_direct(fcntl.fcntl(file, fcntl.F_GETFL)):
            if refuses == "pwrite":
                raise OSError(errno.EINVAL, "Invalid argument")
            direct[0] += len(block)
        return original_pwrite(file, block, offset)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "pwrite", pwrites)
    monkeypatch.setattr(stream, "_SPAN_BYTES", 4 << 20)
    tensors = {str(numel): torch.arange(float(numel)) for numel in (3_000_001, 1_048_576, 65_537, 5)}
    tensors["parts"] = torch.arange(400_000.0)
    parts = Streamed(torch.float32, (400_000,), tuple(tensors["parts"].split(1_001)))
    written = write_torch_file(tmp_path / "x.pt", {**tensors, "parts": parts})
    data = (tmp_path / "x.pt").read_bytes()
    assert (written.num_bytes, written.crc32) == (len(data), zlib.crc32(data))
    for key, value in torch.load(tmp_path / "x.pt").items():
        assert torch.equal(value, tensors[key]), key
    if refuses == "nothing" and _knows_direct_writes(tmp_path):
        assert direct[0] > 0.95 * len(data)
    else:
        assert direct[0] == 0


def _knows_direct_writes(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_the_pickle_names_deepspeeds_modules_never_ours(tmp_path: Path) -> None:
    write_torch_file(tmp_path / "file.pt", content())
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        pickled = archive.read("file/data.pkl")
    assert b"hf_zero" not in pickled
    assert b"deepspeed.runtime.zero.config\nZeroStageEnum" in pickled


def test_an_existing_file_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write_torch_file(tmp_path / "file.pt", {})
    assert (tmp_path / "file.pt").read_bytes() == b"precious"


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_combine(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("num_bytes", [0, 1, 733_111, 733_112, 1 << 20, (1 << 20) + 1, 3_141_593])
def test_the_fast_checksum_is_zlibs(num_bytes: int) -> None:
    """Sizes below and above the threshold, whole windows and odd ends, with and without a preceding checksum."""
    data = random.Random(num_bytes).randbytes(num_bytes)
    assert checksum(data) == zlib.crc32(data)
    assert checksum(memoryview(data), 12345) == zlib.crc32(data, 12345)
    assert checksum(bytes(num_bytes)) == zlib.crc32(bytes(num_bytes))
    flipped = bytearray(data)
    for place in {0, num_bytes // 3, num_bytes - 1} if num_bytes else ():
        flipped[place] ^= 1 << (place % 8)
        assert checksum(flipped) == zlib.crc32(flipped) != zlib.crc32(data)
        flipped[place] ^= 1 << (place % 8)


def test_safetensors_files(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors = {key: value for key, value in content().items() if isinstance(value, torch.Tensor) and key != "tied"}
    path = tmp_path / "x.safetensors"
    written = write_safetensors(path, {k: streamed(v) for k, v in tensors.items()}, {"format": "pt"})
    assert written.crc32 == zlib.crc32(path.read_bytes())
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors) and file.metadata() == {"format": "pt"}
        for key, value in tensors.items():
            assert torch.equal(file.get_tensor(key), value), key


def test_files_of_the_old_stream_format_are_read(tmp_path: Path) -> None:
    torch.save({"weight": WEIGHT}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(read_torch_file(tmp_path / "x.pt")["weight"], WEIGHT)


def test_missing_truncated_and_flipped_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.raises(CheckpointError, match="x.pt: this file of the checkpoint is missing"):
        read_torch_file(path)
    write_torch_file(path, content())
    whole = path.read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="x.pt: "):
            read_torch_file(path)
    place = whole.index(WEIGHT.numpy().tobytes()) + 5
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    with pytest.raises(CheckpointError, match="'x/data/0' differs from its checksum"):
        check_records(path)
