"""Training features: the methods that an engine calls on them during training, and their state in checkpoints.

    engine                      every feature, in the order of creation
    initialize          ->      adjust_groups(groups)                 before the optimizer gets its parameters
                        ->      begin(tools)                          the engine is complete
    a loader is made    ->      loader_options(draw)                  how it chooses and loads samples
    a loader's batch    ->      on_batch(progress, batch)             may replace a training batch
    forward(**batch)    ->      before_forward(progress, keywords)    may replace the model's keywords
                        ->      after_forward(progress, ..., output)  may replace what forward returns
    backward(loss)      ->      after_backward(progress, loss)        gradients of this rank are complete
    step() at a boundary ->     before_step(progress)                 gradients are reduced, but not clipped
                        ->      after_step(progress, applied)         weights and counters are updated
    save_checkpoint     ->      state_dict()                          saved under its name in the model's file
    load_checkpoint     ->      load_state_dict(state, progress)      also called without a state, for the counters
    destroy             ->      close()

A feature acts on the model itself (with hooks or a replaced forward); the engine only calls it at the right times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Settings that a program made before there is an engine, such as "comms" (`deepspeed.comm.configure`).
ASKED: dict[str, Any] = {}

# Kinds of parallelism in addition to ZeRO: subclasses of `hf_zero.comm.ProgramGroups`, beginning with the innermost
# dimension.
DIMENSIONS = [
    "hf_zero.tensor.groups:TensorGroups",
    "hf_zero.sequence.groups:SequenceGroups",
]
# Those that only the config defines, by the feature that it enables.
DIMENSIONS_OF_FEATURES = {"experts": "hf_zero.extras.experts.spread:ExpertGroups"}

_ASKED_OF_MODEL = "_hf_zero_asks_for"


def ask_for(model: Any, extra: str) -> None:
    """Enable the features of an extra for `model` regardless of the config, because a program uses it already."""
    vars(model).setdefault(_ASKED_OF_MODEL, set()).add(extra)


def asked_of(model: Any) -> set[str]:
    """Return the names of the extras passed to `ask_for`."""
    names: set[str] = vars(model).get(_ASKED_OF_MODEL, set())
    return names


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside a PEFT model."""
    return getattr(model, "get_base_model", lambda: model)()


def text_config(config: Any) -> Any:
    """Return the configuration of the text part of a multimodal model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of training.

    Attributes:
        step: the number of updates so far.
        micro_step: the number of backward passes since the last update: the index of the current forward.
        accumulation_steps: micro-batches per update.
        training: whether the model is in train mode.
        rank: the data-parallel rank of this process.
    """

    step: int
    micro_step: int = 0
    accumulation_steps: int = 1
    training: bool = True
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """The data and ranks of a training loader.

    Attributes:
        num_samples: the length of the dataset; None for an iterable dataset.
        per_update: samples per update over all ranks.
        micro_batch_size: samples per forward on one rank.
        world: the number of data-parallel ranks; `rank` is this one.
    """

    num_samples: int | None
    per_update: int
    micro_batch_size: int
    world: int
    rank: int


@dataclass(frozen=True, slots=True)
class EngineTools:
    """A feature's access to its engine.

    Attributes:
        full_gradient: returns the full reduced gradient of a parameter since the last step, or None. Collective.
        forward_only: places another model like the engine's own, without training it, and returns a function that runs
            its forward.
        world: the collectives of all ranks.
        engine: a weak proxy of the engine, for reading only.
        phases: the engine's phases, which have observers (`hf_zero.api.engine_module.Phases`).
    """

    full_gradient: Callable[[Any], Any]
    forward_only: Callable[[Any], Callable[..., Any]]
    world: Any
    engine: Any = None
    phases: Any = None


class TrainingFeature:
    """Base class of features. By default, the methods do nothing.

    Attributes:
        name: the key of its state in checkpoints and in `Features.named`.
        waits_for_outcome: whether `after_step` must know if the update was skipped, for which the host waits for the
            device. Otherwise an update whose outcome is not known yet counts as applied.
    """

    name = ""
    waits_for_outcome = True

    def on_batch(self, progress: Progress, batch: Any) -> Any:
        """Return the batch to train on. Called before samples and tokens are counted."""
        return batch

    def loader_options(self, draw: Draw) -> dict[str, Any]:
        """Return arguments of DataLoader that choose (`batch_sampler`) or load (`num_workers`) samples."""
        return {}

    def adjust_groups(self, groups: list[dict[str, Any]]) -> None:
        """Add the feature's parameters to the optimizer's groups in place, or remove those no longer in the model."""

    def begin(self, tools: EngineTools) -> None:
        """Called when parameters are in place and equal on all ranks. May be collective."""

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords for the model's forward. Also called in evaluation."""
        return keywords

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        """Return the output of the engine's forward; `inputs` and `keywords` are those of the model."""
        return output

    def after_backward(self, progress: Progress, loss: Any) -> None:
        """`loss`: the return value of `engine.backward`; the sum over micro-batches is the mean loss."""

    def before_step(self, progress: Progress) -> None:
        """Called with reduced gradients before an update."""

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        """Called after an update. If not `applied`, it was skipped on all ranks (overflow)."""

    def holds_schedule(self, progress: Progress) -> bool:
        """Whether the learning-rate schedule does not advance after the current update."""
        return False

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return plain values and CPU tensors, equal on all ranks; None if there is no state."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None, progress: Progress) -> None:
        """Resume from a checkpoint; `state` is None if it has no state of this feature."""

    def close(self) -> None:
        """Restore the original model."""


class Features(list[TrainingFeature]):
    """The features of an engine, called in order: by the engine itself, or here where their results are combined."""

    def add(self, feature: TrainingFeature) -> None:
        """Append a feature with a unique name.

        Raises:
            ValueError: a feature of this name exists.
        """
        if self.named(feature.name) is not None:
            raise ValueError(f"the engine already has a training feature named {feature.name!r}; close that one first")
        self.append(feature)

    def named(self, name: str) -> Any:
        return next((feature for feature in self if feature.name == name), None)

    def adjust_groups(self, groups: list[dict[str, Any]]) -> None:
        for feature in self:
            feature.adjust_groups(groups)

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        for feature in self:
            keywords = feature.before_forward(progress, keywords)
        return keywords

    def loader_options(self, draw: Draw) -> dict[str, Any]:
        return {name: value for feature in self for name, value in feature.loader_options(draw).items()}

    def on_batch(self, progress: Progress, batch: Any) -> Any:
        for feature in self:
            batch = feature.on_batch(progress, batch)
        return batch

    def holds_schedule(self, progress: Progress) -> bool:
        return any(feature.holds_schedule(progress) for feature in self)

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        for feature in reversed(self):
            output = feature.after_forward(progress, inputs, keywords, output)
        return output

    @property
    def wait_for_outcome(self) -> bool:
        return any(feature.waits_for_outcome for feature in self)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all features that have one, by name."""
        states = {feature.name: feature.state_dict() for feature in self}
        return {name: dict(state) for name, state in states.items() if state is not None}

    def load_state_dict(self, states: Mapping[str, Any], progress: Progress) -> None:
        for feature in self:
            state = states.get(feature.name)
            feature.load_state_dict(state if isinstance(state, Mapping) else None, progress)

    def close(self) -> None:
        for feature in reversed(self):
            feature.close()
        self.clear()
