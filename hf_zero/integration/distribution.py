"""The metadata of `deepspeed` for importlib.metadata: name, version, top-level package."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path

from hf_zero.deepspeed_version import VERSION

_NAME = "deepspeed"
_FILES = {
    "METADATA": (
        f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {VERSION}\n"
        "Summary: hf_zero answering as deepspeed\nLicense: Apache-2.0\n"
    ),
    "INSTALLER": "hf_zero\n",
    "top_level.txt": f"{_NAME}\n",
}


class AliasDistribution(Distribution):
    """A distribution that only exists in memory: site-packages has nothing named deepspeed."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(str(filename))

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path
