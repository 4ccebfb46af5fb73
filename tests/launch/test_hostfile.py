"""Hostfiles and filters: their meaning, and errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero.launch import LaunchError
from hf_zero.launch.world import Node, RankPlace, World, exclude, include, limit, parse_hostfile, read_hostfile

TWO = parse_hostfile(b"worker-0 slots=2\nworker-1 slots=3\n")


def slots(world: World) -> dict[str, str]:
    """A short form for tables."""
    return {node.name: "".join(node.slots) for node in world.nodes}


def test_lines_comments_and_blanks() -> None:
    text = b"\xef\xbb\xbf# cluster\r\n\r\n  b.example.org   slots=2  # big\r\na-1\tslots = 1\nc_2 slots=3 max_slots=8"
    assert slots(parse_hostfile(text)) == {"b.example.org": "01", "a-1": "0", "c_2": "012"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "lists no host"),
        (b"# nothing\n\n", "lists no host"),
        (b"a slots=1\nb\n", r"line 2: 'b' should read like"),
        (b"a slots=two", "should read like"),
        (b"a slots=-1", "should read like"),
        (b"a slots=0", "must be between 1 and 4096"),
        (b"a slots=99999999999999999999", "must be between 1 and 4096"),
        (b"a slots=1\na slots=2", "line 2: a is listed twice"),
        (b"-oProxyCommand=evil slots=1", "not a plain host name"),
        (b"$(reboot) slots=1", "not a plain host name"),
        (b"root@a slots=1", "not a plain host name"),
        (b"a[1-9] slots=1", "not a plain host name"),
        (b"^hosts slots=1", "not a plain host name"),
        (b"fe80::1 slots=1", "not a plain host name"),
        (b"a%h slots=1", "not a plain host name"),
        (b"\xff\xfe slots=1", "byte 0 is not UTF-8"),
        ("wörker slots=1".encode(), "not a plain host name"),
        (b"a slots=1; rm -rf /", "should read like"),
    ],
)
def test_what_is_no_hostfile(text: bytes, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parse_hostfile(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "is not a file"),
        (Path("/dev/zero"), "not a"),
    ):
        with pytest.raises(LaunchError, match=message):
            read_hostfile(path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("worker-1", {"worker-1": "012"}),
        ("worker-1:0,2@worker-0", {"worker-0": "01", "worker-1": "02"}),  # in the order of the hostfile
        ("worker-1:2,2,0", {"worker-1": "02"}),
        ("worker-1:2@worker-1:0", {"worker-1": "02"}),  # named again: both
    ],
)
def test_include(words: str, expected: dict[str, str]) -> None:
    assert slots(include(TWO, words)) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("worker-0", {"worker-1": "012"}),
        ("worker-1:1", {"worker-0": "01", "worker-1": "02"}),
        ("worker-0:0,1@worker-1:0", {"worker-1": "12"}),
    ],
)
def test_exclude(words: str, expected: dict[str, str]) -> None:
    assert slots(exclude(TWO, words)) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("worker-7", "there is no host 'worker-7' among worker-0, worker-1"),
        ("worker-0:2", "worker-0 has no slot 2, only 0 to 1"),
        ("worker-0:x", "'x' is not a slot"),
        ("worker-0:-1", "'-1' is not a slot"),
        ("worker-0:", "'' is not a slot"),
        ("worker-0@", "there is no host ''"),
        ("worker-0:0:1", "'0:1' is not a slot"),
        ("worker-0:٣", "is not a slot"),
    ],
)
def test_filters_that_name_nothing(words: str, message: str) -> None:
    for apply in (include, exclude):
        with pytest.raises(LaunchError, match=message):
            apply(TWO, words)


def test_nothing_left() -> None:
    with pytest.raises(LaunchError, match="leaves no slot"):
        exclude(TWO, "worker-0@worker-1")


def test_limits() -> None:
    assert slots(limit(TWO, 1, -1)) == {"worker-0": "01"}
    assert slots(limit(TWO, -1, 4)) == {"worker-0": "0123", "worker-1": "0123"}  # not an error: the hostfile has fewer
    for nodes, gpus, message in ((3, -1, "the hostfile lists 2"), (0, -1, "--num_nodes 0"), (-1, 0, "--num_gpus 0")):
        with pytest.raises(LaunchError, match=message):
            limit(TWO, nodes, gpus)


def test_ranks_go_through_the_nodes_in_order() -> None:
    world = World((Node("a", ("3",)), Node("b", ("0", "2"))))
    assert list(world.places()) == [RankPlace(0, 0, 0), RankPlace(1, 1, 0), RankPlace(2, 1, 1)]
    assert world.num_ranks == 3 and world.slots_per_node() is None
