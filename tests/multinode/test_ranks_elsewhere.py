"""Ranks on other nodes behave like local ones: arguments arrive unchanged, failures are named, signals end them."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.multinode.cluster import AS_ROOT, Cluster, launch_words, run_on, two_nodes, wait_for
from tests.multinode.training import Training

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(600)]
LAUNCHERS = ["pdsh", "openmpi", "mpich"]
WICKED = "a  b $(touch evil) `touch evil` ; touch evil & %h %n %% \" ' \\ * ? ~ | > evil # \u00fc \n end"
TELL = """
import json, os, pathlib, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CUDA_VISIBLE_DEVICES GIVEN NCCL_X".split()
told = {name: os.environ.get(name) for name in names}
told |= {"node": os.uname().nodename, "arguments": sys.argv[2:], "folder": os.getcwd()}
pathlib.Path(sys.argv[1], "told" + os.environ["RANK"]).write_text(json.dumps(told))
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "2":
    print("rank 2 looks for its data")
    sys.exit("rank 2 finds no data")
time.sleep(300)
"""
WAIT = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    time.sleep(1)
"""


def write(folder: Path, script: str) -> Path:
    path = folder / "script.py"
    path.write_text(script)
    return path


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_arguments_and_variables_arrive_as_they_are(
    launcher: str, cluster: Cluster, hostfile: Path, tmp_path: Path
) -> None:
    (tmp_path / "variables").write_text(f"GIVEN={WICKED.partition(chr(10))[0]}\n")
    words = launch_words("--hostfile", hostfile, "--include", "node1:1@node2", "--launcher", launcher)
    words += ["--no_local_rank", write(tmp_path, TELL), tmp_path, WICKED, "", "--x=$HOME"]
    variables = {"NCCL_X": WICKED, "DS_ENV_FILE": str(tmp_path / "variables"), **AS_ROOT}
    assert run_on(cluster[0], words, variables, tmp_path / "launcher") == 0
    told = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in range(3)]
    assert [(rank["node"], rank["LOCAL_RANK"], rank["CUDA_VISIBLE_DEVICES"]) for rank in told] == [
        ("node1", "0", "1"), ("node2", "0", "0,1"), ("node2", "1", "0,1"),
    ]  # fmt: skip
    for number, rank in enumerate(told):
        assert rank["RANK"] == str(number) and rank["WORLD_SIZE"] == "3"
        assert rank["arguments"] == [WICKED, "", "--x=$HOME"]
        assert rank["NCCL_X"] == WICKED and rank["GIVEN"] == WICKED.partition("\n")[0].strip()
    assert not list(tmp_path.glob("evil"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_first_failure_is_seen_last(launcher: str, cluster: Cluster, hostfile: Path, tmp_path: Path) -> None:
    words = launch_words("--hostfile", hostfile, "--launcher", launcher, write(tmp_path, FAIL))
    output = tmp_path / "launcher"
    assert run_on(cluster[0], words, AS_ROOT, output) == 1
    assert output.read_text().splitlines()[-3:] == [
        "hf-zero launch: rank 2 on node2 failed first (exit status 1). Its last output:",
        "  rank 2 looks for its data",
        "  rank 2 finds no data",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_ends_the_ranks_of_all_nodes(
    launcher: str, number: signal.Signals, cluster: Cluster, hostfile: Path, tmp_path: Path
) -> None:
    words = launch_words(
        "--hostfile", hostfile, "--launcher", launcher, "--no_local_rank", write(tmp_path, WAIT), tmp_path
    )
    output = tmp_path / "launcher"
    launched = cluster[0].start(words, AS_ROOT, output)
    until(lambda: len([path for path in tmp_path.glob("pid*") if path.read_text()]) == 4)
    # All nodes share one process table: these are the ranks on all nodes.
    ranks = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(4)]
    launched.send_signal(number)
    assert wait_for([launched], [output]) == [128 + number]
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


def until(condition: object, patience_s: float = 60) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_clones_of_one_machine_are_told_apart(training: Training, hostfile: Path, tmp_path: Path) -> None:
    """Virtual machines from one image have the same boot id: they look like one machine until a socket is tried."""
    (tmp_path / "clones").mkdir()
    with two_nodes(tmp_path / "clones", same_boot_id=True) as nodes:
        words = launch_words("--hostfile", hostfile, *training.words(tmp_path / "run", 4))
        with training.as_on_one_node(tmp_path / "run", nodes[1]):
            assert run_on(nodes[0], words, training.environment, tmp_path / "launcher") == 0
