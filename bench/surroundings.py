"""The environment of a measurement: variables of ranks, the machine, and command lines without local folders."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import socket
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def rank_environments(ranks: int, *, deepspeed_python: str | None = None) -> list[dict[str, str]]:
    """Environments of the ranks of one process group; `deepspeed_python` is DeepSpeed's interpreter, if any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if deepspeed_python is not None:
        # DeepSpeed compiles operators on first use with the ninja beside its interpreter. They are kept apart from the
        # user's, because a run killed while compiling leaves a lock on which later runs wait forever.
        path = f"{Path(deepspeed_python).parent}{os.pathsep}{common.get('PATH', '')}"
        operators = Path(tempfile.gettempdir()) / f"hf_zero_bench_operators_{os.getuid()}"
        common |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "PATH": path, "TORCH_EXTENSIONS_DIR": str(operators)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def public(words: list[str]) -> list[str]:
    """A command line without this machine's folders."""
    return [Path(word).name if word.startswith("/") and os.path.exists(word) else word for word in words]


def machine() -> dict[str, Any]:
    """Processor, memory, Python, load."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_gib, 1),
        "python": platform.python_version(),
        "system": platform.system(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def about(module: str, *packages: str, launcher: tuple[str, ...] = ("python", "-m")) -> dict[str, Any]:
    """Date, command, machine, and versions of torch, hf_zero and these packages: the head of a result."""
    import hf_zero  # maybe from a checkout that is not installed

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([*launcher, module, *public(sys.argv[1:])]),
        "machine": machine(),
        "versions": {"hf_zero": hf_zero.__version__, **{name: version(name) for name in ("torch", *packages)}},
    }


def keep(run: dict[str, Any], markdown: str, name: str, folder: Path = RESULTS) -> None:
    """Writes DATE-NAME.json with everything, and .md; sets today's date in `run` if it has none."""
    run = {"date": str(datetime.date.today()), **run}
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{run['date'][:10]}-{name}"
    stem.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown, encoding="utf-8")


def page_with(text: str, inside: str, command: str) -> str:
    """A page with the text between the marks of `command` replaced by `inside`."""
    begin, end = f"<!-- begin: {command} -->\n", "<!-- end -->\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{inside}\n{end}{after}"
