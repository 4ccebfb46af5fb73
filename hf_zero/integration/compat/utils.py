"""Utilities that programs import from deepspeed, deepspeed.runtime, deepspeed.utils and git_version_info."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_zero.comm import this_process
from hf_zero.deepspeed_version import GIT_BRANCH, GIT_HASH, VERSION
from hf_zero.integration.compat.accelerator import get_accelerator
from hf_zero.integration.compat.kinds import COMPATIBLE, NO_OPERATORS
from hf_zero.log import log_dist, logger
from hf_zero.precision import ForwardPrecision

# The logging helpers of `deepspeed.utils.logging`, and other reports about a run, on hf_zero's logger.


log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


@functools.lru_cache(None)
def warning_once(message: str) -> None:
    """Warn once per message."""
    logger.warning(message)


@functools.lru_cache(None)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist`, only the first time."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print to standard output on the given ranks; -1 among them, or None, means every rank."""
    if ranks is None or -1 in ranks or this_process().rank in ranks:
        sys.stdout.write(f"[Rank {this_process().rank}] {message}\n")
        sys.stdout.flush()


def print_json_dist(
    message: Mapping[str, Any], ranks: Sequence[int] | None = None, path: str | os.PathLike[str] | None = None
) -> None:
    """Write `message` with the rank as a JSON file on the given ranks; no-op without a path."""
    if path is None or not (ranks is None or -1 in ranks or this_process().rank in ranks):
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**message, "rank": this_process().rank}, file)


def get_log_level_from_string(log_level_str: str) -> int:
    """
    Raises:
        ValueError: for an unknown level.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str!r} is not one of the log levels {', '.join(log_levels)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger lets through messages of this level."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def print_configuration(args: Any, name: str) -> None:
    """Log every attribute of a namespace."""
    logger.info("%s:", name)
    for attribute, value in sorted(vars(args).items()):
        logger.info("  %s %s %s", attribute, "." * max(1, 29 - len(attribute)), value)


class LoggerFactory:
    """Creates loggers, for programs that create their own through it."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        if name is None:
            raise ValueError("create_logger() needs a name")
        new_logger = logging.getLogger(name)
        new_logger.setLevel(level)
        return new_logger


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Information about the installation: version, source and build.
version, git_hash, git_branch = VERSION, GIT_HASH, GIT_BRANCH
version_major, version_minor, version_patch = (int(number) for number in version.partition("+")[0].split("."))
installed_ops, compatible_ops = NO_OPERATORS, COMPATIBLE
accelerator_name = ""
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy every tensor inside nested dicts, lists and tuples, so that a view is saved without its whole storage.

    Tied tensors (the same elements of the same memory) stay one tensor in the copy, so that they are written to a file
    only once.
    """
    return _clone(item, device, {})


def _clone(item: Any, device: torch.device | str, copies: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(item, Tensor):
        return _clone_tensor(item, device, copies)
    if isinstance(item, dict):
        copied = item.copy()
        copied.update((key, _clone(value, device, copies)) for key, value in item.items())
        return copied
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_clone(value, device, copies) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_clone(value, device, copies) for value in item)
    return item


def _clone_tensor(tensor: Tensor, device: torch.device | str, copies: dict[tuple[Any, ...], Tensor]) -> Tensor:
    place: tuple[Any, ...] = (id(tensor),)  # empty or inaccessible memory does not identify a tensor
    if tensor.layout is torch.strided and tensor.numel() and tensor.data_ptr():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if place not in copies:
        # Always copy: a parameter that is a view of a flat buffer would write the whole buffer to the file.
        copies[place] = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    return copies[place]


class RepeatingLoader(Iterable[T]):
    """A data loader that starts over when it is exhausted."""

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        return next(self._batches)


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> Iterator[None]:
    """Context that builds modules on a device (by default meta) and in a floating-point dtype."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Move tensors in nested lists, tuples and dicts to `device`; with a criterion, only those for which it is true."""
    if isinstance(item, Tensor) or hasattr(item, "to"):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item


copy_to_device = move_to_device


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators."""
    import numpy

    numpy.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)


def get_global_norm(norm_list: Sequence[float]) -> float:
    """The norm of the whole from the norms of its parts; infinite if a part is negative or not finite."""
    if any(norm < 0 or not math.isfinite(norm) for norm in norm_list):
        return math.inf
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """torch's clipping for whole gradients on this rank; returns the norm before clipping.

    An engine's gradients are not in `parameter.grad`; use the key gradient_clipping for them.
    """
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise NotImplementedError("clip_grad_norm_(mpu=...): model parallelism is not supported, see docs/features.md")
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def has_inf_or_nan(x: Tensor) -> Tensor:
    """A 0-dim tensor: 1.0 if `x` has a non-finite element."""
    return (~torch.isfinite(x)).any().float()


class DummyOptim:
    """A placeholder optimizer for a model that is not trained; only has `param_groups`."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.param_groups = [{"params": params}]


def noop_decorator(function: F) -> F:
    return function


noop_context = contextlib.nullcontext


def ensure_directory_exists(filename: str) -> None:
    """Create the parent folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def empty_cache() -> None:
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def get_ma_status() -> int:
    """Bytes allocated on the device, on rank 0; 0 elsewhere."""
    return int(get_accelerator().memory_allocated()) if this_process().rank == 0 else 0


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The single value of all items.

    Raises:
        RuntimeError: if they differ.
    """
    distinct = set(items)
    if len(distinct) != 1:
        raise RuntimeError(f"expected one value, got {len(distinct)}: {sorted(map(repr, distinct))}")
    return distinct.pop()


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of `num_parts` runs of equal length; the last gets the remainder, or the last ones are empty."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    length, left = divmod(num_items, num_parts)
    return [part * length + min(part, left) for part in range(num_parts + 1)]


@contextlib.contextmanager
def autocast_if_enabled(engine: Any) -> Iterator[None]:
    """Context with the engine's torch_autocast for a computation outside its forward; disables another autocast."""
    precision = getattr(engine, "_forward_precision", None)
    if isinstance(precision, ForwardPrecision) and engine.amp_enabled():
        with precision.context():
            yield
        return
    with torch.autocast(engine.device.type, enabled=False):
        yield


def instrument_w_nvtx(function: F) -> F:
    """Wrap `function` so that a GPU profiler shows it as a range."""

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(function.__qualname__):
            return function(*args, **kwargs)

    return inside  # type: ignore[return-value]


def is_compile_supported() -> bool:
    return hasattr(torch, "compile")


def disable_compile(function: F) -> F:
    """Exclude `function` from torch.compile."""
    disabled: F = torch.compiler.disable(function)
    return disabled


def is_compiling() -> bool:
    return bool(torch.compiler.is_compiling())


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a dotted path."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    around, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, around) if around else model, name, module)


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Mark the matrices that Muon updates (`use_muon`) if the config names Muon."""
    name = getattr(config_class, "optimizer_name", None)
    if str(name).lower() != "muon":
        return
    for key, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and not any(word in key.lower() for word in ("embed", "lm_head"))
        parameter.use_muon = is_matrix  # type: ignore[attr-defined]


class LinearModuleForZeroStage3(nn.Linear):
    """torch's Linear, because stage 3 gathers its weight around forward and backward automatically."""


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether the installed PyTorch is within these versions, inclusive.

    Raises:
        ValueError: without any version.
    """
    from packaging.version import parse

    if min_version is None and max_version is None:
        raise ValueError("required_torch_version(): give min_version, max_version, or both")
    installed = parse(parse(torch.__version__).base_version)
    is_old = min_version is not None and installed < parse(str(min_version))
    is_new = max_version is not None and installed > parse(str(max_version))
    return not is_old and not is_new
