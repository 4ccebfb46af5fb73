"""PEP 517 backend: setuptools, plus one file (hf_zero.pth, the startup hook) at the root of every wheel it builds."""

from __future__ import annotations

import base64
import hashlib
import os
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

HOOK = Path(__file__).with_name("hf_zero.pth")
Settings = Mapping[str, object] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    add_hook(Path(wheel_directory, name))
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    add_hook(Path(wheel_directory, name))
    return name


def add_hook(wheel: Path) -> None:
    """Rewrites the archive with the hook, because members of a zip file (here RECORD) cannot be changed in place."""
    hook = HOOK.read_bytes()
    fresh = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            content = old.read(member)
            if member.filename.endswith(".dist-info/RECORD"):
                new.writestr(_like(member, HOOK.name), hook)
                content = _record_line(HOOK.name, hook) + content
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
