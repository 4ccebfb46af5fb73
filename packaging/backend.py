"""PEP 517 backend: setuptools, plus what it has no place for in a wheel: the startup hook and the stubs of `deepspeed`,
which lie beside the package, and, unless the install is editable, the pages of docs/ for users."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

HERE = Path(__file__).resolve().parent
Settings = Mapping[str, object] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    add(Path(wheel_directory, name), {**hook(), **stubs(), **pages(HERE.parent)})
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    add(Path(wheel_directory, name), {**hook(), **stubs()})
    return name


def hook() -> dict[str, bytes]:
    return {"hf_zero.pth": HERE.joinpath("hf_zero.pth").read_bytes()}


def stubs() -> dict[str, bytes]:
    """In a process of its own, without the packages of this environment: one may be another hf_zero."""
    program = [sys.executable, "-I", "-S", "-B", str(HERE / "deepspeed_stubs.py")]
    files: dict[str, str] = json.loads(subprocess.run(program, check=True, stdout=subprocess.PIPE).stdout)
    return {name: text.encode() for name, text in files.items()}


def pages(root: Path) -> dict[str, bytes]:
    """The pages that mkdocs.yml lists above those for developers, by their place in a wheel."""
    for_users = root.joinpath("mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2].partition("Developers:")[0]
    names = re.findall(r"[\w-]+\.md", for_users)
    return {f"hf_zero/docs/{name}": root.joinpath("docs", name).read_bytes() for name in names}


def add(wheel: Path, files: Mapping[str, bytes]) -> None:
    """Rewrites the archive with `files`, because members of a zip file (here RECORD) cannot be changed in place."""
    fresh = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            content = old.read(member)
            if member.filename.endswith(".dist-info/RECORD"):
                for name, added in files.items():
                    new.writestr(_like(member, name), added)
                    content = _record_line(name, added) + content
            new.writestr(member, content)
    os.replace(fresh, wheel)


def _like(member: zipfile.ZipInfo, filename: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(filename, member.date_time)
    info.external_attr = member.external_attr
    info.compress_type = member.compress_type
    return info


def _record_line(filename: str, content: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{filename},sha256={digest},{len(content)}\n".encode()
