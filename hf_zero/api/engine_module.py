"""Parts of an engine: its view of the model, its settings, and its phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import _profiler_enabled

from hf_zero.comm import ParallelGroups, enter
from hf_zero.config import Resolved, ZeroPolicy
from hf_zero.device.registry import runtime_of
from hf_zero.log import logger
from hf_zero.params.store import ParameterStore
from hf_zero.spans import SPANS

WHOLE_WEIGHTS_ARE_OFF = (
    "at stage 3 whole weights are gathered only if zero_optimization.stage3_gather_16bit_weights_on_model_save is "
    "true: set it, or save a checkpoint and run `python -m hf_zero.zero_to_fp32 CHECKPOINT_DIR OUTPUT`"
)


class ModuleView:
    """An engine's view of the model it wraps.

    Attributes:
        store: stores the weights; None if the model is unchanged, or after `destroy`.
        before_saving: called before whole weights are read. Collective.
    """

    def __init__(
        self,
        module: nn.Module,
        store: ParameterStore | None,
        device: torch.device,
        zero: ZeroPolicy,
        groups: ParallelGroups,
    ) -> None:
        self.store = store
        self.before_saving: Callable[[], None] = lambda: None
        self._world = groups.world
        self._is_cut = groups.holds_parts
        self._module = module
        self._device = device
        self._zero = zero

    def to(self, *args: Any, **kwargs: Any) -> None:
        """Like torch's method where possible; a no-op for the current device and dtype.

        Raises:
            RuntimeError: if weights in flat buffers would be moved or cast.
        """
        if self.store is None:
            self._module.to(*args, **kwargs)
            return
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        current = {parameter.dtype for parameter in self._module.parameters() if parameter.is_floating_point()}
        here = self._device.type, self._device.index or 0
        moves = device is not None and (device.type, device.index or 0) != here
        if moves or (dtype is not None and current != {dtype}):
            raise RuntimeError(
                f"engine.to({device or ''}{' ' if device and dtype else ''}{dtype or ''}) would separate the weights "
                "from the optimizer that trains them. Set bf16 in the config, choose the device before initialize(), "
                "or call engine.destroy() first when training is over."
            )

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether saving the model gathers whole weights that no rank has: at stage 3 if the config says so, and always
        with tensor parallelism. Otherwise every rank has whole weights anyway."""
        if self._zero.stage == 3:
            return self._zero.keys.stage3_gather_16bit_weights_on_model_save
        return self._is_cut

    def consolidated(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return whole weights in host memory on rank 0, None on the others. Collective. Frozen parameters that PEFT
        saves with the model's adapters are not excluded."""
        from hf_zero.api.gathered_parameters import frozen_in_adapters  # no step needs it
        from hf_zero.params.consolidation import consolidated_state_dict  # no step needs it

        self.before_saving()
        enter("save_model or get_state_dict, which gather whole weights,")
        keeps = self._world.rank == 0
        include = frozen_in_adapters(self._module) if exclude_frozen_parameters else ()
        weights = consolidated_state_dict(
            self._module, keeps=keeps, exclude_frozen=exclude_frozen_parameters, include=include
        )
        return weights if keeps else None

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights in the model's dtype as one torch file; False if gathering is off. Collective."""
        if self._zero.stage == 3 and not self.zero_gather_16bit_weights_on_model_save():
            logger.warning("save_16bit_model wrote nothing: %s", WHOLE_WEIGHTS_ARE_OFF)
            return False
        from hf_zero.checkpoint.consolidate import save_whole_weights

        self.before_saving()
        enter("save_16bit_model")
        path = Path(save_dir) / save_filename
        save_whole_weights(self._module, path, self._world, exclude_frozen=exclude_frozen_parameters)
        return True


# Settings: the resolved config, and the batch sizes, which a script may change.


class EngineSettings:
    """The settings part of an engine. Names are DeepSpeed's.

    Attributes:
        resolved: the config, without later changes by a script.
        accumulation_steps: micro-batches per update.
    """

    def __init__(self, resolved: Resolved, num_ranks: int, ranks_per_sample: int = 1) -> None:
        """
        Args:
            num_ranks: ranks that see different data.
            ranks_per_sample: ranks that see the same whole samples.
        """
        self.resolved = resolved
        self._num_ranks = num_ranks
        self._ranks_per_sample = ranks_per_sample
        self.accumulation_steps = resolved.batch.accumulation_steps
        self._micro_batch_size = resolved.batch.micro_batch_size
        self.before_change: Callable[[], None] = lambda: None  # may refuse another number of accumulation steps

    def train_batch_size(self) -> int:
        """The config's batch size: a sample that several ranks see whole counts once for each."""
        return self.samples_per_update() * self._ranks_per_sample

    def samples_per_update(self) -> int:
        """Number of distinct samples per update."""
        return self._micro_batch_size * self.accumulation_steps * self._num_ranks

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        return self.train_batch_size(), self._micro_batch_size, self.accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of accumulation steps so that the next update has `train_batch_size` samples.

        Raises:
            WrongMoment: if gradients of the next update are pending.
        """
        ranks = self._num_ranks * self._ranks_per_sample
        per_micro_step = self._micro_batch_size * ranks
        if train_batch_size <= 0 or train_batch_size % per_micro_step:
            raise ValueError(
                f"train_batch_size={train_batch_size} is not a positive multiple of "
                f"micro batch {self._micro_batch_size} x world size {ranks} = {per_micro_step}"
            )
        accumulation_steps = train_batch_size // per_micro_step
        if accumulation_steps != self.accumulation_steps:
            self.before_change()
        self.accumulation_steps = accumulation_steps

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward, and the train batch size with it."""
        if micro_batch_size <= 0:
            raise ValueError(f"micro batch size must be positive, got {micro_batch_size}")
        self._micro_batch_size = micro_batch_size

    def amp_enabled(self) -> bool:
        """Whether the config makes forward run under torch.autocast."""
        return self.resolved.precision.autocast is not None


class Observer(Protocol):
    """Called before and after a phase, for example to measure memory."""

    def phase_begins(self, name: str) -> None: ...

    def phase_ends(self, name: str) -> None: ...


class Phases:
    """Runs phases.

    Attributes:
        observers: called before and after each phase.
        explain: adds an explanation to an error in the named phase.
        num_done: number of completed phases, by name.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self.observers: list[Observer] = []
        self.explain: Callable[[str, Exception], None] | None = None
        self.num_done: Counter[str] = Counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context in which phase `name` of the engine runs."""
        for observer in self.observers:
            observer.phase_begins(name)
        try:
            is_shown = self._runtime.runs_ahead or _profiler_enabled()
            with self._runtime.range(f"hf_zero {name}") if is_shown else nullcontext(), SPANS.span(name):
                yield
        except Exception as error:
            if self.explain is not None:
                self.explain(name, error)
            raise
        self.num_done[name] += 1
        for observer in self.observers:
            observer.phase_ends(name)
