"""Restarts of ranks: how often, and from a process that has already imported the script's modules and forks ranks.

A new Python process takes seconds to import torch and transformers, which is most of the time of a restart. Run as

    python -m hf_zero.extras.resilience.restarts SOCKET script.py ...     with Python's arguments, or `-m module ...`
"""

from __future__ import annotations

import ast
import atexit
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from hf_zero.launch.children import Failure, signal_group, start
from hf_zero.launch.job import RankCommand

# Imported by every training run, regardless of its script.
_ALWAYS = ("torch", "torch._dynamo", "hf_zero.api.entry", "hf_zero.extras.resilience.trainer", "transformers.trainer")
TOKEN = "HF_ZERO_TOKEN"
"""Variable: the shared secret of a run on several hosts."""
SUPERVISOR = "HF_ZERO_SUPERVISOR"
"""Variable: the pid of the process that restarts this host's ranks when one fails."""
COPIES = "HF_ZERO_COPIES"
"""Variable: set if that process copies kept states to the next host."""
RESTARTS = "HF_ZERO_RESTARTS"
"""Variable: how often the ranks of several hosts have been restarted."""
_TURN = "HF_ZERO_TURN"  # for standby ranks: path of the file whose creation tells them to start training
WANTED, COPIED, DAMAGED = "copies-wanted", "copied", "damaged"
"""Marker files: a training's slots shall be copied; a slot was copied; a slot's copy shall be fetched back."""
MODULES = "modules"
"""File of a training: names of the modules that a rank has imported by its second update."""
HISTORY = "log_history.jsonl"
"""File of a training: its logs, shared by both slots."""
_MESSAGE_BYTES = 1 << 20
_LOOK_S = 0.5  # interval of checks for the file MODULES
_TURN_S = 0.02
_EARLY_S = 600.0  # an error that occurs twice within this time, with the same last line, is a bug of the script
_INSTALLED = ("site-packages", "dist-packages")
# Waits for a process to end and removes a folder. Runs in its own session, because ranks are killed with theirs.
_REMOVE = """
import os, select, shutil, sys
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
except ProcessLookupError:
    pass
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""


def folder_in_memory(supervisor: int) -> Path:
    """The folder where ranks keep the states from which restarted ranks continue."""
    return Path(f"/dev/shm/hf_zero-{os.getuid()}-{supervisor}")


def own_folder(supervisor: int) -> Path:
    """Create the folder of `folder_in_memory`; it is removed when the process `supervisor` ends.

    Raises:
        OSError: if there is no tmpfs.
    """
    folder = folder_in_memory(supervisor)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVE, str(supervisor), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def replace_text(path: Path, content: str) -> None:
    """Write a file atomically, so that a kill leaves the old or the new content."""
    partial = path.with_suffix(".partial")
    partial.write_text(content)
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file; None if it does not exist or is just being removed."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


class Restarts:
    """Starts the ranks of this host and decides whether they may restart."""

    def __init__(self, most: int, *, stands_by: bool = False) -> None:
        """
        Args:
            most: maximum number of restarts.
            stands_by: keep standby ranks that are ready to train and replace failed ones.
        """
        self._most, self._left = most, most
        self._fork_server: ForkServer | None = None
        self._stands_by, self._standby = stands_by, dict[int, ForkedRank]()
        self._turn = Path()  # the file that standby ranks wait for
        self._failed: tuple[int | None, str] | None = None  # update and last output line of the last failure
        self._begun, self._begun_after = 0.0, -1

    def start(self, command: RankCommand) -> subprocess.Popen[bytes] | ForkedRank:
        command, self._begun = self._own(command), time.monotonic()
        if not ForkServer.can_run(command):
            return start(command)
        try:
            self._fork_server = self._fork_server or ForkServer(command)
            rank = self._standby.pop(command.rank, None) or self._fork_server.ask(command)
            rank.await_start()
            return rank
        except OSError:  # the forking process was killed too; the next call creates a new one
            self.close()
            return start(command)

    def _own(self, command: RankCommand, **more: str) -> RankCommand:
        return replace(command, environment={**command.environment, SUPERVISOR: str(os.getpid()), **more})

    def stand_by(self, commands: Sequence[RankCommand]) -> None:
        """After these ranks have kept an update, start standby ranks, which run the script up to training and wait
        there. Does not block."""
        if not self._stands_by or self._standby or self._fork_server is None:
            return
        folder = folder_in_memory(os.getpid())
        has_imported = any(folder.glob(f"training-*/{MODULES}"))  # so that standby ranks have these modules
        if not has_imported or (newest_update(folder) or -1) <= self._begun_after:
            return
        self._turn = folder / f"turn-{self._left}"
        more = {"MASTER_PORT": _free_port(), _TURN: str(self._turn)}
        with suppress(OSError):  # the forking process was killed; the next start creates a new one
            self._standby = {each.rank: self._fork_server.ask(self._own(each, **more)) for each in commands}
            for pipe in (pipe for rank in self._standby.values() for pipe in (rank.stdout, rank.stderr)):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _MESSAGE_BYTES)  # their output is not read until then

    @property
    def _is_ready(self) -> bool:
        """Whether standby ranks exist and none has ended."""
        return bool(self._standby) and all(rank.poll() is None for rank in self._standby.values())

    def _end_standby(self) -> None:
        for rank in self._standby.values():
            with suppress(OSError):
                rank.await_start()
                signal_group(rank.pid, signal.SIGKILL)
                rank.wait()
            rank.stdout.close()
            rank.stderr.close()
        self._standby = {}

    def prepare(self, command: RankCommand) -> None:
        """Import the modules of `command` before it is started."""
        self._fork_server = ForkServer(command) if ForkServer.can_run(command) else None

    def refusal(self, failure: Failure) -> str:
        """Why ranks do not restart after this failure; empty if they do."""
        if not self._left:
            return f"ranks have been restarted as often as --max_restarts {self._most} allows"
        step, line = newest_update(folder_in_memory(os.getpid())), failure.tail.strip().rpartition("\n")[2]
        is_early = step is None and line and time.monotonic() - self._begun < _EARLY_S
        if failure.code > 0 and (step is not None or is_early):
            failed, self._failed = self._failed, (step, "" if step is not None else line)
            if failed == self._failed:
                when = "before a state was kept" if step is None else f"after update {step}"
                return f"a rank has failed with an error twice {when}: another restart would fail again"
        self._left -= 1
        return ""

    def described(self) -> str:
        step = newest_update(folder_in_memory(os.getpid()))
        where = "" if step is None else f", from host memory after update {step}"
        who = ", in standby processes" if self._is_ready else ""
        return f"{where}{who} (restart {self._most - self._left} of {self._most})"

    def renewed(self, commands: Sequence[RankCommand]) -> list[RankCommand]:
        """The commands for another start, with a port that previous ranks do not hold."""
        self._begun_after = newest_update(folder_in_memory(os.getpid())) or -1
        if self._is_ready:
            self._turn.touch()
            return [*commands]
        self._end_standby()
        return with_variables(commands, {"MASTER_PORT": _free_port()})

    def close(self) -> None:
        """End the forking process and the standby ranks."""
        self._end_standby()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None


def with_variables(commands: Sequence[RankCommand], variables: Mapping[str, str]) -> list[RankCommand]:
    return [replace(each, environment={**each.environment, **variables}) for each in commands]


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


def await_turn() -> None:
    """Block a standby rank until it replaces a failed one; returns at once in other ranks."""
    path, parent = os.environ.pop(_TURN, None), os.getppid()
    while path is not None and not os.path.exists(path):
        if os.getppid() != parent:  # the launcher and the forking process were killed
            os._exit(1)
        time.sleep(_TURN_S)


def newest_update(folder: Path) -> int | None:
    """The newest update that any rank has kept in `folder`; None without one."""
    kept = []
    for path in folder.glob("training-*/*/rank-*.json"):
        if (mark := read_json(path)) is not None:
            kept.append((int(path.parts[-3].removeprefix("training-")), int(mark["step"])))
    return max(kept)[1] if kept else None


class ForkServer:
    """The launcher's handle of the process that forks ranks."""

    def __init__(self, command: RankCommand) -> None:
        """Start the process, which imports the modules of `command` while the ranks run."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [command.command[0], "-u", "-m", __name__, str(theirs.fileno()), *_words(command)],
                # Checked in the default way, CUDA would be initialized, and could not be used after a fork.
                env={**os.environ, **command.environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._asked: deque[ForkedRank] = deque()  # in the order in which they are started
        self._codes: dict[int, int] = {}

    @staticmethod
    def can_run(command: RankCommand) -> bool:
        """Whether the command runs Python."""
        return command.command[:2] == (sys.executable, "-u")

    def ask(self, command: RankCommand) -> ForkedRank:
        """Request a rank that runs the command; it starts as soon as the modules are imported.

        Raises:
            OSError: if the forking process has ended.
        """
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        environment = {**os.environ, **command.environment}
        request = {"words": _words(command), "environment": environment, "cores": command.cores}
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [out_end, err_end])
        finally:
            os.close(out_end)
            os.close(err_end)
        rank = ForkedRank(self, open(out, "rb", buffering=0), open(err, "rb", buffering=0))
        self._asked.append(rank)
        return rank

    def code(self, rank: ForkedRank, *, waits: bool) -> int | None:
        """The exit status of a rank, as in `subprocess`; None if it has not ended."""
        while rank.pid not in self._codes:
            self._socket.setblocking(waits)
            try:
                self.receive()
            except BlockingIOError:
                return None
            except OSError:  # its parent has ended, so its status is unknown
                return -signal.SIGKILL
            finally:
                self._socket.setblocking(True)
        return self._codes[rank.pid]

    def receive(self) -> None:
        """Receive one message: the start or the end of a rank."""
        answer = self._socket.recv(_MESSAGE_BYTES)
        if not answer:
            raise OSError("the process that forks ranks has ended")
        pid, code = json.loads(answer)
        if code is None:
            self._asked.popleft().pid = pid
            self._codes.pop(pid, None)  # of an earlier rank with the same pid
        else:
            self._codes[pid] = code

    def close(self) -> None:
        """End the process, after its ranks have ended."""
        self._socket.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


class ForkedRank:
    """A rank from `ForkServer.ask`, with the part of `subprocess.Popen` that the launcher needs.

    Attributes:
        pid: 0 until the rank has started.
    """

    def __init__(self, fork_server: ForkServer, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self.pid, self.stdout, self.stderr = 0, stdout, stderr
        self._fork_server = fork_server

    def await_start(self) -> None:
        """
        Raises:
            OSError: if the forking process has ended.
        """
        while not self.pid:
            self._fork_server.receive()

    def poll(self) -> int | None:
        return self._fork_server.code(self, waits=False)

    def wait(self) -> int | None:
        return self._fork_server.code(self, waits=True)


def _words(command: RankCommand) -> list[str]:
    return [*command.command[2:]]  # after `python -u`


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """(module, imported name or "") for each top-level import of an installed package in a script."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            yield from ((name.name, "") for name in statement.names if _is_installed(name.name))
        elif isinstance(statement, ast.ImportFrom) and not statement.level and _is_installed(str(statement.module)):
            yield from ((str(statement.module), name.name) for name in statement.names)


def _is_installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return False
    return spec is not None and any(folder in str(spec.origin) for folder in _INSTALLED)


def _import_for(words: Sequence[str]) -> None:
    """Import a script's modules. Errors are ignored: they occur again in the rank, whose output is shown."""
    wanted = [(module, "") for module in _ALWAYS]
    with suppress(Exception):
        spec = importlib.util.find_spec(words[1]) if words[0] == "-m" else None
        wanted += imports_of(Path(str(spec.origin) if spec else words[0]).read_text(encoding="utf-8"))
    for module, name in wanted:
        with suppress(Exception):
            getattr(importlib.import_module(module), name or "__name__", None)


def main() -> None:
    """Import the script's modules, then fork ranks on request and report how each ended, until the launcher closes the
    socket. A rank returns from `_serve` and runs its script."""
    link, words = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    _import_for(words)
    _freeze()
    _run(_serve(link))


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # so that ranks share these pages


def _import_as_ranks() -> bool:
    """Import modules that ranks imported during training, from packages already imported here. False if not known."""
    lists = [*folder_in_memory(os.getppid()).glob(f"training-*/{MODULES}")]
    for name in lists[0].read_text().split() if lists else ():
        if name not in sys.modules and name.partition(".")[0] in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)
    _freeze()
    return bool(lists)


def _serve(link: socket.socket) -> list[str]:
    has_all = False
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            events = selector.select(None if has_all else _LOOK_S)
            has_all = has_all or (not events and _import_as_ranks())
            for key, _ in events:
                if key.fileobj is not link:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(key.data, 0)
                    link.send(json.dumps([key.data, os.waitstatus_to_exitcode(status)]).encode())
                    continue
                message, outputs, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, 2)
                if not message:  # the launcher has ended; if it was killed, its ranks still run
                    for rank in selector.get_map().values():
                        if rank.fileobj is not link:
                            signal_group(rank.data, signal.SIGKILL)
                    sys.exit()
                pid = os.fork()
                if pid == 0:
                    link.close()
                    atexit.register(gc.unfreeze)  # otherwise libraries report leaks at exit
                    request = json.loads(message)
                    _become(request["environment"], request["cores"], outputs)
                    return list(request["words"])
                for output in outputs:
                    os.close(output)
                link.send(json.dumps([pid, None]).encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)


def _become(environment: Mapping[str, str], cores: Sequence[int], outputs: Sequence[int]) -> None:
    os.setsid()
    for output, number in zip(outputs, (1, 2), strict=True):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    if cores:
        os.sched_setaffinity(0, cores)


def _run(words: Sequence[str]) -> None:
    """Run a script or module with these arguments, as `python` does."""
    if words[0] == "-m":
        sys.argv = [*words[1:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*words]
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
