"""Exported variables, cores shared by ranks, and rank environments of MPI and Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero.launch import LaunchError
from hf_zero.launch.job import inherited, parse_cores, parse_env_file, read_env_files, share_cores
from hf_zero.rank_environment import (
    RankEnvironment,
    find_rank_environment,
    first_host,
    set_rank_environment,
    tasks_per_node,
)


def test_known_variables_travel() -> None:
    environment = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "UCX_TLS": "tcp", "MV2_X": "1", "MLFLOW_URI": "u"}
    environment |= {"HF_ZERO": "1", "GLOO_SOCKET_IFNAME": "eth1", "DEEPSPEED_TIMEOUT": "45"}
    rest = {"HOME": "/root", "SECRET": "s", "NCCL_A;reboot": "1", "BASH_FUNC_x%%": "() { :; }"}
    assert inherited(environment | rest) == environment


def test_env_files() -> None:
    text = (
        b"A=1\n\n# no\nexport B = two words \nC='$(reboot)'\nD=\"x\"\nE=\nF=a=b\nA=2\nBASH_FUNC_f%%=() { :; }\nG=\xff\n"
    )
    assert parse_env_file(text, "f") == {
        "A": "2", "B": "two words", "C": "$(reboot)", "D": "x", "E": "", "F": "a=b", "G": "\udcff",
    }  # fmt: skip


@pytest.mark.parametrize("line", [b"no equals", b"=x", b"1A=x", b"A B=x", b"A;reboot=1", b"$(x)=1", b"A\0=1"])
def test_lines_that_are_no_variables(line: bytes) -> None:
    with pytest.raises(LaunchError, match="f, line 2: .* should read NAME=VALUE"):
        parse_env_file(b"A=1\n" + line, "f")


def test_a_zero_byte_is_refused() -> None:
    with pytest.raises(LaunchError, match="null byte"):
        parse_env_file(b"A=x\0y", "f")


def test_files_of_home_and_folder(tmp_path: Path) -> None:
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "home/.deepspeed_env").write_text("A=home\nB=home\n")
    (tmp_path / "here/.deepspeed_env").write_text("A=here\n")
    (tmp_path / "here/other").write_text("A=other\n")
    folders = [tmp_path / "home", tmp_path / "here"]
    assert read_env_files({}, folders) == {"A": "here", "B": "home"}
    assert read_env_files({"DS_ENV_FILE": "other"}, folders) == {"A": "other"}
    assert read_env_files({"DS_ENV_FILE": str(tmp_path / "here/other")}, folders) == {"A": "other"}
    assert read_env_files({"DS_ENV_FILE": "none"}, folders) == {}


def test_cores() -> None:
    assert parse_cores("0,2-4,6") == (0, 2, 3, 4, 6)
    assert [share_cores(range(7), 3, rank) for rank in range(3)] == [(0, 1), (2, 3), (4, 5)]
    for words in ("", "a", "1-", "3-1", "1,1", "0-3,2", "-1", "0-99999999"):
        with pytest.raises(LaunchError, match="--bind_core_list"):
            parse_cores(words)
    with pytest.raises(LaunchError, match="4 ranks cannot share 3 cores"):
        share_cores(range(3), 4, 0)


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (OPEN_MPI, RankEnvironment(3, 4, 1, 2, "Open MPI")),
        (HYDRA, RankEnvironment(1, 2, 1, 2, "MPICH or Intel MPI")),
        (SLURM, RankEnvironment(3, 4, 1, 2, "Slurm", "gpu07")),
        ({**SLURM, **OPEN_MPI}, RankEnvironment(3, 4, 1, 2, "Open MPI")),
        # A batch script is not a rank: srun has not started it.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, None),
    ],
)
def test_rank_environments(environment: dict[str, str], expected: RankEnvironment | None) -> None:
    assert find_rank_environment(environment) == expected


def test_a_rank_environment_becomes_torchruns_variables() -> None:
    environment = dict(SLURM)
    set_rank_environment(environment, 29500)
    assert {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("gpu07", "29500")
    alone = dict(HYDRA)
    set_rank_environment(alone, 1)
    assert alone["MASTER_ADDR"] == "127.0.0.1"
    told = {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"}
    set_rank_environment(told, 1)
    assert told["RANK"] == "0"  # an explicit setting has priority
    with pytest.raises(ValueError, match="export MASTER_ADDR"):
        set_rank_environment(dict(OPEN_MPI), 1)


def test_rank_environments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK=4 and OMPI_COMM_WORLD_SIZE=4"):
        find_rank_environment({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"})
    with pytest.raises(ValueError, match="PMI_RANK='x' should be a whole number"):
        find_rank_environment({**HYDRA, "PMI_RANK": "x"})


def test_slurms_short_forms() -> None:
    assert first_host("gpu[07-09,12],login1") == "gpu07"
    assert first_host("a-1.b,c") == "a-1.b"
    assert first_host("rack[1-2]n") == "rack1n"
    assert first_host("") is None
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
