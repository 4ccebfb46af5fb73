"""The path of a steady step through the files of hf_zero: `python -m tests.support.step_path` prints it.

One rank, AdamW, a model of two layers. Counted are calls from a function of one file to a function of another, comm/
aside, from the engine's forward to the end of its step; and the frames from the user's call to the fused update.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = f"{ROOT / 'hf_zero'}/"
ASIDE = ("comm/", "kernels/gpu/")
UPDATE = "_fused_adamw_"


@dataclass(frozen=True)
class Path_:
    """
    Attributes:
        files: through which the step went.
        changes: calls from one file to another.
        frames: from the user's call down to the fused update, both counted.
        calls: (caller's file, file) -> how often.
    """

    files: int
    changes: int
    frames: int
    calls: dict[tuple[str, str], int]


class Watch:
    """Counts while installed as the interpreter's profiler."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.files: set[str] = set()
        self.frames = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and UPDATE in getattr(arg, "__name__", ""):
            self.frames = max(self.frames, depth(frame) + 1)
        if event != "call":
            return
        file = inside(frame)
        if file is None or file.startswith(ASIDE):
            return
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and inside(caller) is None:
            caller = caller.f_back
        came_from = inside(caller) if caller is not None else None
        if came_from is not None and came_from != file and not came_from.startswith(ASIDE):
            self.calls[came_from, file] += 1
