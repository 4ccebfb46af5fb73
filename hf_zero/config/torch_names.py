"""The classes of torch.optim by name: a wrong one is said with all other problems, in a room that imports no torch."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
SCHEDULES = (
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LRScheduler", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR",
    "ReduceLROnPlateau", "SequentialLR", "StepLR",
)  # fmt: skip


def is_class_of(module: str, name: str, listed: Iterable[str]) -> bool:
    """Whether torch has a class of this name, as far as can be said: one that is younger than the list counts, too."""
    return name in listed or isinstance(getattr(sys.modules.get(module), name, None), type)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is spelled most like this one; "" where none is."""
    by_lower = {entry.lower(): entry for entry in known}
    close = difflib.get_close_matches(name.lower()[:100], by_lower, n=1, cutoff=0.7)
    return by_lower[close[0]] if close else ""
