"""Versions of Hugging Face libraries that are not a valid reference for a comparison."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

# Measured with transformers 5.3 and accelerate 1.10: without an engine, gradients of two micro-batches are half as
# large as they should be (hf_zero's are correct and equal plain PyTorch's). With 5.17 and 1.15 both are correct.
PLAIN_TRAINER_ACCUMULATES = Version(importlib.metadata.version("transformers")) >= Version("5.17")
WHY_NOT = "this transformers, without an engine, divides accumulated gradients twice"
