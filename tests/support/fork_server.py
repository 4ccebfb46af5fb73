"""A process that imports everything once, and then forks ranks that start in milliseconds.

It is separate from the server of `run_ranks`, because ranks of other tests must only find modules imported that they
have requested. There is one fork server per list of modules.

    parent       a socket in a folder | "fork these" to the fork server's stdin        takes connections, one per rank
    fork server   python -m tests.support.fork_server: imports, then forks on demand
    rank         forked: connects to the parent, sends its index, calls its function
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0  # for imports, while other processes may start at the same time
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Child:
    """A forked process: the parent's end of its pipe, and a handle to end it."""

    pipe: Connection
    pid: int
    _handle: int

    def signal(self, number: int) -> None:
        """Sends a signal, if the process still exists."""
        try:
            signal.pidfd_send_signal(self._handle, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        self.pipe.close()
        self.signal(signal.SIGKILL)
        os.close(self._handle)


class ForkServer:
    """Forks processes; one is enough for a program. Thread-safe."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._folder = tempfile.mkdtemp(prefix="fork-server-")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{self._folder}/socket")
        self._listener.listen(16)
        self._listener.settimeout(START_S)
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        paths = [str(ROOT), *(path for path in sys.path if path)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, f"{self._folder}/socket", *modules],
            stdin=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
        )
        self._lock = threading.Lock()
        atexit.register(self.close)

    def fork(self, function: Callable[..., None], arguments: Sequence[Any]) -> list[Child]:
        """Starts `function(argument, pipe)` once per argument; returns children in the order of the arguments."""
        with self._lock:
            assert self._process.stdin is not None
            pickle.dump((function, tuple(arguments)), self._process.stdin)
            self._process.stdin.flush()
            children = {}
            for _ in arguments:
                pipe = self._accept()
                number, pid = pipe.recv()
                children[number] = Child(pipe, pid, os.pidfd_open(pid))
        return [children[number] for number in sorted(children)]

    def _accept(self) -> Connection:
        try:
            return Connection(self._listener.accept()[0].detach())
        except TimeoutError as error:
            state = self._process.poll()
            raise RuntimeError(
                f"no rank has called for {START_S:g} s; exit status of the fork server: {state}"
            ) from error

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_fork_servers: dict[tuple[str, ...], ForkServer] = {}
_lock = threading.Lock()


def fork_server(modules: tuple[str, ...]) -> ForkServer:
    """The fork server of this process that has imported these modules."""
    with _lock:
        if modules not in _fork_servers:
            _fork_servers[modules] = ForkServer(modules)
        return _fork_servers[modules]


def main(address: str, modules: Sequence[str]) -> None:
    """The fork server's own process: forks until its stdin is closed."""
    for module in modules:
        __import__(module)
    gc.freeze()  # garbage collections of forked processes need not scan it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for processes that have ended
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        for number, argument in enumerate(arguments):
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(0)
                with Client(address, "AF_UNIX") as pipe:
                    pipe.send((number, os.getpid()))
                    function(argument, pipe)
                os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
