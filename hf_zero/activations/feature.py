"""The section `activation_checkpointing` of ds.json, applied to transformers' own gradient checkpointing.

transformers sets a checkpointing function in every layer, before the first forward or at any later time; we wrap this
function while the engine exists.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hf_zero.activations.kept import CONFIGURED, CheckpointedCalls
from hf_zero.comm import uncompiled
from hf_zero.config import Resolved
from hf_zero.config.schema.long_sequences import ActivationCheckpointing as Section
from hf_zero.features import Progress, TrainingFeature
from hf_zero.log import logger

_FUNCTION = "_gradient_checkpointing_func"
_SECTION = "activation_checkpointing"


def activation_checkpointing_of(model: nn.Module, resolved: Resolved) -> TrainingFeature:
    """The feature for a config with this section."""
    policy = resolved.section(Section)
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    return CheckpointedInputs(layers, CheckpointedCalls(policy, num_slots=len(layers)))


class CheckpointedInputs(TrainingFeature):
    """The feature described above."""

    name = _SECTION
    waits_for_outcome = False

    def __init__(self, layers: list[nn.Module], calls: CheckpointedCalls) -> None:
        """`layers`: modules that transformers may checkpoint."""
        self._layers = layers
        self.calls = calls
        self._has_said = False

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        for layer in self._layers:
            function = vars(layer).get(_FUNCTION)
            if function is not None and not isinstance(function, _Around):
                vars(layer)[_FUNCTION] = _Around(function, self.calls)
        return keywords

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        if progress.training and not self._has_said:
            self._has_said = True
            if not self.calls.num_calls and CONFIGURED.calls is None:
                logger.warning(
                    "%s has no effect: no layer of the model is checkpointed. Set gradient_checkpointing=True in "
                    "TrainingArguments, call model.gradient_checkpointing_enable(), or, if the model calls "
                    "deepspeed.checkpointing.checkpoint itself, deepspeed.checkpointing.configure(mpu, ds_config)",
                    _SECTION,
                )
        return output

    def close(self) -> None:
        for layer in self._layers:
            if isinstance(function := vars(layer).get(_FUNCTION), _Around):
                vars(layer)[_FUNCTION] = function.original
        self.calls.close()


class _Around:
    """Wrapper of a layer's checkpointing function; copies and pickles contain only the original function."""

    def __init__(self, original: Any, calls: CheckpointedCalls) -> None:
        self.original = original
        # torch.compile would trace counters and pools, and recompile whenever a counter changes.
        self._run = uncompiled(calls.run)
        self._checkpoint = _without_offload(original) if calls.policy.cpu_checkpointing else original

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._checkpoint, function, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self.original,)


def _itself(function: Any) -> Any:
    return function


def _without_offload(function: Any) -> Any:
    """Replace transformers' checkpoint function with `offload`, which would save inputs before we do and wait for each
    copy, by torch's plain checkpoint. Used with cpu_checkpointing."""
    inner = getattr(function, "func", None)
    where = getattr(inner, "__module__", ""), getattr(inner, "__name__", "")
    if not isinstance(function, partial) or where != ("transformers.modeling_utils", "checkpoint_func"):
        return function
    return partial(torch_checkpoint, *function.args, **function.keywords)
