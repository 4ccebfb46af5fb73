"""deepspeed.launcher: what other launchers read from it."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {}, submodules=("runner",))
