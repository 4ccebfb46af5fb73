"""What processes print, passed on as it comes without cutting each other's lines, and its end remembered."""

from __future__ import annotations

import os
from collections import deque

CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 15
_TAIL_LINES = 60


class Stream:
    """One of our own outputs, shared by the processes whose words go there: line by line, none cut by another's.

    The beginning of a line waits for its end until `flush`, so that a prompt without one is seen all the same.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun: dict[object, bytes] = {}
        self._is_within_line: object = None

    def write(self, speaker: object, chunk: bytes) -> None:
        """Pass on the whole lines that `speaker` has said by now."""
        text = self._begun.pop(speaker, b"") + chunk
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if cut < len(text):
            self._begun[speaker] = text[cut:]
        self._put(speaker, text[:cut])

    def flush(self) -> None:
        """Pass on lines that have not ended."""
        begun, self._begun = self._begun, {}
        for speaker, text in begun.items():
            self._put(speaker, text)

    def _put(self, speaker: object, text: bytes) -> None:
        if not text:
            return
        if self._is_within_line not in (None, speaker):
            text = b"\n" + text
        self._is_within_line = None if text.endswith((b"\n", b"\r")) else speaker
        while text:
            try:
                text = text[os.write(self._descriptor, text) :]
            except BlockingIOError:
                continue
            except OSError:
                return  # nobody reads any more


class Tail:
    """The last lines that went by."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) > _TAIL_BYTES:
            self._size -= len(self._chunks.popleft())

    def text(self) -> str:
        """As a terminal would show it: of a line that overwrites itself, the last state."""
        text = b"".join(self._chunks)[-_TAIL_BYTES:].decode(errors="replace")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
        return "\n".join(lines[-_TAIL_LINES:])
