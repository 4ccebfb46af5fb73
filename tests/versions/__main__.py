"""`make test-versions`: an environment under .versions for each set of versions, and the selected tests in it.

python -m tests.versions oldest newest      these sets; default: all except those named after a Python version
python -m tests.versions --list             lists the sets
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from tests.versions.sets import BY_NAME, CHOSEN, HOSTS, ROOT, SETS, VersionSet, pinned

FOLDER = ROOT / ".versions"
TORCH = os.environ.get("TORCH", "torch==2.13.0")
VERSIONS = f"""
import importlib.metadata, sys
found = [f"{{name}} {{importlib.metadata.version(name)}}" for name in {HOSTS!r}]
print(", ".join([f"Python {{sys.version.split()[0]}}", *found]))
"""


class NotHere(Exception):
    """A requirement of a set that this machine does not have."""


def interpreters(version: str) -> Iterator[Path]:
    """Usual locations of a Python of this version."""
    found = shutil.which(f"python{version}")
    if found:
        yield Path(found)
    yield from sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))


def interpreter(versions: VersionSet) -> Path:
    """The Python for an environment."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if versions.python in ("", here):
        return Path(sys.executable)
    for path in interpreters(versions.python):
        if subprocess.run([path, "-c", "import ssl, venv"], capture_output=True).returncode == 0:
            return path
    raise NotHere(f"no python{versions.python} on PATH or under ~/.pyenv")


def pip(python: Path, *words: object) -> None:
    """Runs an environment's pip; its output is shown if it fails."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *words]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise NotHere(f"pip says: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def environment(versions: VersionSet) -> Path:
    """The interpreter of a set's environment, which is created if necessary."""
    folder, made_with = FOLDER / versions.name, interpreter(versions)
    python = folder / "bin" / "python"
    key = f"{versions} {made_with} {TORCH} {(ROOT / 'setup.cfg').read_text(encoding='utf-8')}"
    stamp = folder / f".ready-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if stamp.exists() and not versions.newest:
        return python
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([made_with, "-m", "venv", folder], check=True)
        if made_with == Path(sys.executable):
            share_libraries(python)
    pip(python, "--upgrade", "pip")
    pins = pinned(versions)
    at_floor = next((pin for pin in pins if pin.startswith("torch==")), None)
    pip(python, *(at_floor or word if word.startswith("torch") else word for word in shlex.split(TORCH)))
    torch = [word for word in shlex.split(TORCH) if word.startswith("torch")]
    options = ["--upgrade", "--upgrade-strategy", "eager", *torch] if versions.newest else []
    pip(python, *options, *pins, "-e", ".[dev,examples]")
    stamp.touch()
    return python


def share_libraries(python: Path) -> None:
    """Adds our libraries after the environment's own, so that pip only installs versions that differ."""
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    ours = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    Path(site, "zz_shared.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")


def run(versions: VersionSet, arguments: list[str]) -> bool:
    """Whether the selected tests pass with one set."""
    print(f"{versions.name}: {versions.why}", flush=True)
    python = environment(versions)
    found = subprocess.run([python, "-c", VERSIONS], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    print(f"  {found.strip()}", flush=True)
    start = time.monotonic()
    command = [python, "-m", "pytest", "-q", "-m", "not slow and not oracle and not multinode", *arguments]
    names_tests = any(word.startswith("tests/") for word in arguments)
    passed = subprocess.run([*command, *(() if names_tests else CHOSEN)], cwd=ROOT).returncode == 0
    print(f"{versions.name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="SET", help="one of --list")
    parser.add_argument("--list", action="store_true", help="show the sets")
    parser.add_argument("--pytest", default="", help="options of pytest; tests named here are run instead")
    options = parser.parse_args()
    if options.list:
        for versions in SETS:
            print(f"{versions.name:17} {' '.join(pinned(versions)):75} {versions.why}")
        return 0
    unknown = [name for name in options.names if name not in BY_NAME]
    if unknown:
        parser.error(f"no such set: {', '.join(unknown)} (there are {', '.join(BY_NAME)})")
    names = options.names or [versions.name for versions in SETS if not versions.name.startswith("python")]
    results = {}
    for name in names:
        try:
            results[name] = "passed" if run(BY_NAME[name], shlex.split(options.pytest)) else "FAILED"
        except NotHere as missing:
            results[name] = "FAILED: not set up"
            print(f"{name}: {missing}", flush=True)
    print("\n".join(["", *(f"{name:17} {result}" for name, result in results.items())]))
    return int(any(result != "passed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
