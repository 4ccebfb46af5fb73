"""Unit tests of checkpoint parts: atomic file replacement, background saves, plain objects, element lines."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from hf_zero.checkpoint.arena import Arena
from hf_zero.checkpoint.background import BackgroundSave, Snapshot
from hf_zero.checkpoint.consolidate import save_whole_weights
from hf_zero.checkpoint.files.stream import Arriving, Awaited, Streamed, Written, into_place, streamed, write_small
from hf_zero.checkpoint.files.torch_file import ALIGN_BYTES, archive_headers, place_records, plain
from hf_zero.checkpoint.save import Exchange, Placed, join
from hf_zero.checkpoint.transaction import ZERO_TO_FP32
from hf_zero.checkpoint.view import StateElements, by_parameter
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.errors import CheckpointError
from hf_zero.layout.reshard import Copy, Extent


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    write_small(path, b"first")
    write_small(path, b"second")
    assert path.read_bytes() == b"second" and list(tmp_path.iterdir()) == [path]


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")

    def half(partial: Path) -> Written:
        partial.write_bytes(b"ne")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        into_place(path, half)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_finished_file_goes_under_its_own_name(tmp_path: Path) -> None:
    def whole(partial: Path) -> Written:
        partial.write_bytes(b"new")
        return Written(partial.name, 3, 7)

    assert into_place(tmp_path / "model.pt", whole) == Written("model.pt", 3, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_records_lie_where_the_plan_says_and_zipfile_reads_them() -> None:
    contents = [("a/data.pkl", b"x" * 10), ("a/version", b"3\n"), ("a/data/0", b"")]
    members = place_records(contents)
    assert all(member.offset % ALIGN_BYTES == 0 for member in members)
    archive = bytearray(4096)
    for record in [
        *members,
        *archive_headers(members, [zlib.crc32(c) for _, c in contents]),
    ]:
        assert isinstance(record.content, bytes)
        archive[record.offset : record.offset + record.num_bytes] = record.content
        end = record.offset + record.num_bytes
    with zipfile.ZipFile(io.BytesIO(bytes(archive[:end]))) as read:
        assert read.testzip() is None
        assert [(name, read.read(name)) for name in read.namelist()] == contents


def test_a_background_save_that_fails_says_so_once() -> None:
    save, done = BackgroundSave(), []

    def fail() -> None:
        raise ValueError("broken")

    save.start(lambda: done.append(1))
    save.wait()
    assert done == [1]
    save.start(fail)
    with pytest.raises(CheckpointError, match="broken"):
        save.wait()
    save.wait()


def test_copies_for_a_background_save_are_apart_and_tied_tensors_stay_one() -> None:
    weight = torch.ones(3)
    copied = Snapshot(Arena(), None).keep(OrderedDict(a=weight, b=[weight, 5], c=streamed(weight)))
    weight.zero_()
    assert isinstance(copied, OrderedDict) and copied["a"] is copied["b"][0] and copied["b"][1] == 5
    assert copied["a"].tolist() == copied["c"].materialise().tolist() == [1, 1, 1]


def test_batches_that_end_before_the_next_one_are_told_apart() -> None:
    """An asynchronous save sometimes contained values of another state: arrived batches were identified by their
    address, which the next batch reused after the previous one had been freed."""
    first, second = (Awaited(torch.float32, (4,)) for _ in range(2))
    content = streamed(torch.zeros(4))

    def batches() -> Iterator[list[tuple[Awaited, Streamed]]]:
        yield [(first, content)]
        object.__setattr__(content, "parts", (torch.ones(4),))  # another object at the same address
        yield [(second, content)]

    copied = Snapshot(Arena(), None).keep(Arriving([first, second], batches()))
    assert [each.materialise().tolist() for each in copied] == [[0] * 4, [1] * 4]


def test_plain_objects_are_builtins() -> None:
    class Name(str):
        pass

    made = plain({Name("a"): UserDict(b=numpy.float32(0.5)), "c": (True, None, {numpy.int64(3)})})
    assert made == {"a": {"b": 0.5}, "c": (True, None, {3})}
    assert [type(made["a"]), type(made["a"]["b"]), type(next(iter(made)))] == [dict, float, str]


def test_the_script_in_a_checkpoint_folder_compiles() -> None:
    compile(ZERO_TO_FP32, "zero_to_fp32.py", "exec")
    assert ZERO_TO_FP32.startswith("#!/usr/bin/env python\n")


def test_elements_are_found_wherever_they_lie() -> None:
    extents = by_parameter([Extent(0, 3, 2, 1, 0, 1), Extent(0, 0, 3, 0, 0, 2)])
    assert [extent.start for extent in extents[0]] == [0, 3]
    elements = StateElements(extents, {(0, 0): torch.arange(10.0), (1, 0): torch.arange(20.0, 30.0)})
    assert [part.tolist() for part in elements.parts(0, 1, 5)] == [[3, 4], [21, 22]]
    assert elements.parts(0, 5, 9) == []


def test_what_no_piece_covers_is_zero() -> None:
    pieces = [Placed(4, torch.tensor([5.0])), Placed(1, torch.tensor([2.0, 3.0]))]
    assert join(pieces, 6, torch.float32).materialise().tolist() == [0, 2, 3, 0, 5, 0]


def test_elements_that_stay_on_their_rank_are_views() -> None:
    exchange = Exchange([Copy(0, 1, 2, 0, 0, 5, 3)], LoneCollectives())
    buffers = [torch.zeros(1), torch.arange(8.0)]
    (placed,) = exchange.fill(buffers)[0]
    assert exchange.is_local and placed.offset == 5
    assert placed.values.tolist() == [2, 3, 4] and placed.values.data_ptr() == buffers[1][2:].data_ptr()


def test_whole_weights_are_the_state_dict_in_its_order_tied_ones_stored_once(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(3, 2, bias=False), "norm": nn.BatchNorm1d(2), "b": nn.Linear(3, 2, bias=False)}
    )
    model["b"].weight = model["a"].weight
    model["norm"].bias.requires_grad_(False)
    save_whole_weights(model, tmp_path / "folder" / "model.bin", LoneCollectives(), exclude_frozen=False)
    read = torch.load(tmp_path / "folder" / "model.bin", weights_only=True)
    assert list(read) == list(model.state_dict())
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
    assert read["a.weight"].data_ptr() == read["b.weight"].data_ptr()
    save_whole_weights(model, tmp_path / "trained.bin", LoneCollectives(), exclude_frozen=True)
    assert set(read) - set(torch.load(tmp_path / "trained.bin", weights_only=True)) == {"norm.bias"}


def test_whole_weights_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").mkdir()
    with pytest.raises(CheckpointError, match="model.bin"):
        save_whole_weights(nn.Linear(1, 1), tmp_path / "model.bin", LoneCollectives(), exclude_frozen=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]
