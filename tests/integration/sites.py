"""Temporary Python environments with hf_zero, and processes that run in them (startup needs a new process)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PIP_TIMEOUT_S = 240


@dataclass(frozen=True)
class Site:
    """One environment: its interpreter and its site-packages folder."""

    python: Path
    packages: Path

    @classmethod
    def empty(cls, folder: Path) -> Site:
        venv.create(folder, with_pip=False, symlinks=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return cls(folder / "bin" / "python", folder / "lib" / version / "site-packages")

    def unpack(self, wheel: Path) -> Site:
        """Unpacks a pure-Python wheel, which is equivalent to installing it."""
        zipfile.ZipFile(wheel).extractall(self.packages)
        return self

    def borrow_libraries(self) -> Site:
        """Add this test run's torch, transformers, ... without its .pth files (and so without its own hf_zero)."""
        paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        # An environment of `make test-versions` gets most of its libraries from another one, after its own.
        paths |= dict.fromkeys(path for path in sys.path if Path(path).name == "site-packages")
        (self.packages / "zz_borrowed.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
        return self

    def add_real_deepspeed(self) -> Site:
        """An imitation of a real DeepSpeed: a regular package with metadata."""
        package = self.packages / "deepspeed"
        package.mkdir()
        (package / "__init__.py").write_text("REAL = True\n", encoding="utf-8")
        info = self.packages / "deepspeed-0.17.5.dist-info"
        info.mkdir()
        metadata = "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.17.5\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "top_level.txt").write_text("deepspeed\n", encoding="utf-8")
        return self

    def run(self, code: str, *, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs code in a process of this environment; -I excludes PYTHONPATH and the current folder."""
        return self.run_args("-I", "-c", textwrap.dedent(code), cwd=cwd, **env)

    def run_args(self, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if key not in ("HF_ZERO", "PYTHONPATH", "PYTHONHOME")}
        return subprocess.run(
            [str(self.python), *args],
            env={**clean, "OMP_NUM_THREADS": "1", **env},
            cwd=cwd or self.packages.parent,
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT_S,
        )

    def ask(self, code: str, **env: str) -> Any:
        """Runs code that assigns `answer`; returns its value."""
        done = self.run(textwrap.dedent(code) + "\nimport json\nprint('ANSWER ' + json.dumps(answer))\n", **env)
        assert done.returncode == 0, done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
        return json.loads(line.removeprefix("ANSWER "))


def copy_of_the_tree(folder: Path) -> Path:
    """The files that a build needs, outside the checkout, because building creates folders."""
    tree = folder / "tree"
    shutil.copytree(ROOT / "hf_zero", tree / "hf_zero", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "packaging", tree / "packaging", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", tree / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "Makefile", "mkdocs.yml"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    return tree


def pip(*args: str, python: Path | None = None) -> str:
    """Runs pip without an index, in the environment of `python` if given; returns its output."""
    target = [] if python is None else ["--python", str(python)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *target, "--disable-pip-version-check", "-q", *args],
        env={**os.environ, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=PIP_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
