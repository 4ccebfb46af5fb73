"""Checkpoints in host memory: files in a tmpfs, which survive the ranks and are removed with the launching process.

    /dev/shm/hf_zero-USER-PID/                the process that restarts this host's ranks; see `restarts.own_folder`
        training-1/0, 1                       two slots, written alternately
            rank-0.json                       mark of rank 0 with checksums; removed first, written last
            rank-0.0, rank-0.1, ...           tensor values, read by memory mapping
            latest, global_step/...           the checkpoint's own files, with DeepSpeed's names
            trainer_state.json, ...           files that the caller adds
            copied                            the update of this slot that the next host has a copy of

At any time, one slot is complete on all ranks: `keep` begins with a barrier, which a rank enters after its last
checkpoint is complete, and writes the other slot only then. If hosts copy slots, `keep` also requires all copies.

Each host has the files of its own ranks. A rank only reads its own values. Before a load, hosts therefore exchange the
checkpoint's index files, and create empty files for the values of other hosts.
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
from hf_zero.extras.resilience.restarts import COPIED, DAMAGED, MODULES, SUPERVISOR, WANTED, read_json, replace_text
from hf_zero.log import logger

_TAG = "global_step"  # Trainer looks for a folder with this prefix
_NUM_SLOTS = 2
_COPIED_S = 600.0  # timeout for fetching the next host's copy


def supervisor(environment: Mapping[str, str]) -> int | None:
    """Pid of the process that restarts this rank after a failure: hf-zero launch, or torchrun (or accelerate) with
    restarts; None without one."""
    if environment.get(SUPERVISOR):
        return int(environment[SUPERVISOR])
    return os.getppid() if int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0 else None


class MemoryCheckpoints:
    """The checkpoints of one training, as used by one rank.

    Attributes:
        beginning: folder for this rank's random states at the beginning of an epoch.
    """

    def __init__(self, folder: Path, collectives: Collectives, *, replicates: bool = False) -> None:
        """`replicates`: whether the launcher copies checkpoints to the next host."""
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
        self._last: int | None = None  # the slot that was last written or loaded

    def newest(self) -> tuple[int, Path] | None:
        """The update and folder of the newest complete checkpoint; None without one. Collective."""
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
        """Whether a rank's values match its checksums, or were replaced by the next host's copy that does."""
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
            problem = f"{slot / damaged[0]} is not what rank {mark['rank']} kept after update {mark['step']}"
            source = "the next host's copy" if is_replaced else "another checkpoint"
            logger.warning("%s, so %s is used: the memory of this host is faulty", problem, source)
        return is_replaced

    def _tell_others(self, slot: Path) -> None:
        """Fetch the index files of other hosts' ranks, and create empty files for their values. Collective."""
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
        """Keep the engine's state after this update; the next update waits for it. Collective.

        Args:
            add: adds files to the folder.

        Returns:
            False if nothing was kept, because the previous checkpoint has not been copied to all hosts yet.

        Raises:
            CheckpointError: on all ranks, if a rank runs out of space.
        """
        rank = self._collectives.rank
        if not self._savers:
            self._savers = [EngineCheckpoints(engine, Arena(slot / f"rank-{rank}")) for slot in self._slots]
        self.wait()
        if not all(self._collectives.gather_objects(self._is_copied())):
            return False
        if self._last is not None and rank == hosts().beside(rank)[0] and not self._modules.exists():
            replace_text(self._modules, "\n".join(sys.modules))  # for restarted ranks
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
        """Whether the next host has a copy of the last checkpoint, or replication is off."""
        if not self._replicates or self._last is None:
            return True
        slot = self._slots[self._last]
        mark, copied = read_json(slot / f"rank-{self._collectives.rank}.json"), read_json(slot / COPIED)
        return mark is not None and copied is not None and mark["step"] == copied["step"]

    def wait(self) -> None:
        """Wait until the last checkpoint is complete."""
        for saver in self._savers:
            saver.background.wait()

    def close(self) -> None:
        """Release this process's memory; the checkpoints stay."""
        for saver in self._savers:
            saver.background.close()


def _checksum(path: Path, num_bytes: int) -> list[int]:
    """A file's checksum as in `Arena.checksums`; empty if it is truncated or missing."""
    with suppress(OSError, ValueError):
        return [num_bytes, sum_of_words(np.memmap(path, np.uint8, "r", shape=(num_bytes,))) if num_bytes else 0]
    return []
