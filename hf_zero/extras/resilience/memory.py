"""Checkpoints in host memory: files of a tmpfs, which outlive the ranks and end with the process that starts them.

    /dev/shm/hf_zero-USER-PROCESS/            the process that starts this host's ranks again; see `own_folder`
        training-1/0, 1                       two slots, written in turn
            rank-0.json                       which update rank 0 has kept here; removed first, written last
            rank-0.0, rank-0.1, ...           values: copied once, and mapped by whoever reads them
            latest, global_step/...           the checkpoint's own files, as DeepSpeed names them
            trainer_state.json, ...           what the caller adds

At any moment one slot is whole on all ranks: `keep` begins with a meeting, to which a rank comes when what it kept last
is complete, and touches the other slot after it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_zero.api.engine_checkpoints import EngineCheckpoints
from hf_zero.checkpoint.arena import Arena
from hf_zero.comm import Collectives
from hf_zero.launch.restarts import SUPERVISOR, folder_in_memory

_TAG = "global_step"  # Trainer looks for a folder whose name begins like this
_NUM_SLOTS = 2
# Waits for a process to end, and removes a folder. In a session of its own, since ranks are killed with theirs.
_REMOVE = """
import os, select, shutil, sys
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
except ProcessLookupError:
    pass
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""


def supervisor(environment: Mapping[str, str]) -> int | None:
    """The process that starts this rank again when it fails: hf-zero launch, or torchrun (and accelerate) with restarts
    left to it; None: nobody does."""
    if environment.get(SUPERVISOR):
        return int(environment[SUPERVISOR])
    return os.getppid() if int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0 else None


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


class MemoryCheckpoints:
    """Those of one training, as one rank sees them."""

    def __init__(self, folder: Path, collectives: Collectives) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._slots = [folder / str(number) for number in range(_NUM_SLOTS)]
        for slot in self._slots:
            slot.mkdir(exist_ok=True)
        self._collectives = collectives
        self._savers: list[EngineCheckpoints] = []
        self._last: int | None = None  # the slot that was written, or loaded, last

    def newest(self) -> tuple[int, Path] | None:
        """The update of the newest whole checkpoint, and its folder. Collective."""
        marks = [(_read(path), number) for number, slot in enumerate(self._slots) for path in slot.glob("rank-*.json")]
        kept: dict[tuple[int, int, int], set[int]] = {}
        gathered: list[Any] = self._collectives.gather_objects([(mark, slot) for mark, slot in marks if mark])
        for of_rank in gathered:
            for mark, slot in of_rank:
                kept.setdefault((mark["step"], slot, mark["world"]), set()).add(mark["rank"])
        whole = max((key for key, ranks in kept.items() if len(ranks) == key[2]), default=None)
        if whole is None:
            return None
        step, self._last, _ = whole
        return step, self._slots[self._last]

    def keep(self, engine: Any, step: int, add: Callable[[Path], object]) -> None:
        """Keep the engine's training as it is after this update; the next update waits for it. Collective.

        Args:
            add: puts more files into the folder.

        Raises:
            CheckpointError: on all ranks, when one has no room.
        """
        rank = self._collectives.rank
        if not self._savers:
            arenas = [Arena(slot / f"rank-{rank}") for slot in self._slots]
            self._savers = [EngineCheckpoints(engine, arena) for arena in arenas]
        self.wait()
        self._collectives.gather_objects(None)
        self._last = 0 if self._last is None else (self._last + 1) % _NUM_SLOTS
        slot = self._slots[self._last]
        mark = slot / f"rank-{rank}.json"
        mark.unlink(missing_ok=True)
        content = json.dumps({"step": step, "rank": rank, "world": self._collectives.size})

        def add_to_slot() -> None:
            add(slot)
            (slot / "latest").write_text(_TAG)

        self._savers[self._last].keep(slot / _TAG, add=add_to_slot, kept=lambda: _replace(mark, content))

    def wait(self) -> None:
        """Return when what was kept last is complete."""
        for saver in self._savers:
            saver.background.wait()

    def close(self) -> None:
        """Let go of the memory of this process; the checkpoints stay."""
        for saver in self._savers:
            saver.background.close()


def _read(path: Path) -> dict[str, int] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):  # its rank is just removing it
        return None


def _replace(path: Path, content: str) -> None:
    """In one step, so that a kill leaves all or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(content)
    partial.replace(path)
