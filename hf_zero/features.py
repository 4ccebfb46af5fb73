"""Training-time features: what an engine tells them while it trains, and what they keep in its checkpoints.

    engine                      every feature, in the order in which they were made
    initialize          ->      adjust_groups(groups)                 before the optimizer gets its parameters
                        ->      begin(tools)                          the engine is complete
    a loader is made    ->      loader_options(draw)                  which samples it takes, and how
    a loader's batch    ->      on_batch(progress, batch)             a training batch, before anything is counted
    forward(**batch)    ->      before_forward(progress, keywords)    may replace the model's keywords
                        ->      after_forward(progress, ..., output)  may replace what forward returns
    backward(loss)      ->      after_backward(progress, loss)        gradients of this rank are there
    step() at a boundary ->     before_step(progress)                 gradients are there, nothing is clipped yet
                        ->      after_step(progress, applied)         weights and counters are new
    save_checkpoint     ->      state_dict()                          under its name, in the model's file
    load_checkpoint     ->      load_state_dict(state, progress)      also without a state: the counters say a lot
    destroy             ->      close()

A feature acts on the model by itself (hooks, a forward of its own): the engine only says when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# What a program has asked for before there is an engine, such as "comms" (`deepspeed.comm.configure`).
ASKED: dict[str, Any] = {}

# Kinds of parallelism beside ZeRO's own: subclasses of `hf_zero.comm.ProgramGroups`, those first whose ranks are to be
# neighbours.
DIMENSIONS = [
    "hf_zero.tensor.groups:TensorGroups",
    "hf_zero.sequence.groups:SequenceGroups",
]
# The same of which the config alone says something, by the feature that it switches on.
DIMENSIONS_OF_FEATURES = {"experts": "hf_zero.extras.experts.spread:ExpertGroups"}

_ASKED_OF_MODEL = "_hf_zero_asks_for"


def ask_for(model: Any, extra: str) -> None:
    """Have the features of an extra made for `model` whatever the config says: a program has begun with it already."""
    vars(model).setdefault(_ASKED_OF_MODEL, set()).add(extra)


def asked_of(model: Any) -> set[str]:
    """Names of the extras that `ask_for` has been told."""
    names: set[str] = vars(model).get(_ASKED_OF_MODEL, set())
    return names


def unwrapped(model: Any) -> Any:
    """The model of transformers in PEFT's."""
    return getattr(model, "get_base_model", lambda: model)()


def text_config(config: Any) -> Any:
    """Of the part that reads text, in a model of several."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of training.

    Attributes:
        step: updates so far.
        micro_step: backward passes since the last update, which numbers the forwards of one from 0.
        accumulation_steps: micro-batches per update.
        training: the model is in train mode.
        rank: of this process among those that see other data.
    """

    step: int
    micro_step: int = 0
    accumulation_steps: int = 1
    training: bool = True
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """Data and ranks of a training loader.

    Attributes:
        num_samples: of the data set; None where it is only iterated over.
        per_update: samples, over all ranks.
        micro_batch_size: samples per forward on one rank.
        world: ranks that see other data; `rank` is this one.
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
        full_gradient: of a parameter, whole, reduced since the last step; None where there is none. Collective.
        forward_only: places another model as the engine's own is, without training it, and returns what runs its
            forward.
        world: the collectives of all ranks.
        engine: a weak proxy of it, to read and not to change.
        phases: of the engine, which have observers (`hf_zero.api.engine_module.Phases`).
    """

    full_gradient: Callable[[Any], Any]
    forward_only: Callable[[Any], Callable[..., Any]]
    world: Any
    engine: Any = None
    phases: Any = None


class TrainingFeature:
    """One feature; every verb does nothing unless a subclass says otherwise.

    Attributes:
        name: key of its state in checkpoints; also what `Features.named` finds it by.
        waits_for_outcome: whether `after_step` has to know if the update was skipped; the host waits for the device
            then. Without, an update whose outcome is not known yet counts as applied.
    """

    name = ""
    waits_for_outcome = True

    def on_batch(self, progress: Progress, batch: Any) -> Any:
        """Replace a training batch, before anything in it is counted."""
        return batch

    def loader_options(self, draw: Draw) -> dict[str, Any]:
        """Arguments of torch's DataLoader by which samples are chosen (`batch_sampler`) or loaded (`num_workers`)."""
        return {}

    def adjust_groups(self, groups: list[dict[str, Any]]) -> None:
        """Put parameters of its own into the optimizer's groups, in place, or take out what has left the model."""

    def begin(self, tools: EngineTools) -> None:
        """Parameters are where they stay, equal on all ranks. May be collective."""

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keywords that the model's forward gets; called for evaluation, too."""
        return keywords

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        """Replace the output of the engine's forward; `inputs` and `keywords` are the model's."""
        return output

    def after_backward(self, progress: Progress, loss: Any) -> None:
        """`loss`: as `engine.backward` returns it; its mean over micro-batches is their sum."""

    def before_step(self, progress: Progress) -> None:
        """An update is about to be made of reduced gradients."""

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        """An update has been made; not `applied`: it was skipped on all ranks (overflow)."""

    def holds_schedule(self, progress: Progress) -> bool:
        """Whether the learning-rate schedule stays where it is after the update that was just made."""
        return False

    def state_dict(self) -> Mapping[str, Any] | None:
        """Plain values and CPU tensors, equal on all ranks; None: nothing has to be kept."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None, progress: Progress) -> None:
        """Go on from a checkpoint; `state` is None where it holds none of this feature."""

    def close(self) -> None:
        """Leave the model as it was."""


class Features(list[TrainingFeature]):
    """The features of one engine, told as one."""

    def add(self, feature: TrainingFeature) -> None:
        """One more, after the others; its name must be its own.

        Raises:
            ValueError: there is one of this name.
        """
        if self.named(feature.name) is not None:
            raise ValueError(f"the engine already has a training feature named {feature.name!r}; close that one first")
        self.append(feature)

    def named(self, name: str) -> Any:
        """The feature of this name, or None."""
        return next((feature for feature in self if feature.name == name), None)

    def adjust_groups(self, groups: list[dict[str, Any]]) -> None:
        for feature in self:
            feature.adjust_groups(groups)

    def begin(self, tools: EngineTools) -> None:
        for feature in self:
            feature.begin(tools)

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

    def after_backward(self, progress: Progress, loss: Any) -> None:
        for feature in self:
            feature.after_backward(progress, loss)

    def before_step(self, progress: Progress) -> None:
        for feature in self:
            feature.before_step(progress)

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        for feature in self:
            feature.after_step(progress, applied=applied)

    @property
    def wait_for_outcome(self) -> bool:
        return any(feature.waits_for_outcome for feature in self)

    def state_dict(self) -> dict[str, Any]:
        """By name, of those that keep something."""
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
