"""hf_zero: a pure-Python ZeRO engine for Hugging Face users; importing it makes `import deepspeed` find it."""

from __future__ import annotations

from hf_zero.integration.startup import install

TYPE_CHECKING = False  # not typing's own: this file runs at every interpreter start, and typing costs milliseconds
if TYPE_CHECKING:
    from accelerate.utils import DummyOptim, DummyScheduler

    from hf_zero.api.engine import ZeroEngine
    from hf_zero.api.gathered_parameters import gathered, gathered_weights
    from hf_zero.comm import init_distributed
    from hf_zero.config import ConfigError
    from hf_zero.integration.engine.engine import initialize

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "DummyOptim",
    "DummyScheduler",
    "ZeroEngine",
    "__version__",
    "gathered",
    "gathered_weights",
    "init_distributed",
    "initialize",
    "install",
]

# Loaded on first access.
_HOMES = {
    "ConfigError": "hf_zero.config",
    "DummyOptim": "accelerate.utils",
    "DummyScheduler": "accelerate.utils",
    "ZeroEngine": "hf_zero.api.engine",
    "gathered": "hf_zero.api.gathered_parameters",
    "gathered_weights": "hf_zero.api.gathered_parameters",
    "init_distributed": "hf_zero.comm",
    "initialize": "hf_zero.integration.engine.engine",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return globals().setdefault(name, getattr(import_module(_HOMES[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
