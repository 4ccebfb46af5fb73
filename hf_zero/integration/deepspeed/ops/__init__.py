"""deepspeed.ops: fused optimizers, each in a package of its own."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {}, submodules=("adagrad", "adam", "lamb", "lion"))
