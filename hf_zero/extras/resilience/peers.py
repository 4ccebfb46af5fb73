"""Communication of the launchers of several hosts with restarts, and copies of kept states on other hosts.

    host 0             leads: collects failures, and decides when the ranks of all hosts end and start
    each host          follows host 0, and sends each slot that its ranks have kept to the launcher of the next host
    a lost host        its restarted launcher, or a spare, fetches its states from the launcher of the next host

All listen on --master_port at the address that routes to the others, and accept peers that know the token of the run:
both sides authenticate with HMAC, as in `multiprocessing`. The data itself is not encrypted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from hf_zero.extras.resilience import restarts
from hf_zero.launch import LaunchError
from hf_zero.launch.children import Failure
from hf_zero.network import address_towards

_REPLACED_S = 600.0  # timeout for the replacement of a host
_MESSAGE_BYTES, _CHUNK_BYTES = 16 << 20, 4 << 20
_TICK_S = 0.05
_PROBES = {
    socket.TCP_KEEPIDLE: 1,  # seconds
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 2,
    socket.TCP_USER_TIMEOUT: 5000,  # milliseconds without acknowledgment
}
_SLOT, _NAME = re.compile(r"training-\d+/[01]"), re.compile(r"(global_step/)?\w[\w.-]*", re.ASCII)
_BROKEN = (OSError, EOFError, ValueError, KeyError, AuthenticationError)  # a peer has ended, or is not one of ours
Message = dict[str, Any]


def _open(place: tuple[str, int], key: bytes, hello: Message) -> Connection:
    link = _proven(socket.create_connection(place, timeout=10), key, serves=False)
    _say(link, hello)
    return link


def _proven(end: socket.socket, key: bytes, *, serves: bool) -> Connection:
    """Authenticate both sides, and enable keep-alive probes, which detect a vanished host within three seconds."""
    end.settimeout(None)
    for option, value in _PROBES.items():
        end.setsockopt(socket.IPPROTO_TCP, option, value)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 10, 0))
        link = Connection(os.dup(end.fileno()))
        try:
            for prove in (deliver_challenge, answer_challenge) if serves else (answer_challenge, deliver_challenge):
                prove(link, key)
        except BaseException:
            link.close()
            raise
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return link


def _say(link: Connection, message: Message) -> None:
    link.send_bytes(json.dumps(message).encode())


def _heard(link: Connection) -> Message:
    return dict(json.loads(link.recv_bytes(_MESSAGE_BYTES)))


class _Lead:
    """The leader, which runs on host 0."""

    def __init__(self, names: Sequence[str], address: str) -> None:
        self._names, self._address = names, address
        self._lock = threading.Lock()
        self._links: dict[int, Connection] = {}
        self._spares: list[tuple[Connection, str]] = []
        self._addresses: dict[int, str] = {}
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._is_running, self._restarts = False, -1

    def follow(self, hello: Message, link: Connection, address: str) -> None:
        """Serve one host until it is lost; a spare has no host index until it replaces a lost host."""
        with self._lock:
            host = hello["host"]
            if host is None:
                self._spares.append((link, address))
            elif not 0 <= host < len(self._names) or (hello["is_spare"] and host in self._links):
                return  # another launcher has taken that host's place
            else:
                self._place(host, link, address)
        try:
            while True:
                message = _heard(link)
                with self._lock:
                    if self._links.get(message["host"]) is link:
                        self._hear(message["host"], message)
        except _BROKEN:
            with self._lock:
                self._spares = [spare for spare in self._spares if spare[0] is not link]
                for host in [host for host, theirs in self._links.items() if theirs is link]:
                    self._lose(host)

    def _place(self, host: int, link: Connection, address: str) -> None:
        if host in self._links:
            self._lose(host, is_replaced=True)
        self._links[host], self._addresses[host] = link, address
        if len(self._links) == len(self._names):
            self._tell_all({"say": "hosts", "addresses": self._addresses})

    def _hear(self, host: int, message: Message) -> None:
        if message["say"] == "ready":
            self._ready.add(host)
            self._restarts = max(self._restarts, message["restarts"])
            if len(self._ready) == len(self._names):
                self._ready, self._done, self._is_running = set(), set(), True
                with socket.create_server((self._address, 0)) as free:
                    port = free.getsockname()[1]
                self._tell_all({"say": "start", "port": port, "restarts": self._restarts + 1})
        elif message["say"] == "done":
            self._done.add(host)
            if len(self._done) == len(self._names):
                self._tell_all({"say": "over"})
        elif message["say"] == "stop" or self._is_running:
            self._is_running = False
            self._tell_all(message)

    def _lose(self, host: int, *, is_replaced: bool = False) -> None:
        self._links.pop(host).close()
        self._ready.discard(host)
        if self._is_running:
            self._is_running = False
            self._tell_all({"say": "end", "failure": asdict(Failure.of_host(self._names[host]))})
        if host and self._spares and not is_replaced:
            link, address = self._spares.pop(0)
            with suppress(OSError):  # it is lost, too: its own thread notices, and the next spare is used
                _say(link, {"say": "take", "host": host})
            self._place(host, link, address)

    def _tell_all(self, message: Message) -> None:
        for link in (*self._links.values(), *(link for link, _ in self._spares)):
            with suppress(OSError):  # its own thread notices
                _say(link, message)


class PeerLaunchers:
    """One launcher's connections to the other hosts."""

    def __init__(self, names: Sequence[str], host: int | None, master: str, port: int, token: str) -> None:
        """
        Args:
            host: index of this host; None for a spare.

        Raises:
            LaunchError: if the port is in use.
        """
        own = address_towards(names[1] if host == 0 else master) or master
        self._names, self._host, self._key, self._port = names, host, token.encode(), port
        self._is_spare = host is None
        self._leader = (own if host == 0 else master, port)
        self._lead = _Lead(names, own) if host == 0 else None
        self._memory = restarts.own_folder(os.getpid())
        self._messages: deque[Message] = deque()
        self.descriptor, self._wake = os.pipe()
        os.set_blocking(self.descriptor, False)
        self._link: Connection | None = None
        self._addresses: dict[str, str] = {}
        self._lock = threading.Lock()
        self._epoch, self._restarts, self._is_open = 0, -1, True
        try:
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            self._listener = socket.create_server((own, port), family=family)
        except OSError as error:
            raise LaunchError(f"{own}:{port} cannot be bound: {error.strerror}; choose another --master_port") from None
        for act in (self._serve, self._follow, self._copy):
            threading.Thread(target=act, daemon=True).start()

    def take(self) -> Iterator[Message]:
        """Take the received messages; `descriptor` is readable if there are any."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 1 << 10)
        while self._messages:
            message = self._messages.popleft()
            if message["say"] == "hosts":
                self._addresses = message["addresses"]
            elif message["say"] == "lost":
                self._addresses = {}
            elif message["say"] == "take":
                self._host = message["host"]
            yield message

    def say(self, say: str, failure: Failure | None = None) -> None:
        with suppress(OSError):  # the connection is lost, which `take` reports
            if self._link is not None:
                message = {"say": say, "host": self._host, "restarts": self._restarts}
                _say(self._link, {**message, "failure": failure and asdict(failure)})

    def await_place(self) -> int | None:
        """Wait until a host is lost, and return its index, which this spare takes over; None if the job has ended or
        cannot be reached."""
        deadline: float | None = time.monotonic() + _REPLACED_S
        while self._host is None and (deadline is None or time.monotonic() < deadline):
            select.select([self.descriptor], [], [], _REPLACED_S)
            for message in self.take():
                if message["say"] in ("over", "stop"):
                    return None
                deadline = time.monotonic() + _REPLACED_S if message["say"] == "lost" else None
        return self._host

    def await_start(self, turn: Callable[[], bool]) -> dict[str, str]:
        """Wait until all hosts are connected and no ranks run, and return variables for the ranks; empty if ranks must
        not start.

        Args:
            turn: waits for one tick; returns False to stop waiting.

        Raises:
            LaunchError: if hosts are missing after the timeout.
        """
        deadline, is_ready = time.monotonic() + _REPLACED_S, False
        with self._lock:
            self._epoch += 1
            for path in self._memory.glob(f"training-*/*/{restarts.COPIED}"):
                path.unlink()
        while turn():
            if self._addresses and not is_ready:
                self._restore()
                self.say("ready")
                is_ready = True
            for message in self.take():
                if message["say"] == "start":
                    self._restarts = message["restarts"]
                    port, again = str(message["port"]), str(self._restarts)
                    return {"MASTER_PORT": port, restarts.RESTARTS: again, restarts.COPIES: "1"}
                if message["say"] == "stop":
                    return {}
                is_ready = is_ready and message["say"] != "lost"
            if time.monotonic() > deadline:
                raise LaunchError(f"not all of {', '.join(self._names)} have connected within {_REPLACED_S:g} s")
        return {}

    def close(self) -> None:
        """Leave the other hosts. The threads end on their own."""
        self._is_open = False
        self._listener.close()
        if self._link is not None:
            self._link.close()

    def _serve(self) -> None:
        while self._is_open:
            with suppress(OSError):
                end, (address, *_) = self._listener.accept()
                threading.Thread(target=self._serve_one, args=(end, address), daemon=True).start()

    def _serve_one(self, end: socket.socket, address: str) -> None:
        with suppress(*_BROKEN), closing(_proven(end, self._key, serves=True)) as link:
            hello = _heard(link)
            theirs = self._memory / f"of-{int(hello['host'] or 0)}"
            if hello["want"] == "follow" and self._lead is not None:
                self._lead.follow(hello, link, address)
            elif hello["want"] == "store":
                while True:
                    asked = _heard(link)  # an identical slot is not sent again, so that it stays complete
                    slot = _own_slot(theirs, asked["has"])
                    _say(link, {"stored": bool(asked["marks"]) and _marks(slot) == asked["marks"]})
                    if _heard(link)["sends"]:
                        receive(link, theirs)
                        _say(link, {"stored": True})
            elif hello["want"] == "fetch":
                steps = [(step, slot) for slot in theirs.glob("training-*/*") if (step := _step(slot)) is not None]
                for step, slot in sorted(steps):
                    if hello.get("only") in (None, [str(slot.relative_to(theirs)), step]):
                        send(link, theirs, slot, {})
                _say(link, {"slot": None})

    def _follow(self) -> None:
        while self._is_open:
            with suppress(*_BROKEN):
                hello = {"want": "follow", "host": self._host, "is_spare": self._is_spare}
                self._link = _open(self._leader, self._key, hello)
                while True:
                    self._put(_heard(self._link))
            if self._link is not None:
                self._link = None
                self._put({"say": "lost"})
            time.sleep(_TICK_S)

    def _put(self, message: Message) -> None:
        self._messages.append(message)
        os.write(self._wake, b".")

    def _next(self, want: str, only: tuple[str, int] | None = None) -> Connection:
        assert self._host is not None, "a spare without a host has no neighbour"
        address = self._addresses[str((self._host + 1) % len(self._names))]
        return _open((address, self._port), self._key, {"want": want, "host": self._host, "only": only})

    def _fetch(self, only: tuple[str, int] | None = None) -> None:
        """Fetch this host's states from the next host: all slots, or the slot with this update."""
        with suppress(*_BROKEN), closing(self._next("fetch", only)) as link:
            while receive(link, self._memory):
                pass

    def _restore(self) -> None:
        """Fetch this host's states from the next host, if it has none."""
        if any(self._memory.glob("training-*/*/rank-*.json")):
            return
        self._fetch()
        histories = self._memory.glob(f"training-*/*/{restarts.HISTORY}")
        for path in sorted(histories, key=lambda path: path.stat().st_mtime):
            path.replace(path.parent.parent / restarts.HISTORY)

    def _copy(self) -> None:
        """Thread that sends each complete slot to the next host."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        link: Connection | None = None
        epoch, known = -1, dict[str, bytes]()
        while self._is_open:
            time.sleep(_TICK_S)
            if self._epoch != epoch:
                link = None
            for path in self._memory.glob(f"training-*/[01]/{restarts.DAMAGED}"):
                self._fetch((str(path.parent.relative_to(self._memory)), int(path.read_text())))
                path.unlink()
            for slot in self._uncopied():
                try:
                    if link is None:
                        epoch, known = self._epoch, {}
                        link = self._next("store")
                    step = _step(slot)
                    if self._stored(link, slot, known):
                        with self._lock:
                            if self._epoch == epoch:
                                restarts.replace_text(slot / restarts.COPIED, json.dumps({"step": step}))
                except _BROKEN:
                    link = None
                    break

    def _stored(self, link: Connection, slot: Path, known: dict[str, bytes]) -> bool:
        _say(link, {"has": str(slot.relative_to(self._memory)), "marks": _marks(slot)})
        is_there = _heard(link)["stored"]
        _say(link, {"sends": not is_there})
        if is_there:
            return True
        is_whole = send(link, self._memory, slot, known)
        return bool(_heard(link)["stored"]) and is_whole

    def _uncopied(self) -> list[Path]:
        slots = []
        for wanted in self._memory.glob(f"training-*/{restarts.WANTED}") if self._addresses else ():
            for slot in wanted.parent.glob("[01]"):
                copied = restarts.read_json(slot / restarts.COPIED) or {"step": None}
                slots += [slot] if _step(slot) not in (None, copied["step"]) else []
        return sorted(slots, key=lambda slot: -(_step(slot) or 0))


def _own_slot(folder: Path, name: str) -> Path:
    if not _SLOT.fullmatch(name):
        raise ValueError(name)
    return folder / name


def _marks(slot: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in slot.glob("rank-*.json")}


def _step(slot: Path) -> int | None:
    """The update of a slot, if all of this host's ranks have kept it; else None."""
    with suppress(OSError, ValueError):
        marks = [json.loads(mark) for mark in _marks(slot).values()]
        steps = {mark["step"] for mark in marks}
        if len(steps) == 1 and all(len(marks) == mark["beside"] for mark in marks):
            return int(steps.pop())
    return None


def send(link: Connection, folder: Path, slot: Path, known: dict[str, bytes]) -> bool:
    """Send a slot without chunks that are in `known`. Returns False if it changed meanwhile, and is not used."""
    marks = _marks(slot)
    files = [path for path in (*slot.iterdir(), *slot.glob("global_step/*")) if path.is_file()]
    files = [path for path in files if path.suffix not in (".json", ".partial") or not path.name.startswith("rank-")]
    _say(link, {"slot": str(slot.relative_to(folder))})
    for path in (*(path for path in files if path.name != restarts.COPIED), slot.parent / restarts.HISTORY):
        name = str(path.relative_to(slot)) if path.is_relative_to(slot) else path.name
        with suppress(FileNotFoundError), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            _say(link, {"file": name, "bytes": size})
            for start in range(0, size, _CHUNK_BYTES):
                chunk = file.read(_CHUNK_BYTES)
                digest = hashlib.sha256(chunk).digest()
                if known.get(key := f"{path}:{start}") != digest:
                    _say(link, {"at": start})
                    link.send_bytes(chunk)
                    known[key] = digest
    is_same = bool(marks) and _marks(slot) == marks
    _say(link, {"marks": marks if is_same else None})
    return is_same


def receive(link: Connection, folder: Path) -> bool:
    """Receive one slot from `send`. Returns False after the last one."""
    message = _heard(link)
    if message["slot"] is None:
        return False
    slot = _own_slot(folder, message["slot"])
    (slot / "global_step").mkdir(parents=True, exist_ok=True)
    for mark in slot.glob("rank-*.json"):
        mark.unlink()
    file = -1
    try:
        while "marks" not in (message := _heard(link)):
            if "file" in message:
                if not _NAME.fullmatch(message["file"]):
                    raise ValueError(message["file"])
                if file >= 0:
                    os.close(file)
                file = os.open(slot / message["file"], os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                os.ftruncate(file, int(message["bytes"]))
            else:
                os.pwrite(file, link.recv_bytes(_MESSAGE_BYTES), int(message["at"]))
    finally:
        if file >= 0:
            os.close(file)
    for name, mark in (message["marks"] or {}).items():
        if not _NAME.fullmatch(name):
            raise ValueError(name)
        restarts.replace_text(slot / name, mark)
    return True
