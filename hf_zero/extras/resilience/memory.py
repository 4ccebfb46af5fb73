"""Checkpoints in host memory: files of a tmpfs, which outlive the ranks and end with the process that starts them.

    /dev/shm/hf_zero-USER-PROCESS/            the process that starts this host's ranks again; see `restarts.own_folder`
        training-1/0, 1                       two slots, written in turn
            rank-0.json                       what rank 0 has kept here, and checksums; removed first, written last
            rank-0.0, rank-0.1, ...           values: copied once, and mapped by whoever reads them
            latest, global_step/...           the checkpoint's own files, as DeepSpeed names them
            trainer_state.json, ...           what the caller adds
            copied                            the update of this slot that the next host has, too

At any moment one slot is whole on all ranks: `keep` begins with a meeting, to which a rank comes when what it kept last
is complete, and touches the other slot after it. Where hosts copy slots to one another, it does so only when all have.

Each host has the files of its own ranks. A rank reads only its own values, so before a load hosts tell one another the
checkpoint's files, which say where values are, and an empty file stands for values that are elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hf_zero.api.engine_checkpoints import EngineCheckpoints
from hf_zero.checkpoint.arena import Arena, sum_of_words
from hf_zero.comm import Collectives, hosts
from hf_zero.launch.restarts import COPIED, DAMAGED, MODULES, SUPERVISOR, WANTED, read_json, replace_text
from hf_zero.log import logger

_TAG = "global_step"  # Trainer looks for a folder whose name begins like this
_NUM_SLOTS = 2
_COPIED_S = 600.0  # for the next host's copy to come


def supervisor(environment: Mapping[str, str]) -> int | None:
    """The process that starts this rank again when it fails: hf-zero launch, or torchrun (and accelerate) with restarts
    left to it; None: nobody does."""
    if environment.get(SUPERVISOR):
        return int(environment[SUPERVISOR])
    return os.getppid() if int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0 else None


class MemoryCheckpoints:
    """Those of one training, as one rank sees them.

    Attributes:
        beginning: a folder for what this rank knows of the beginning of an epoch.
    """

    def __init__(self, folder: Path, collectives: Collectives, *, replicates: bool = False) -> None:
        """`replicates`: the launcher copies each to the next host."""
        folder.mkdir(parents=True, exist_ok=True)
        self._replicates = replicates
        if replicates:
            (folder / WANTED).touch()
        self._modules, self.beginning = folder / MODULES, folder / f"beginning-{collectives.rank}"
        self._slots = [folder / str(number) for number in range(_NUM_SLOTS)]
        for slot in self._slots:
            slot.mkdir(exist_ok=True)
        self._collectives = collectives
        self._savers: list[EngineCheckpoints] = []
        self._last: int | None = None  # the slot that was written, or loaded, last

    def newest(self) -> tuple[int, Path] | None:
        """The update of the newest whole checkpoint, and its folder. Collective."""
        known, rank = hosts(), self._collectives.rank
        beside = known.beside(rank)
        paths = [path for slot in self._slots for path in sorted(slot.glob("rank-*.json"))]
        mine = [(mark, path.parent) for path in paths[beside.index(rank) :: len(beside)] if (mark := read_json(path))]
        kept: dict[tuple[int, int, int], set[int]] = {}
        gathered: list[Any] = self._collectives.gather_objects([(mark, int(slot.name)) for mark, slot in mine])
        for other, of_rank in enumerate(gathered):
            for mark, number in of_rank:
                stays = mark["rank"] in known.beside(other) and mark["world"] == self._collectives.size
                if stays or known.num_hosts == 1:
                    kept.setdefault((mark["step"], number, mark["world"]), set()).add(mark["rank"])
        for step, number, _ in sorted((key for key, ranks in kept.items() if len(ranks) == key[2]), reverse=True):
            slot = self._slots[number]
            is_intact = all(self._is_intact(slot, mark) for mark, place in mine if place == slot)
            if all(self._collectives.gather_objects(is_intact)):
                self._last = number
                self._tell_others(slot)
                return step, slot
        return None

    def _is_intact(self, slot: Path, mark: dict[str, Any], *, may_ask: bool = True) -> bool:
        """Whether values are what a rank of this host has kept, or the next host's copy of them, put in their place."""
        damaged = [name for name, kept in mark["sums"].items() if _checksum(slot / name, kept[0]) != kept]
        if not damaged:
            return True
        is_replaced, asked, deadline = False, slot / DAMAGED, time.monotonic() + _COPIED_S
        if self._replicates and may_ask:
            replace_text(asked, str(mark["step"]))
            while asked.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            is_there = read_json(slot / f"rank-{mark['rank']}.json") == mark
            is_replaced = is_there and self._is_intact(slot, mark, may_ask=False)
        if may_ask:
            found = f"{slot / damaged[0]} is not what rank {mark['rank']} kept after update {mark['step']}"
            source = "the next host's copy" if is_replaced else "another checkpoint"
            logger.warning("%s, so %s is taken: memory of this host changes by itself", found, source)
        return is_replaced

    def _tell_others(self, slot: Path) -> None:
        """Bring here what other hosts' ranks have in files, and empty files for their values. Collective."""
        known = hosts()
        if known.num_hosts == 1:
            return
        rank = self._collectives.rank
        mark = read_json(slot / f"rank-{rank}.json") or {"files": {}, "sums": {}}
        own = {f"{_TAG}/{name}": (slot / _TAG / name).read_bytes() for name in mark["files"]}
        gathered: list[Any] = self._collectives.gather_objects({**own, **dict.fromkeys(mark["sums"], b"")})
        beside = known.beside(rank)
        if rank == beside[0]:
            here = {name for each in beside for name in gathered[each]}
            for name, content in (item for of_rank in gathered for item in of_rank.items() if item[0] not in here):
                (slot / name).unlink(missing_ok=True)
                (slot / name).write_bytes(content)
        self._collectives.gather_objects(None)  # written

    def keep(self, engine: Any, step: int, add: Callable[[Path], object]) -> bool:
        """Keep the engine's training as it is after this update; the next update waits for it. Collective.

        Args:
            add: puts more files into the folder.

        Returns:
            False: nothing is kept, since the one before has not reached all hosts yet.

        Raises:
            CheckpointError: on all ranks, when one has no room.
        """
        rank = self._collectives.rank
        if not self._savers:
            self._savers = [EngineCheckpoints(engine, Arena(slot / f"rank-{rank}")) for slot in self._slots]
        self.wait()
        if not all(self._collectives.gather_objects(self._is_copied())):
            return False
        if self._last is not None and rank == hosts().beside(rank)[0] and not self._modules.exists():
            replace_text(self._modules, "\n".join(sys.modules))  # for those that are started after this one
        self._last = 0 if self._last is None else (self._last + 1) % _NUM_SLOTS
        slot = self._slots[self._last]
        mark = slot / f"rank-{rank}.json"
        mark.unlink(missing_ok=True)
        arena = self._savers[self._last].background.arena

        def complete(names: Sequence[str]) -> None:
            place = {"rank": rank, "world": self._collectives.size, "beside": len(hosts().beside(rank))}
            replace_text(mark, json.dumps({"step": step, **place, "files": names, "sums": arena.checksums()}))

        def add_to_slot() -> None:
            add(slot)
            (slot / "latest").write_text(_TAG)

        self._savers[self._last].keep(slot / _TAG, add=add_to_slot, kept=complete)
        return True

    def _is_copied(self) -> bool:
        """Whether the next host has what was kept last, too, where it is meant to."""
        if not self._replicates or self._last is None:
            return True
        slot = self._slots[self._last]
        mark, copied = read_json(slot / f"rank-{self._collectives.rank}.json"), read_json(slot / COPIED)
        return mark is not None and copied is not None and mark["step"] == copied["step"]

    def wait(self) -> None:
        """Return when what was kept last is complete."""
        for saver in self._savers:
            saver.background.wait()

    def close(self) -> None:
        """Let go of the memory of this process; the checkpoints stay."""
        for saver in self._savers:
            saver.background.close()


def _checksum(path: Path, num_bytes: int) -> list[int]:
    """As `Arena.checksums` has it; none of what is cut off, or not there."""
    with suppress(OSError, ValueError):
        return [num_bytes, sum_of_words(np.memmap(path, np.uint8, "r", shape=(num_bytes,))) if num_bytes else 0]
    return []
