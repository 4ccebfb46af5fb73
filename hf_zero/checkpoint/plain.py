"""Makes foreign objects fit for a file that opens anywhere: builtin containers and numbers, not their subclasses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def plain(value: Any) -> Any:
    """`value` with dict, list, str and number subclasses (config classes, numpy scalars) turned into builtins."""
    if value is None or isinstance(value, (bool, torch.Size, Tensor, torch.dtype, OrderedDict)):
        return value
    simple: type[Any]
    for simple in (int, float, str, bytes):
        if isinstance(value, simple):
            return simple(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(plain(entry) for entry in value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value
