"""Signals that ask a launcher to end, as something that can be waited for beside pipes."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import psutil

HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """While it is open, SIGINT, SIGTERM and SIGHUP make `descriptor` readable instead of ending this process."""

    def __init__(self) -> None:
        self.descriptor, self._sender = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._sender, False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        for number in HEEDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup asks for just this
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.descriptor)
        os.close(self._sender)

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._sender, bytes([number]))

    def take(self) -> list[int]:
        """The signals that have come since the last call."""
        try:
            return list(os.read(self.descriptor, 64))
        except BlockingIOError:
            return []


def signal_tree(pid: int, number: int) -> None:
    """Send a signal to a process and all that it has started, whatever sessions they have put themselves into."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.send_signal(number)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group that may be gone already."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return
