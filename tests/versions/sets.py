"""Versions of Python, torch and the Hugging Face libraries that hf_zero is tested with, in addition to .venv's."""

from __future__ import annotations

import configparser
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("torch", "transformers", "accelerate", "peft", "trl")


@dataclass(frozen=True)
class VersionSet:
    """One environment of `make test-versions`."""

    name: str
    why: str
    at_floor: tuple[str, ...] = ()  # libraries at the oldest version that setup.cfg allows
    pins: tuple[str, ...] = ()  # more pip requirements
    python: str = ""  # a Python version; "" for that of .venv, whose libraries are then shared
    newest: bool = False  # of everything, looked up at each run


OLDEST_PYTHON = "3.10"

SETS = (
    VersionSet("oldest", "every floor of setup.cfg together, on the oldest Python", HOSTS, python=OLDEST_PYTHON),
    VersionSet("old-libraries", "the libraries' floors on .venv's torch", HOSTS[1:]),
    VersionSet("old-transformers", "the rest is .venv's", ("transformers",)),
    VersionSet("old-accelerate", "the rest is .venv's, but for a trl that accepts it", ("accelerate",)),
    VersionSet("between", "a pair in the middle of them", pins=("transformers==5.17.0", "accelerate==1.15.0")),
    VersionSet("newest", "the newest that pip finds, but for torch, which is TORCH", newest=True),
    # Only run on request: each downloads its own torch.
    VersionSet("python3.10", "the newest that pip finds there", python="3.10"),
    VersionSet("python3.12", "the newest that pip finds there", python="3.12"),
    VersionSet("python3.13", "the newest that pip finds there", python="3.13"),
    VersionSet("python3.14", "the newest that pip finds there", python="3.14"),
)
BY_NAME = {versions.name: versions for versions in SETS}

# The tests of `make test` that depend on other libraries.
CHOSEN = (
    "tests/versions",
    "tests/config/test_fill.py",
    "tests/config/test_trainer_fills.py",
    "tests/integration/test_patches.py",
    "tests/integration/test_trainer_flow.py",
    "tests/integration/test_plugin_flow.py",
    "tests/integration/test_accelerate_flow.py",
    "tests/integration/test_several_models.py",
    "tests/integration/test_user_steps.py",
    "tests/integration/test_complete_checkpoints.py",
    "tests/integration/test_tied_weights.py",
    "tests/integration/test_weight_conversion.py",
    "tests/end_to_end/test_parity.py",
    "tests/end_to_end/test_stage3_weights.py",
    "tests/end_to_end/test_stage3_saving_and_merging.py",
    "tests/checkpoint/test_trainer.py",
    "tests/checkpoint/test_accelerate.py",
    "tests/trl/test_sft.py",
    "tests/trl/test_dpo.py",
    "tests/trl/test_grpo.py",
)


def requirements() -> dict[str, set[str]]:
    """The requirements of setup.cfg for each library, including extras: one version each, if consistent."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg", encoding="utf-8")
    lists = [metadata["options"]["install_requires"], *metadata["options.extras_require"].values()]
    found: dict[str, set[str]] = {}
    for line in "\n".join(lists).splitlines():
        requirement = re.match(r"([\w.-]+)(?:\[.*\])?\s*(?:>=\s*([\d.]+))?\s*(?:;.*)?$", line)
        if requirement:
            found.setdefault(requirement[1], set()).add(requirement[2] or "")
    return found


def floors() -> dict[str, str]:
    """The oldest version of each host library that setup.cfg allows."""
    stated = requirements()
    return {library: sorted(stated[library])[-1] for library in HOSTS}


def pinned(versions: VersionSet) -> list[str]:
    """The arguments of pip for this set."""
    oldest = floors()
    return [*(f"{library}=={oldest[library]}" for library in versions.at_floor), *versions.pins]
