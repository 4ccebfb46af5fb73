"""Argument vectors of every backend: the started command, which no shell may interpret."""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from hf_zero.launch import LaunchError
from hf_zero.launch.backends import BACKENDS
from hf_zero.launch.job import Job, Program, RankCommand
from hf_zero.launch.ranks import rank_command
from hf_zero.launch.relay import BackendOptions
from hf_zero.launch.world import Node, World
from hf_zero.rank_environment import RankEnvironment

WICKED = "$(touch /tmp/x); `reboot` \"'\\ %h %n && |"
EVEN = World((Node("a", ("0", "1")), Node("b", ("0", "1"))))
UNEVEN = World((Node("a", ("0", "1")), Node("b", ("2",))))


def job(world: World = EVEN, **more: object) -> Job:
    program = Program("train.py", ("--note", WICKED))
    variables = {"PYTHONPATH": f"/x:{WICKED}", "NCCL_DEBUG": WICKED}
    return Job(program, world, "10.0.0.1", 29500, token="t", variables=variables, folder="/work", **more)  # type: ignore[arg-type]


def command(name: str, the_job: Job, **request: object) -> RankCommand:
    return BACKENDS[name]().command(the_job, BackendOptions(has_hosts=True, **request), [f"/bin/{name}", "x"])  # type: ignore[arg-type]


def test_every_launcher_has_a_backend_of_its_name() -> None:
    launchers = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm", "torchrun", "standard", "nossh", "local")
    assert tuple(BACKENDS) == launchers
    assert all(backend.name == name for name, backend in BACKENDS.items())


def test_a_job_survives_its_journey() -> None:
    sent = job(UNEVEN, log_folder="/logs", binds_cores=True, core_list="0-1")
    word = sent.encode()
    assert re.fullmatch(r"[\w=-]+", word)  # nothing in it that a shell, pdsh or mpirun would interpret
    assert Job.decode(word) == sent


def test_what_is_no_job() -> None:
    for word in ("", "x", "!!", "e30=", job().encode()[:-8]):
        with pytest.raises(LaunchError, match="not a job"):
            Job.decode(word)


def test_a_job_that_no_command_line_holds() -> None:
    huge = Job(Program("x", ()), EVEN, "a", 1, variables={f"V{n}": str(hash(str(n)) ** 5) for n in range(6000)})
    with pytest.raises(LaunchError, match="remove variables that ranks do not need from .deepspeed_env"):
        huge.encode()


def test_ranks_of_a_node() -> None:
    first, second = job(UNEVEN).on_node(0)
    (third,) = job(UNEVEN).on_node(1)
    assert first.command == (sys.executable, "-u", "train.py", "--local_rank=0", "--note", WICKED)
    wanted = {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_SIZE": "1",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
    }
    wanted |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "2", "NCCL_DEBUG": WICKED}
    assert wanted.items() <= third.environment.items()
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "0,1" and second.environment["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (Program("m", ("a",), is_module=True), [sys.executable, "-u", "-m", "m", "--local_rank=1", "a"]),
        (Program("m", (), takes_local_rank=False), [sys.executable, "-u", "m"]),
        (Program("./m", ("a",), without_python=True, takes_local_rank=False), ["./m", "a"]),
    ],
)
def test_programs(program: Program, expected: list[str]) -> None:
    assert program.command(1) == expected


def test_pdsh_gets_one_word_for_the_remote_shell() -> None:
    words = command("pdsh", job(), ssh_port=2222, launcher_args=["-u", "9"]).command
    assert words[:-1] == ("/bin/pdsh", "-S", "-f", "1024", "-u", "9", "-w", "a,b")
    # The words for host b, after pdsh's substitutions and the remote shell's splitting.
    remote = shlex.split(words[-1].replace("%%", "\0").replace("%h", "b").replace("\0", "%"))
    assert remote[:3] == ["exec", "env", f"PYTHONPATH=/x:{WICKED}"]
    assert remote[3:7] == [sys.executable, "-u", "-m", "hf_zero.launch.ranks"]
    assert Job.decode(remote[7]) == job() and remote[8:] == ["--host", "b"]


def test_pdsh_reads_a_script_first() -> None:
    words = command("pdsh", job(), venv_script="/my env/activate").command
    assert words[-1].startswith(". '/my env/activate' && exec env ")
    environment = command("pdsh", job(), ssh_port=2222).environment
    assert environment["PDSH_RCMD_TYPE"] == "ssh" and environment["PDSH_SSH_ARGS_APPEND"].endswith("-p 2222")


@pytest.mark.parametrize(
    ("name", "world", "placement"),
    [
        ("openmpi", UNEVEN, ["-n", "3", "--host", "a:2,b:1", "--map-by", "slot", "--bind-to", "none"]),
        ("mpich", UNEVEN, ["-n", "3", "-hosts", "a:2,b:1"]),
        ("impi", EVEN, ["-n", "4", "-ppn", "2", "-hosts", "a,b"]),
        ("mvapich", EVEN, ["-n", "4", "-ppn", "2", "-hosts", "a,b"]),
        ("slurm", EVEN, ["--nodes", "2", "--ntasks", "4", "--ntasks-per-node", "2", "--kill-on-bad-exit=1"]),
    ],
)
def test_placement(name: str, world: World, placement: list[str]) -> None:
    words = list(command(name, job(world), launcher_args=["--more"]).command)
    assert words[: 1 + len(placement)] == [f"/bin/{name}", *placement] and "--more" in words
    assert words[-5:-1] == [sys.executable, "-u", "-m", "hf_zero.launch.ranks"]
    assert Job.decode(words[-1]).world == world
    assert not any(WICKED in word and not word.endswith(f"/x:{WICKED}") for word in words)


def test_variables_that_python_needs_travel_in_each_ones_own_way() -> None:
    path = f"/x:{WICKED}"
    assert _follows(command("openmpi", job()).command, "-x", f"PYTHONPATH={path}")
    assert _follows(command("mpich", job()).command, "-genv", "PYTHONPATH", path)
    assert _follows(command("impi", job()).command, "-genv", "I_MPI_PIN", "0")
    assert _follows(command("mvapich", job()).command, "-genv", "MV2_SUPPORT_DL", "1")
    assert command("slurm", job()).environment["PYTHONPATH"] == path


def _follows(words: object, *expected: str) -> bool:
    text = list(words)  # type: ignore[call-overload]
    return any(text[start : start + len(expected)] == list(expected) for start in range(len(text)))


@pytest.mark.parametrize("name", ["impi", "mvapich", "slurm"])
def test_those_that_want_as_many_ranks_everywhere(name: str) -> None:
    with pytest.raises(LaunchError, match="on every"):
        command(name, job(UNEVEN))


def test_slurm_hands_out_devices_itself() -> None:
    with pytest.raises(LaunchError, match="cannot select devices"):
        command("slurm", job(World((Node("a", ("1",)),))))
    sent = Job.decode(command("slurm", job()).command[-1])
    assert "CUDA_VISIBLE_DEVICES" not in sent.of_rank(0).environment


def test_slurm_says_where_rank_0_is() -> None:
    given = Job(Program("x", ()), EVEN, "", 1)
    environment = RankEnvironment(3, 4, 1, 2, "Slurm", "n7")
    assert rank_command(given, environment).environment["MASTER_ADDR"] == "n7"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (None, "mpirun or srun must set the rank"),
        (RankEnvironment(0, 2, 0, 2, "Open MPI"), "Open MPI has started 2 processes instead of 4"),
        (RankEnvironment(1, 4, 0, 2, "Open MPI"), "given rank 1 local rank 0 instead of 1 on a"),
    ],
)
def test_ranks_that_were_placed_otherwise(environment: RankEnvironment | None, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        rank_command(job(), environment)


def test_torchrun_runs_one_nodes_part() -> None:
    words = list(command("torchrun", job(), node_rank=1, launcher_args=["--max-restarts=2"]).command)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[3:8] == [
        "--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500",
    ]  # fmt: skip
    assert words[8:] == ["--max-restarts=2", "train.py", "--note", WICKED]
    with pytest.raises(LaunchError, match="must be its index in the hostfile, from 0 to 1"):
        command("standard", job())
