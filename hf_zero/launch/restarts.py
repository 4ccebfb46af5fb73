"""Starting ranks again: how often, and from a process that has imported what their script imports and forks them.

A fresh Python takes seconds to import torch and transformers, which is most of what a restart takes. The process is

    python -m hf_zero.launch.restarts SOCKET script.py ...     the words as Python takes them, also `-m module ...`
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from hf_zero.launch.children import Failure, signal_group
from hf_zero.launch.job import RankCommand

# What every training imports, whatever its script says.
_ALWAYS = ("torch", "torch._dynamo", "hf_zero.api.entry", "hf_zero.extras.resilience.trainer", "transformers.trainer")
TOKEN = "HF_ZERO_TOKEN"
"""The variable with the token of a run on several hosts, the same on all."""
SUPERVISOR = "HF_ZERO_SUPERVISOR"
"""The variable with the number of the process that starts this host's ranks again when one fails."""
COPIES = "HF_ZERO_COPIES"
"""The variable that is set where that process copies what is kept to the next host."""
RESTARTS = "HF_ZERO_RESTARTS"
"""The variable that says how often the ranks of several hosts have been started again."""
_TURN = "HF_ZERO_TURN"  # of ranks that stand by: the file that is there once they take the place of others
WANTED, COPIED, DAMAGED = "copies-wanted", "copied", "damaged"
"""Files: of a training whose slots are to be copied, of a slot that has been, and of one whose copy is to come back."""
MODULES = "modules"
"""A file of a training: names of modules that a rank has imported by its second update."""
HISTORY = "log_history.jsonl"
"""A file of a training: its logs, one for both slots."""
_MESSAGE_BYTES = 1 << 20
_LOOK_S = 0.5  # for that file
_TURN_S = 0.02
_EARLY_S = 600.0  # an error that comes sooner, twice, with the same last line, is one of the script
_INSTALLED = ("site-packages", "dist-packages")
# Waits for a process to end, and removes a folder. In a session of its own, since ranks are killed with theirs.
_REMOVE = """
import os, select, shutil, sys
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
except ProcessLookupError:
    pass
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""


def folder_in_memory(supervisor: int) -> Path:
    """Where ranks keep what those that are started after them go on from."""
    return Path(f"/dev/shm/hf_zero-{os.getuid()}-{supervisor}")


def own_folder(supervisor: int) -> Path:
    """The folder that ends with this process.

    Raises:
        OSError: there is no tmpfs.
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
    """In one step, so that a kill leaves all or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(content)
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """None: it is not there, or is just being removed."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


class Restarts:
    """Starts the ranks of this host, as often as they may be started."""

    def __init__(
        self,
        most: int,
        stopped_s: float,
        start: Callable[[RankCommand], subprocess.Popen[bytes]],
        peers: Any = None,
        *,
        stands_by: bool = False,
    ) -> None:
        """
        Args:
            most: restarts in all.
            stopped_s: how long a rank may be stopped before it counts as dead.
            start: runs a command in a fresh process.
            peers: the other hosts, whose ranks start again with these.
            stands_by: others wait, ready to train, to take the place of those that do.
        """
        self.peers = peers
        self.stopped_s = stopped_s
        self._most, self._left = most, most
        self._start = start
        self._nursery: Nursery | None = None
        self._stands_by, self._standby = stands_by, dict[int, ForkedRank]()
        self._turn = Path()  # the file that these wait for
        self._failed: tuple[int | None, str] | None = None  # after which update, with which last line
        self._begun, self._begun_after = 0.0, -1

    def start(self, command: RankCommand) -> subprocess.Popen[bytes] | ForkedRank:
        command = self._own(command)
        if not Nursery.can_run(command):
            return self._start(command)
        try:
            self._nursery = self._nursery or Nursery(command)
            rank = self._standby.pop(command.rank, None) or self._nursery.ask(command)
            rank.await_start()
            return rank
        except OSError:  # it has been killed, too; the next one makes another
            self.close()
            return self._start(command)

    def _own(self, command: RankCommand, **more: str) -> RankCommand:
        return replace(command, environment={**command.environment, SUPERVISOR: str(os.getpid()), **more})

    def stand_by(self, commands: Sequence[RankCommand]) -> None:
        """Once these ranks have kept an update, start others that run the script up to training, and wait there to
        take their place. Does not wait."""
        if not self._stands_by or self._standby or self._nursery is None:
            return
        folder = folder_in_memory(os.getpid())
        has_imported = any(folder.glob(f"training-*/{MODULES}"))  # so that these need not
        if not has_imported or (newest_update(folder) or -1) <= self._begun_after:
            return
        self._turn = folder / f"turn-{self._left}"
        more = {"MASTER_PORT": _free_port(), _TURN: str(self._turn)}
        with suppress(OSError):  # it has been killed; the next start makes another
            self._standby = {each.rank: self._nursery.ask(self._own(each, **more)) for each in commands}
            for pipe in (pipe for rank in self._standby.values() for pipe in (rank.stdout, rank.stderr)):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _MESSAGE_BYTES)  # nobody reads what they say until then

    @property
    def _is_ready(self) -> bool:
        """Whether some stand by, and none has ended."""
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
        """Import what this will, before it is started."""
        self._nursery = Nursery(command) if Nursery.can_run(command) else None

    def refusal(self, failure: Failure) -> str:
        """Why they are not started again after this failure; empty: they are."""
        if not self._left:
            return f"ranks have been started again as often as --max_restarts {self._most} allows"
        step, line = newest_update(folder_in_memory(os.getpid())), failure.tail.strip().rpartition("\n")[2]
        is_early = step is None and line and time.monotonic() - self._begun < _EARLY_S
        if failure.code > 0 and (step is not None or is_early):
            failed, self._failed = self._failed, (step, "" if step is not None else line)
            if failed == self._failed:
                when = "before anything was kept" if step is None else f"after update {step}"
                return f"a rank has failed by itself twice {when}: what goes wrong there will do so again"
        self._left -= 1
        return ""

    def described(self) -> str:
        step = newest_update(folder_in_memory(os.getpid()))
        where = "" if step is None else f", from host memory after update {step}"
        who = ", in processes that stood by" if self._is_ready else ""
        return f"{where}{who} (restart {self._most - self._left} of {self._most})"

    def renewed(self, commands: Sequence[RankCommand], turn: Callable[[], bool], *, again: bool) -> list[RankCommand]:
        """The commands with a port that nobody of the ranks before still holds; none: they are not to start.

        Args:
            turn: see `Peers.await_start`.
            again: whether they have been started before.
        """
        self._begun = time.monotonic()
        if self.peers is not None:
            found = self.peers.await_start(turn)
            return [replace(each, environment={**each.environment, **found}) for each in commands] if found else []
        if not again:
            return [*commands]
        self._begun_after = newest_update(folder_in_memory(os.getpid())) or -1
        if self._is_ready:
            self._turn.touch()
            return [*commands]
        self._end_standby()
        port = _free_port()
        return [replace(each, environment={**each.environment, "MASTER_PORT": port}) for each in commands]

    def close(self) -> None:
        """End the process that forks, and those that stand by."""
        self._end_standby()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


def await_turn() -> None:
    """Where a rank that stands by waits until it takes the place of another."""
    path, parent = os.environ.pop(_TURN, None), os.getppid()
    while path is not None and not os.path.exists(path):
        if os.getppid() != parent:  # the launcher has been killed, and what it started
            os._exit(1)
        time.sleep(_TURN_S)


def newest_update(folder: Path) -> int | None:
    """The newest update that some rank has kept there."""
    found = []
    for path in folder.glob("training-*/*/rank-*.json"):
        if (mark := read_json(path)) is not None:
            found.append((int(path.parts[-3].removeprefix("training-")), int(mark["step"])))
    return max(found)[1] if found else None


class Nursery:
    """The process, as the launcher sees it."""

    def __init__(self, command: RankCommand) -> None:
        """Start it; it imports what `command` will, beside the ranks."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [command.command[0], "-u", "-m", __name__, str(theirs.fileno()), *_words(command)],
                # Asked in the usual way, CUDA could not be used after a fork.
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
        """Whether it is Python that runs it."""
        return command.command[:2] == (sys.executable, "-u")

    def ask(self, command: RankCommand) -> ForkedRank:
        """A process that runs it, or will, when what it needs is imported.

        Raises:
            OSError: there is no such process any more.
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
        """The exit status of a rank, as subprocess has it; None: it has not ended."""
        while rank.pid not in self._codes:
            self._socket.setblocking(waits)
            try:
                self.receive()
            except BlockingIOError:
                return None
            except OSError:  # its parent is gone, so nobody knows
                return -signal.SIGKILL
            finally:
                self._socket.setblocking(True)
        return self._codes[rank.pid]

    def receive(self) -> None:
        """Hear of one start or end."""
        answer = self._socket.recv(_MESSAGE_BYTES)
        if not answer:
            raise OSError("the process that forks ranks has ended")
        pid, code = json.loads(answer)
        if code is None:
            self._asked.popleft().pid = pid
            self._codes.pop(pid, None)  # of one before it with the same number
        else:
            self._codes[pid] = code

    def close(self) -> None:
        """End the process; its ranks have ended."""
        self._socket.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


class ForkedRank:
    """What the launcher needs of `subprocess.Popen`.

    Attributes:
        pid: 0 until it is started.
    """

    def __init__(self, nursery: Nursery, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self.pid, self.stdout, self.stderr = 0, stdout, stderr
        self._nursery = nursery

    def await_start(self) -> None:
        """
        Raises:
            OSError: the process that was asked has ended.
        """
        while not self.pid:
            self._nursery.receive()

    def poll(self) -> int | None:
        return self._nursery.code(self, waits=False)

    def wait(self) -> int | None:
        return self._nursery.code(self, waits=True)


def _words(command: RankCommand) -> list[str]:
    return [*command.command[2:]]  # after `python -u`


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """(module, name in it or "") that a script imports from installed packages when it begins."""
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
    """Whatever fails here fails in the rank, where somebody reads it."""
    wanted = [(module, "") for module in _ALWAYS]
    with suppress(Exception):
        spec = importlib.util.find_spec(words[1]) if words[0] == "-m" else None
        wanted += imports_of(Path(str(spec.origin) if spec else words[0]).read_text(encoding="utf-8"))
    for module, name in wanted:
        with suppress(Exception):
            getattr(importlib.import_module(module), name or "__name__", None)


def main() -> None:
    """Import, fork ranks as they are asked for, say how each ended, until the launcher closes the socket. A rank
    returns from `_serve` and runs its script."""
    link, words = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    _import_for(words)
    _freeze()
    _run(_serve(link))


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # so that ranks share these pages


def _import_as_ranks() -> bool:
    """What ranks have imported as they went along, of packages that are in use here; False: none has said so yet."""
    found = [*folder_in_memory(os.getppid()).glob(f"training-*/{MODULES}")]
    for name in found[0].read_text().split() if found else ():
        if name not in sys.modules and name.partition(".")[0] in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)
    _freeze()
    return bool(found)


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
                if not message:  # the launcher has ended; if it was killed, its ranks are still there
                    for rank in selector.get_map().values():
                        if rank.fileobj is not link:
                            signal_group(rank.data, signal.SIGKILL)
                    sys.exit()
                pid = os.fork()
                if pid == 0:
                    link.close()
                    atexit.register(gc.unfreeze)  # otherwise libraries report what they could not free
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
    """As `python` runs these words."""
    if words[0] == "-m":
        sys.argv = [*words[1:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*words]
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
