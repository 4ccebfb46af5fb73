"""Commands that start processes end them with themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hf_zero.launch.children import run

ROOT = Path(__file__).resolve().parents[2]
# A launcher and its rank; the second one takes no notice of SIGTERM, like a rank in a long native call.
_RANK = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_RANK!r}])"
_COMMAND = (
    "import signal, sys; from hf_zero.launch import children; children._GRACE_S = 0.5; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell starts `make test &` with SIGINT ignored
    f"sys.exit(children.run([sys.executable, '-c', {_CHILD!r}]))"
)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_ends_all_processes(number: signal.Signals, status: int) -> None:
    """`timeout 600 python examples/demo.py`: the demo ended after ten minutes, and its ranks trained on for hours.

    Python ends at SIGTERM without its children. Only Ctrl-C reached them, through the terminal. Nothing can forward
    SIGKILL, so another process kills them.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen([sys.executable, "-c", _COMMAND], env=environment, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    rank = psutil.Process(int(command.stdout.readline()))
    family = [*psutil.Process(command.pid).children(recursive=True)]
    assert rank in family and len(family) == 3, "and the process that kills them"
    command.send_signal(number)
    assert command.wait(timeout=30) == status
    gone, alive = psutil.wait_procs(family, timeout=5)
    assert not alive and len(gone) == 3


_GUARD = """
import os, signal, subprocess, sys
from hf_zero.launch.children import Guard
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
with Guard() as guard:
    for number in range(2):
        process = subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        guard.add(process.pid)
        print(process.pid, flush=True)
    guard.remove(process.pid)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_group_that_has_ended_is_not_killed() -> None:
    """Its number may belong to an unrelated group by the time the launcher is killed."""
    command = [sys.executable, "-c", _GUARD]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    killed, other = map(int, done.stdout.split())
    try:
        deadline = time.monotonic() + 30
        while psutil.pid_exists(killed) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not psutil.pid_exists(killed) and psutil.pid_exists(other)
    finally:
        os.kill(other, signal.SIGKILL)


@pytest.mark.processes
def test_the_status_and_the_limit() -> None:
    assert run([sys.executable, "-c", "raise SystemExit(7)"]) == 7
    before = signal.getsignal(signal.SIGTERM)
    started = time.monotonic()
    assert run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.3) is None
    assert time.monotonic() - started < 30 and signal.getsignal(signal.SIGTERM) == before
