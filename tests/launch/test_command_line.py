"""`hf-zero launch` as run by a user on one machine: ranks, failures, signals, logs, and errors."""

from __future__ import annotations

import configparser
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.launching import PAGE, section
from hf_zero.launch import command_line
from hf_zero.launch.children import InterruptFilter, last_words
from hf_zero.launch.command_line import choose_backend, chosen_world, listed_world, main, parse, travelling_variables

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "hf_zero", "launch"]
# Each rank writes its environment and arguments to its own file.
TELL = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES GIVEN".split()
told = {name: os.environ.get(name) for name in names}
told |= {"arguments": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0)), "folder": os.getcwd()}
json.dump(told, open(f"told{os.environ['RANK']}", "w"))
print("rank", os.environ["RANK"], "was here")
"""


def run(folder: Path, *words: str, script: str = TELL, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "HOME": str(folder), **variables}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.run(
        [*LAUNCH, *words], cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=240
    )


def told(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("told*"))]


def hear_signals() -> None:
    """Signals ignored by a run under nohup, or in the background of a script, are also ignored by its children."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def launching(
    folder: Path, words: Sequence[str], script: str, ready: str, ranks: int, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A launcher of which each rank has written a file that matches `ready`, or which has ended."""
    (folder / "script.py").write_text(script)
    command = [*LAUNCH, *words, "script.py"]
    launcher = subprocess.Popen(command, cwd=folder, preexec_fn=hear_signals, text=True, **options)
    try:
        deadline = time.monotonic() + 200
        while len(list(folder.glob(ready))) < ranks and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        yield launcher
    finally:
        launcher.kill()


def test_every_rank_is_told_its_place(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("GIVEN='$(touch evil)'\n")
    done = run(tmp_path, "--num_gpus", "2", "--master_port", "29511", "script.py", "--a", "$(touch evil); b")
    assert done.returncode == 0, done.stderr
    ranks = told(tmp_path)
    assert [rank["RANK"] for rank in ranks] == ["0", "1"] and [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
    for index, rank in enumerate(ranks):
        common = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        assert common.items() <= rank.items() and rank["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert rank["GIVEN"] == "$(touch evil)"
        assert rank["arguments"] == [f"--local_rank={index}", "--a", "$(touch evil); b"]
    assert sorted(done.stdout.splitlines()) == ["rank 0 was here", "rank 1 was here"]
    assert not (tmp_path / "evil").exists()


def test_devices_are_those_that_are_visible(tmp_path: Path) -> None:
    done = run(tmp_path, "--no_local_rank", "script.py", CUDA_VISIBLE_DEVICES="2,GPU-aa")
    assert done.returncode == 0, done.stderr
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in told(tmp_path)] == ["2,GPU-aa"] * 2
    assert told(tmp_path)[0]["arguments"] == []


def test_one_host_of_several_started_by_hand(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("first slots=2\nsecond slots=4\n")
    words = ["--hostfile", "hosts", "--no_ssh", "--node_rank", "1", "--include", "first@second:1,3"]
    done = run(tmp_path, *words, "script.py")
    assert done.returncode == 0, done.stderr
    ranks = told(tmp_path)
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"]) for rank in ranks] == [
        ("2", "0", "4"),
        ("3", "1", "4"),
    ]
    assert ranks[0]["MASTER_ADDR"] == "first" and ranks[0]["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_modules_programs_and_cores(tmp_path: Path) -> None:
    assert run(tmp_path, "--num_gpus", "1", "--module", "script").returncode == 0
    assert told(tmp_path)[0]["arguments"] == ["--local_rank=0"]
    done = run(tmp_path, "--num_gpus", "2", "--no_python", "--no_local_rank", "/bin/echo", "a  b")
    assert done.stdout == "a  b\na  b\n"
    core = str(min(os.sched_getaffinity(0)))
    bound = run(tmp_path, "--num_gpus", "1", "--bind_cores_to_rank", "--bind_core_list", core, "script.py")
    assert bound.returncode == 0 and told(tmp_path)[0]["cores"] == [int(core)]


def test_the_first_failure_is_what_is_seen_last(tmp_path: Path) -> None:
    script = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
print(f"rank {rank} begins", flush=True)
if rank == "1":
    while not (pathlib.Path("0").exists() and pathlib.Path("2").exists()):
        time.sleep(0.01)
    sys.exit("the disk of rank 1 is full")
pathlib.Path(rank).touch()
time.sleep(600)
"""
    done = run(tmp_path, "--num_gpus", "3", "script.py", script=script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-3:] == [
        "hf-zero launch: rank 1 on localhost failed first (exit status 1). Its last output:",
        "  rank 1 begins",
        "  the disk of rank 1 is full",
    ]


def test_the_error_of_a_rank_is_not_buried_under_its_output(tmp_path: Path) -> None:
    """The last sixty lines of the rank that failed first were printed again below the output of all ranks, so that its
    error, in a traceback through many calls, was far above the end."""
    script = """
import sys
def deep(number):
    if number:
        deep(number - 1)
    elif True:
        raise ValueError("the disk is full\\n  fix: free some space")
for line in range(50):
    print("step", line, file=sys.stderr)
try:
    deep(3)
except ValueError as error:
    raise RuntimeError("training failed: " + str(error)) from error
"""
    done = run(tmp_path, "--num_gpus", "1", "script.py", script=script)
    *_, last = done.stderr.split("hf-zero launch: ")
    assert last.splitlines() == [
        "rank 0 on localhost failed first (exit status 1). Its last output:",
        f'    File "{tmp_path}/script.py", line 13, in <module>',
        '      raise RuntimeError("training failed: " + str(error)) from error',
        "  RuntimeError: training failed: the disk is full",
        "    fix: free some space",
    ]


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """Every rank printed the traceback of its KeyboardInterrupt."""
    script = """
import os, pathlib, sys, time
pathlib.Path("ready" + os.environ["RANK"]).touch()
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("saving what there is", file=sys.stderr)
    raise
"""
    with launching(tmp_path, ["--num_gpus", "3"], script, "ready?", 3, stderr=subprocess.PIPE) as launcher:
        time.sleep(0.2)  # the ranks are within `try`
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=200)
    assert launcher.returncode == 128 + signal.SIGINT
    assert said.splitlines()[-4:] == [
        *["saving what there is"] * 3,
        "hf-zero launch: interrupted; 3 ranks of localhost ended",
    ]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"Traceback (most recent call last):\n  File\n    x\n    ^\nKeyboardInterrupt\nbye\n", b"bye\n"),
        (b"10%|##Traceback (most recent call last):\n  File\nKeyboardInterrupt: \n", b"10%|##\n"),
        (b"a\n\nTraceback (most recent call last):\n  File\nOSError: full\n", None),
        (
            b"Traceback (most recent call last):\n  File\nKeyboardInterrupt\n\nDuring handling of the above exception, "
            b"another exception occurred:\n\nTraceback (most recent call last):\n  File\nKeyboardInterrupt\n",
            b"",
        ),
        (
            b" 1%| 3/9[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: KeyboardInterrupt\n\n"
            b"[rank1]: During handling of the above exception, another exception occurred:\n\n"
            b"[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: KeyboardInterrupt\n",
            b" 1%| 3/9\n",
        ),
        (b"[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: OSError: full\n", None),
        (b"Exception ignored in: <f>\nTraceback (most recent call last):\n  File\nKeyboardInterrupt:\n", b""),
        (b"half a line", None),
    ],
)
def test_only_tracebacks_of_an_interrupt_are_taken_out(said: bytes, shown: bytes | None) -> None:
    """Ctrl-C in a training showed the tracebacks of all ranks after all: there torch begins each line with [rank1]."""
    for size in (1, 7, 1000):
        one = InterruptFilter()
        pieces = [one.add(said[at : at + size]) for at in range(0, len(said), size)]
        assert b"".join([*pieces, one.end()]) == (said if shown is None else shown)


def test_the_error_of_a_rank_with_a_process_group_is_cut_like_any_other() -> None:
    """The launcher's last message had the last 24 lines, of which most were the traceback's."""
    lines = ["[rank0]:   File a", "[rank0]:     x()", "[rank0]:   File b", "[rank0]:     y()", "[rank0]: OSError: full"]
    said = "\n".join(["saved", " 1%| 3/9[rank0]: Traceback (most recent call last):", *lines, ""])
    assert last_words(said) == "  File b\n    y()\nOSError: full"


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    script = "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)"
    done = run(tmp_path, "--num_gpus", "2", "script.py", script=script)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 on localhost failed first (killed by SIGKILL), without output." in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    """The launcher forwards them.

    This test itself failed if the tests were started with a signal ignored; and it waited minutes for ranks of a
    launcher that had ended at once, because the interpreter could not import hf_zero.
    """
    script = """
import os, pathlib, signal, sys, time
def heard(number, frame):
    pathlib.Path("heard" + os.environ["RANK"]).write_text(str(number))
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, heard)
pathlib.Path("ready" + os.environ["RANK"]).touch()
time.sleep(600)
"""
    with launching(tmp_path, ["--num_gpus", "2"], script, "ready?", 2) as launcher:
        launcher.send_signal(number)
        assert launcher.wait(timeout=200) == 128 + number
    assert [(tmp_path / f"heard{rank}").read_text() for rank in range(2)] == [str(int(number))] * 2


_LEAVES_A_CHILD = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
path = pathlib.Path("pids" + os.environ["RANK"])
path.with_suffix(".partial").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".partial").rename(path)
time.sleep(600)
"""
# Starts two ranks on this machine and ends with the status of the first one.
_MPIRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[sys.argv.index({sys.executable!r}):]
ranks = []
for rank in "01":
    place = {{"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}}
    place = {{f"OMPI_COMM_WORLD_{{name}}": number for name, number in place.items()}}
    ranks.append(subprocess.Popen(words, env={{**os.environ, **place}}))
for rank in ranks:
    rank.wait()
sys.exit(3)
"""


def with_mpirun(folder: Path) -> tuple[list[str], str]:
    """Options for Open MPI on two slots of this machine, and a PATH with a stand-in for its programs."""
    for name in ("mpirun.openmpi", "ompi_info"):
        (folder / "bin" / name).parent.mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(_MPIRUN)
        (folder / "bin" / name).chmod(0o755)
    (folder / "hosts").write_text("localhost slots=2\n")
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return ["--hostfile", "hosts", "--launcher", "openmpi", "--force_multi"], path


@pytest.mark.parametrize("by", ["launcher", "mpirun"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_launcher(tmp_path: Path, number: signal.Signals, by: str) -> None:
    """The launcher was killed (by the OOM killer, or `kill -9`), and its ranks went on and kept their GPUs' memory:
    nothing can forward SIGKILL."""
    words, path = with_mpirun(tmp_path) if by == "mpirun" else (["--num_gpus", "2"], os.environ["PATH"])
    environment = {**os.environ, "PATH": path}
    with launching(tmp_path, words, _LEAVES_A_CHILD, "pids?", 2, env=environment) as launcher:
        pids = [int(pid) for path in tmp_path.glob("pids?") for pid in path.read_text().split()]
        started = [psutil.Process(pid) for pid in pids]
        launcher.send_signal(number)
        assert launcher.wait(timeout=200) == (-number if number == signal.SIGKILL else 128 + number)
    assert len(started) == 4
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []


def test_the_first_failure_under_mpirun_is_seen_last(tmp_path: Path) -> None:
    """It is reported by the process around each rank, as a line of its output, and the status is that of the rank."""
    words, path = with_mpirun(tmp_path)
    script = "import os, sys\nprint('begins')\nif os.environ['RANK'] == '1': sys.exit('the disk is full')"
    done = run(tmp_path, *words, "script.py", script=script, PATH=path)
    assert done.returncode == 1 and done.stdout == "begins\nbegins\n"
    assert done.stderr.splitlines()[-3:] == [
        f"hf-zero launch: rank 1 on {socket.gethostname()} failed first (exit status 1). Its last output:",
        "  begins",
        "  the disk is full",
    ]
    other = run(tmp_path, *words, "script.py", script="print('ends')", PATH=path)
    assert other.returncode == 3, "that of mpirun, if no rank has failed"


def test_logs_of_ranks_and_the_launchers_number(tmp_path: Path) -> None:
    script = "import os, pathlib; print('I am', os.environ['RANK'])\nprint([*pathlib.Path('/tmp').glob('*.deepspeed')])"
    done = run(tmp_path, "--num_gpus", "2", "--save_pid", "--enable_each_rank_log", "logs", "script.py", script=script)
    assert done.returncode == 0 and done.stdout == ""
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name[14:] for log in logs] == ["_rank0.log", "_rank1.log"]
    said, numbers = logs[1].read_text().splitlines()
    assert said == "I am 1" and numbers != "[]"


@pytest.mark.processes  # some errors come from processes started by the launcher
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--autotuning", "tune", "x.py"], "the script's arguments name no config"),
        (["--include", "a", "--num_gpus", "1", "x.py"], "replace --num_nodes and --num_gpus: leave out the latter"),
        (["--include", "a", "--exclude", "a", "x.py"], "are mutually exclusive"),
        (["--module", "--no_python", "x.py"], "give only one of them"),
        (["--bind_core_list", "0", "x.py"], "no effect without --bind_cores_to_rank"),
        (["--bind_cores_to_rank", "--bind_core_list", "1-0", "--num_gpus", "1", "x.py"], "must be ascending"),
        (["--master_port", "0", "x.py"], "is not a valid port"),
        (["--num_gpus", "two", "x.py"], "invalid int value: 'two'"),
        (["--num_gpus", "-2", "x.py"], "--num_gpus -2 must be between"),
        (["--num_nodes", "2", "--num_gpus", "1", "x.py"], "needs a hostfile"),
        (["--hostfile", "None", "--launcher", "openmpi", "x.py"], "give --deepspeed_hostfile FILE"),
        (["--hostfile", "none", "x.py"], "'none' cannot be read"),
        (["--launcher", "bsub", "--num_gpus", "1", "x.py"], "'bsub' must be one of pdsh, openmpi"),
        (["--launcher", "pdsh", "--force_multi", "--num_gpus", "1", "x.py"], "needs a hostfile that names them"),
        (["--launcher", "slurm", "x.py"], "needs a hostfile or a Slurm allocation"),
        (["--launcher", "torchrun", "--num_gpus", "1", "--bind_cores_to_rank", "x.py"], "it has --numa-binding"),
        (["--hostfile", "two", "--launcher", "mpich", "--ssh_port", "2", "x.py"], "--ssh_port is not supported with"),
        (["--hostfile", "two", "--launcher", "openmpi", "--venv_script", "v", "x.py"], "activate it beforehand"),
        (["--hostfile", "two", "--launcher", "local", "x.py"], "the job has 2 hosts"),
        (["--hostfile", "two", "--no_ssh", "x.py"], "--node_rank -1 must be its index in the hostfile, from 0 to 1"),
        (["--hostfile", "two", "--launcher_args", "'", "--no_ssh", "x.py"], "No closing quotation"),
        (["--num_gpus", "1", "--no_python", "./none"], "'./none' cannot be started"),
        (["--enable_each_rank_log", "two", "--num_gpus", "1", "x.py"], "is not a writable folder"),
        ([], "required"),
    ],
)
def test_what_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two").write_text("a slots=2\nb slots=2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    assert main(words) == 2
    said = capfd.readouterr().err
    assert message in said and said.startswith("hf-zero launch: ")


@pytest.mark.parametrize("words", [["--help"], ["--num_gpus", "1", "--no_python", "--no_local_rank", "echo", "begun"]])
def test_the_launcher_loads_only_what_it_needs(words: list[str]) -> None:
    """Ranks began half a second after `hf-zero launch`. For most of it the launcher imported pydantic, because of the
    extra that restarts ranks, which was not asked for."""
    check = f"import sys; from hf_zero.__main__ import main\ntry: main(['launch', *{words}])\nexcept SystemExit: pass\n"
    check += "assert not {'torch', 'transformers', 'accelerate', 'numpy', 'pydantic'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0 and ("--bind_cores_to_rank" in done.stdout or done.stdout == "begun\n"), done.stderr


def test_the_page_has_what_starts_take() -> None:
    assert section() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "hosts", "expected"),
    [
        ([], 2, "pdsh"),
        ([], 1, "local"),
        (["--force_multi"], 1, "pdsh"),
        (["--launcher", "OpenMPI"], 2, "openmpi"),
        (["--launcher", "openmpi"], 1, "local"),
        (["--launcher", "slurm"], 1, "slurm"),
        (["--launcher", "standard"], 2, "standard"),
        (["--no_ssh", "--launcher", "openmpi"], 2, "nossh"),
        (["--num_nodes", "1"], 2, "local"),
    ],
)
def test_who_starts_the_ranks(words: list[str], hosts: int, expected: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("".join(f"h{host} slots=2\n" for host in range(hosts)))
    options = parse(["--hostfile", str(tmp_path / "hosts"), *words, "x.py"])
    listed = listed_world(options, {})
    world = chosen_world(options, listed, {})
    assert choose_backend(options, world, has_hosts=listed is not None).name == expected


@pytest.mark.processes  # Python counts GPUs in a separate process
def test_a_machine_without_gpus_has_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_COUNT", "print(0)")
    assert chosen_world(parse(["x.py"]), None, {}).num_ranks == 1
    monkeypatch.setattr(command_line, "_COUNT", "print(8)")
    assert chosen_world(parse(["x.py"]), None, {}).num_ranks == 8


def test_this_folder_comes_first_for_python(tmp_path: Path) -> None:
    assert travelling_variables({"PYTHONPATH": "/a"}, str(tmp_path))["PYTHONPATH"] == f"{tmp_path}:/a"


def test_the_commands_that_are_installed() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["options.entry_points"]["console_scripts"].strip().splitlines()
    places = dict(line.split(" = ") for line in lines)
    assert places.keys() == {"hf-zero", "deepspeed", "ds_report"}
    for place in places.values():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
