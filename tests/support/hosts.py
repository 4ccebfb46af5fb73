"""Where a host library of an old version, alone, is no reference for a comparison."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

# Measured with transformers 5.3 and accelerate 1.10: without an engine, gradients of two micro-batches have half their
# size (those of hf_zero have not, and equal plain PyTorch's). With 5.17 and 1.15 both are right.
PLAIN_TRAINER_ACCUMULATES = Version(importlib.metadata.version("transformers")) >= Version("5.17")
WHY_NOT = "this transformers, without an engine, divides accumulated gradients twice"
