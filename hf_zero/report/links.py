"""What connects devices and hosts, as far as the system says without asking for privileges."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from hf_zero.report.environment import Row

_INFINIBAND = Path("/sys/class/infiniband")
_PATIENCE_S = 10


def networks(infiniband: Path = _INFINIBAND) -> Iterator[Row]:
    """Interfaces that are up, with their speed; InfiniBand and RoCE ports. No addresses: the report is for others."""
    for name, stats in sorted(psutil.net_if_stats().items()):
        if stats.isup and name != "lo":
            yield f"network {name}", f"{stats.speed / 1000:g} Gbit/s" if stats.speed else "up, speed unknown"
    for port in sorted(infiniband.glob("*/ports/*")):
        words = [_text(port / name) for name in ("rate", "state", "link_layer")]
        yield f"{port.parts[-3]} port {port.name}", ", ".join(word for word in words if word)


def between_devices() -> str:
    """The matrix of nvidia-smi or rocm-smi; empty where there is neither."""
    for command in (["nvidia-smi", "topo", "-m"], ["rocm-smi", "--showtopo"]):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
