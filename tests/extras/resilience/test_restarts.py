"""`hf-zero launch --max_restarts` on one machine: when ranks restart, how often, and with which variables."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from hf_zero.extras.resilience.restarts import newest_update
from tests.launch.test_command_line import LAUNCH, run

FAILS_ONCE = "test -e again && exec touch done; touch again; echo $MASTER_PORT; kill -9 $$"


def words(most: int, script: str, *more: str) -> list[str]:
    """One rank that runs a shell script, and restarts `most` times."""
    flags = ["--num_gpus", "1", "--max_restarts", str(most), *more, "--no_python", "--no_local_rank"]
    return [*flags, "sh", "-c", script]


def test_ranks_start_again_with_another_port(tmp_path: Path) -> None:
    done = run(tmp_path, *words(2, FAILS_ONCE))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists() and done.stdout == "29500\n"
    assert "rank 0 on localhost failed first (killed by SIGKILL): restarting all ranks (restart 1 of 2)" in done.stderr
    (tmp_path / "again").unlink()
    other = run(tmp_path, *words(1, "test -e again && echo $MASTER_PORT && exit; touch again; exit 1"))
    assert other.returncode == 0 and other.stdout != "29500\n" and other.stdout.strip().isdigit()


def test_they_start_no_more_often_than_they_may(tmp_path: Path) -> None:
    done = run(tmp_path, *words(2, "echo . >> starts; exit 3"))
    assert done.returncode == 3 and len((tmp_path / "starts").read_text().splitlines()) == 3
    assert "ranks have been restarted as often as --max_restarts 2 allows" in done.stderr


def test_an_error_of_the_script_is_not_tried_over_and_over(tmp_path: Path) -> None:
    """A script with a wrong import was restarted a hundred times with --max_restarts 100. Repeated identical errors now
    end the job; there is no checkpoint in host memory yet that would show progress."""
    done = run(tmp_path, *words(100, "echo . >> starts; echo NameError >&2; exit 1"))
    assert done.returncode == 1 and len((tmp_path / "starts").read_text().splitlines()) == 2
    assert "a rank has failed with an error twice before a state was kept" in done.stderr
    (tmp_path / "starts").unlink()
    other = "echo . >> starts; wc -l starts >&2; test $(wc -l < starts) = 4"
    assert run(tmp_path, *words(100, other)).returncode == 0, "what goes wrong differs"


def test_a_rank_that_is_stopped_counts_as_dead(tmp_path: Path) -> None:
    stops = "test -e again && exit; touch again; kill -STOP $$"
    done = run(tmp_path, *words(1, stops, "--stopped_timeout", "0.3"))
    assert done.returncode == 0, done.stderr
    assert "rank 0 has been stopped for 0.3 s" in done.stderr


def test_ctrl_c_ends_what_could_start_again(tmp_path: Path) -> None:
    command = [*LAUNCH, *words(5, "echo begun; exec sleep 100")]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and b"start again" not in said


def test_restarts_are_for_one_machine(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    done = run(tmp_path, "--hostfile", "hosts", "--launcher", "mpich", "--max_restarts", "1", "script.py")
    assert done.returncode == 2 and "--launcher torchrun --launcher_args '--max-restarts N'" in done.stderr
    assert run(tmp_path, "--max_restarts", "-1", "script.py").returncode == 2
    assert "without --max_restarts" in run(tmp_path, "--standby", "script.py").stderr
    hosts = ["--hostfile", "hosts", "--no_ssh", "--node_rank", "0", "--max_restarts", "1", "--standby"]
    assert "use --spare for a whole spare machine" in run(tmp_path, *hosts, "script.py").stderr


def test_the_log_of_a_rank_keeps_what_it_said_before(tmp_path: Path) -> None:
    script = "echo started; " + FAILS_ONCE
    assert run(tmp_path, *words(2, script, "--enable_each_rank_log", "logs")).returncode == 0
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text().splitlines()[::2] == ["started", "started"]


def test_the_newest_update_is_that_of_the_last_training(tmp_path: Path) -> None:
    assert newest_update(tmp_path) is None
    for training, step in (("training-9", 70), ("training-10", 3)):
        (tmp_path / training / "0").mkdir(parents=True)
        (tmp_path / training / "0" / "rank-0.json").write_text(json.dumps({"step": step}))
    (tmp_path / "training-10" / "0" / "rank-1.json").write_text("")  # its rank was killed
    assert newest_update(tmp_path) == 3
