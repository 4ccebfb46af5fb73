"""500 malicious hostfiles, filters and variable files: each gives a clear error or a valid job.

They are mutations of valid ones: shell syntax, the syntax of pdsh and ssh, extreme numbers, bytes that are not text.
Accepted ones must be harmless: plain host names, plain variable names, values that arrive unchanged.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_zero.launch import LaunchError
from hf_zero.launch.backends import BACKENDS
from hf_zero.launch.job import Job, Program, inherited, parse_env_file
from hf_zero.launch.relay import BackendOptions
from hf_zero.launch.world import World, exclude, include, parse_hostfile

CASES = 500
PIECES = [
    *(b"$(touch evil)", b"`touch evil`", b"; touch evil", b"&& touch evil", b"| sh", b"> evil", b"\n", b"\r", b"\0"),
    *(b"-oProxyCommand=touch${IFS}evil", b"^/etc/passwd", b"/root", b"%h", b"%n", b"%%", b"a[1-9999999]", b"*", b"?"),
    *(b"~", b"!", b"#", b"@", b":", b",", b"=", b"==", b" ", b"\t", b"'", b'"', b"\\", b"-", b".", b"..", b"()", b"{}"),
    *(b"slots=", b"slots=0", b"slots=-1", b"slots=1e9", b"slots=" + b"9" * 400, b"max_slots=4", b"a" * 300, b"0", b"1"),
    *(b"node1", b"node2", b"99", b"\xff\xfe", "\u00df".encode(), "\u202e".encode(), "\u00a0".encode()),
    *("\u2028".encode(), b"\x1b[31m", b"PATH", b"LD_PRELOAD=/evil.so", b"export "),
]
HOSTFILE = b"node1 slots=2\nnode2 slots=4\n# the end\n"
FILTERS = [b"node1", b"node1:0@node2:1,2", b"node2:0-3", b"node2@node1:1"]
VARIABLES = b"NCCL_DEBUG=INFO\nexport A='b c'\n\n# note\nPYTHONPATH=/x:/y\n"
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# Characters that an error message must not contain: they could move the cursor or end the line.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\u2028\u202e]")


def mutated(text: bytes, dice: random.Random) -> bytes:
    """`text` after one to four changes: parts inserted, removed, doubled or replaced."""
    for _ in range(dice.randint(1, 4)):
        start, end = sorted(dice.choices(range(len(text) + 1), k=2))
        end = min(end, start + 12)
        kind = dice.randrange(4)
        if kind < 2:
            middle = dice.choice(PIECES) + text[start:end] * kind
        else:
            middle = text[start:end] * (2 * kind - 4)  # removed or doubled
        text = text[:start] + middle + text[end:]
    return text


def check_message(error: LaunchError) -> None:
    assert 10 < len(str(error)) < 600 and not UNPRINTABLE.search(str(error)), repr(str(error))


def check_world(world: World) -> None:
    assert world.nodes and world.num_ranks == len(list(world.places()))
    for node in world.nodes:
        assert HOST.fullmatch(node.name) and len(node.name) <= 253
        assert 1 <= len(node.slots) <= 4096 and all(slot.isdecimal() for slot in node.slots)


@pytest.mark.parametrize("shard", range(5))
def test_hostile_hostfiles(shard: int) -> None:
    accepted = 0
    for case in range(CASES // 5):
        text = mutated(HOSTFILE, random.Random(shard * CASES + case))
        try:
            check_world(parse_hostfile(text, "'hosts'"))
            accepted += 1
        except LaunchError as error:
            check_message(error)
    assert 0 < accepted < CASES // 5


@pytest.mark.parametrize("apply", [include, exclude])
def test_hostile_filters(apply: object) -> None:
    world = parse_hostfile(HOSTFILE)
    for case in range(CASES // 2):
        dice = random.Random(case)
        words = mutated(dice.choice(FILTERS), dice).decode("utf-8", "surrogateescape")
        try:
            left = apply(world, words)  # type: ignore[operator]
        except LaunchError as error:
            check_message(error)
            continue
        check_world(left)
        assert set(left.names) <= set(world.names)
        assert all(set(node.slots) <= {"0", "1", "2", "3"} for node in left.nodes)


def test_hostile_files_of_variables_reach_a_remote_shell_as_they_are(tmp_path: Path) -> None:
    world = parse_hostfile(HOSTFILE)
    for case in range(CASES):
        text = mutated(VARIABLES, random.Random(case))
        try:
            found = parse_env_file(text, "'.deepspeed_env'")
        except LaunchError as error:
            check_message(error)
            continue
        assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and "\0" not in value for name, value in found.items())
        job = Job(Program("train.py", ()), world, "node1", 29500, token="t", variables=found)
        assert Job.decode(job.encode()).variables == found
        remote = BACKENDS["pdsh"]().command(job, BackendOptions(has_hosts=True), ["pdsh", "ssh"]).command[-1]
        remote = remote.removesuffix(" %h").replace("%%", "%")
        known = [f"{name}={value}" for name, value in sorted(found.items()) if name.startswith(("PYTHON", "HF_ZERO"))]
        expected = ["exec", *(["env", *known] if known else []), sys.executable]
        expected += ["-u", "-m", "hf_zero.launch.ranks", job.encode(), "--host"]
        assert shlex.split(remote) == expected
        if case % 25 == 0:
            said = subprocess.run(
                ["sh", "-c", f"printf '%s\\0' {remote}"], cwd=tmp_path, capture_output=True, check=True
            )
            assert said.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in expected]
    assert list(tmp_path.iterdir()) == []


def test_hostile_names_of_inherited_variables() -> None:
    for case in range(CASES):
        name = mutated(b"NCCL_DEBUG", random.Random(case)).decode("utf-8", "surrogateescape")
        assert all(re.fullmatch(r"[A-Za-z0-9_]+", kept) for kept in inherited({name: "x"}))
