"""Names around tensor constructors that callers of zero.Init replace for a while; our Init wraps no constructor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

torch_arange = torch.arange


def unchanged_constructor(function: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Callable[..., Any]:
    """Constructors keep their dtype and device inside zero.Init, so there is nothing to wrap."""
    return function
