"""The path of a steady step through hf_zero's files: `python -m tests.support.step_path` prints it.

One rank, AdamW, two layers, from the engine's forward to the end of its step. A change of file is a call from a
function in one file of hf_zero to one in another, ignoring other libraries between them; comm/ is excluded.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hf_zero

PACKAGE = f"{Path(hf_zero.__file__).parent}/"
ASIDE = "comm/"
UPDATE = "_fused_adamw_"
STEADY = 3  # steps before the observed ones
WATCHED = 5  # the shortest path counts: how often an I/O buffer is polled depends on the drive


@dataclass
class StepPath:
    """
    Attributes:
        files: files that the step passes through.
        calls: (caller's file, file) -> calls.
        frames: functions of hf_zero from the user's call down to the fused update, inclusive.
    """

    files: set[str] = field(default_factory=set)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    frames: int = 0

    @property
    def changes(self) -> int:
        return self.calls.total()

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        """The callback of `sys.setprofile`."""
        if event == "c_call" and UPDATE in str(arg):
            self.frames = max(self.frames, len(_own_frames(frame)) + 1)
        file = _own_file(frame)
        if event != "call" or file is None or file.startswith(ASIDE):
            return
        self.files.add(file)
        callers = _own_frames(frame.f_back)
        if callers and callers[0] != file and not callers[0].startswith(ASIDE):
            self.calls[callers[0], file] += 1


def _own_file(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    return name.removeprefix(PACKAGE) if name.startswith(PACKAGE) else None


def _own_frames(frame: FrameType | None) -> list[str]:
    """Files of the frames of hf_zero, the innermost first."""
    files = []
    while frame is not None:
        file = _own_file(frame)
        if file is not None:
            files.append(file)
        frame = frame.f_back
    return files


def path_of_a_step(zero: dict[str, Any]) -> StepPath:
    """The path with this `zero_optimization`."""
    config = {
        "train_batch_size": 4,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine, *_ = hf_zero.initialize(model=model, config=config)
    paths = []
    for step in range(STEADY + WATCHED):
        path = StepPath()
        if step >= STEADY:
            sys.setprofile(path.note)
            paths.append(path)
        try:
            engine.backward(engine(torch.randn(4, 8)).sum())
            engine.step()
        finally:
            sys.setprofile(None)
    engine.destroy()
    return min(paths, key=lambda path: path.changes)


def stage_2() -> StepPath:
    return path_of_a_step({"stage": 2})


def stage_3_with_a_drive(folder: Path) -> StepPath:
    drive = {"device": "nvme", "nvme_path": str(folder)}
    return path_of_a_step({"stage": 3, "offload_optimizer": drive, "offload_param": drive})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = {"stage 2": stage_2(), "stage 3, drive": stage_3_with_a_drive(Path(folder))}
    for name, path in paths.items():
        counts = f"{len(path.files):4} files {path.changes:5} changes of file {path.frames:3} frames"
        sys.stdout.write(f"{name:16}{counts} to {UPDATE}\n")
        for (caller, file), calls in path.calls.most_common() if "-v" in sys.argv else ():
            sys.stdout.write(f"{calls:8}  {caller} -> {file}\n")


if __name__ == "__main__":
    main()
