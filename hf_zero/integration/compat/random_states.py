"""Random states by name, of `deepspeed.checkpointing`: what ranks of a tensor-parallel group draw apart or alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_zero.activations.calls import CONFIGURED
from hf_zero.device.kinds import current_device
from hf_zero.device.registry import runtime_of

_MODEL_PARALLEL = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Random states by name, for code whose ranks must draw different numbers; on the default device's generator."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """
        Raises:
            Exception: for a name or a seed that is there already (the type is DeepSpeed's).
        """
        if seed in self.seeds_:
            raise Exception(f"seed {seed} already exists")
        if name in self.states_:
            raise Exception(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        with _kept_state():
            torch.manual_seed(seed)
            self.states_[name] = _state()

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the state `name` inside, and go on with the old one after."""
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added")
        with _kept_state():
            _set_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = _state()


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device as all ranks of a tensor-parallel group do, and the tracker's state as this rank alone does."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + 2718 + CONFIGURED.tensor_rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracker's state anew, and nothing else."""
    with _tracker.fork():
        torch.manual_seed(seed + 2718 + CONFIGURED.tensor_rank)


def with_named_states(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which draws from the named states what it drew the first time whenever it is called again."""
    first: list[dict[str, torch.Tensor]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        now = _tracker.get_states()
        if not first:
            first.append(now)
            return function(*args, **kwargs)
        _tracker.set_states(dict(first[0]))
        try:
            return function(*args, **kwargs)
        finally:
            _tracker.set_states(now)

    return call if _tracker.states_ else function


def _state() -> torch.Tensor:
    return runtime_of(current_device()).random_state()


def _set_state(state: torch.Tensor) -> None:
    runtime_of(current_device()).set_random_state(state)


@contextlib.contextmanager
def _kept_state() -> Iterator[None]:
    kept, host = _state(), torch.get_rng_state()
    try:
        yield
    finally:
        _set_state(kept)
        torch.set_rng_state(host)
