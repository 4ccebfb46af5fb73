"""Available memory: the minimum of what the machine, its control groups and ulimit allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero.device.host_memory import host_available

GB = 10**9


def machine(root: Path, *, available_kb: int = 1_000_000, cgroup: str = "0::/job/rank\n", data_kb: int = 0) -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {available_kb} kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/status": f"Name: x\nVmData:   {data_kb} kB\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(root: Path, path: str, **files: int | str) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_the_machine_alone(tmp_path: Path) -> None:
    assert host_available(machine(tmp_path, available_kb=5_000_000)) == 5_000_000 * 1024


def test_a_group_above_counts_and_its_cache_could_be_had(tmp_path: Path) -> None:
    root = machine(tmp_path, available_kb=50_000_000)
    group(root, "job/rank", memory__max="max", memory__current=GB)
    group(root, "job", memory__max=8 * GB, memory__current=5 * GB, memory__stat=f"anon 1\ninactive_file {2 * GB}")
    assert host_available(root) == 5 * GB


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    root = machine(tmp_path, available_kb=50_000_000, cgroup="5:cpu:/x\n4:memory:/job\n0::/\n")
    group(root, "memory/job", memory__limit_in_bytes=4 * GB, memory__usage_in_bytes=1 * GB)
    assert host_available(root) == 3 * GB


def test_ulimit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_zero.device.host_memory.resource.getrlimit", lambda _which: (3 * GB, 3 * GB))
    assert host_available(machine(tmp_path, available_kb=50_000_000, data_kb=1_000_000)) == 3 * GB - 1_024_000_000


def test_a_system_without_these_files_has_no_limit(tmp_path: Path) -> None:
    assert host_available(tmp_path) > 10**15
