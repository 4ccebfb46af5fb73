"""DeepSpeed's config objects for tools that read them: read-only views of a resolved config.

Changing them has no effect, because engines are built from policies.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from pydantic import model_validator

from hf_zero.config.errors import Remark
from hf_zero.config.extras import section_names
from hf_zero.config.fill import fill
from hf_zero.config.pipeline import resolve, typed
from hf_zero.config.policies import Resolved
from hf_zero.config.read import load_config
from hf_zero.config.rename import ZERO, rename
from hf_zero.config.schema.checkpoint import Aio, Checkpoint
from hf_zero.config.schema.fields import Section
from hf_zero.config.schema.long_sequences import ActivationCheckpointing
from hf_zero.config.schema.precision import Bf16, DataTypes, Fp16, TorchAutocast
from hf_zero.config.schema.profiling import Comet, CsvMonitor, FlopsProfilerSection, TensorBoard, WandB
from hf_zero.config.schema.zero import LeafModule, Zero
from hf_zero.config.views import Views

_STAGE3 = "stage3_"
S = TypeVar("S", bound=Section)


def _as_in_file(section: str, given: Any) -> Any:
    """Arguments of one of the classes below in the spelling of the schema; they may have any spelling of ds.json,
    and "auto" for a value that is left out."""
    if not isinstance(given, Mapping):
        return given
    draft = fill(rename({section: dict(given)}, Views(world_size=1))).without_problems()
    for remark in draft.findings:
        if isinstance(remark, Remark) and remark.text.startswith("old "):
            warnings.warn(str(remark), FutureWarning, stacklevel=4)
    return draft.tree[section]


class DeepSpeedZeroConfig(Zero):
    """The section zero_optimization, in any spelling of ds.json. Stage-3 keys are also available without the prefix
    `stage3_`."""

    @model_validator(mode="before")
    @classmethod
    def _in_any_spelling(cls, given: Any) -> Any:
        return _as_in_file(ZERO, given)

    def model_post_init(self, context: Any) -> None:
        if self.leaf_module is None:  # DeepSpeed's has no leaf modules, but is always there
            object.__setattr__(self, "leaf_module", LeafModule())

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("_", _STAGE3)) and _STAGE3 + name in type(self).model_fields:
            return getattr(self, _STAGE3 + name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


@dataclass(frozen=True)
class MonitorSections:
    """The monitors' sections, with defaults for those that the config does not have."""

    tensorboard: TensorBoard
    csv_monitor: CsvMonitor
    wandb: WandB
    comet: Comet

    @property
    def enabled(self) -> bool:
        return any(section.enabled for section in vars(self).values())


class DeepSpeedBF16Config(Bf16):
    """The section bf16."""

    @model_validator(mode="before")
    @classmethod
    def _in_any_spelling(cls, given: Any) -> Any:
        return _as_in_file("bf16", given)


class DeepSpeedFP16Config(Fp16):
    """The section fp16."""

    @model_validator(mode="before")
    @classmethod
    def _in_any_spelling(cls, given: Any) -> Any:
        return _as_in_file("fp16", given)

    def initial_dynamic_scale(self) -> int:
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the arguments of a dynamic loss scaler, by DeepSpeed's names."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "min_scale": self.min_loss_scale,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
        }


def section_of(kind: type[S], param_dict: Mapping[str, Any], name: str) -> S:
    """Parse one section of a config in any spelling that DeepSpeed accepts, ignoring the rest of the config.

    Raises:
        ConfigError: the section has problems.
    """
    keys = {"bf16": ("bf16", "bfloat16")}.get(name, (name,))
    draft = typed({key: param_dict[key] for key in keys if key in param_dict}).without_problems()
    return _as(kind, getattr(draft.config, name))


get_zero_config = partial(section_of, DeepSpeedZeroConfig, name="zero_optimization")
get_bfloat16_config = partial(section_of, DeepSpeedBF16Config, name="bf16")
get_float16_config = partial(section_of, DeepSpeedFP16Config, name="fp16")


def _as(kind: type[S], section: Any) -> S:
    """Convert a section to one of the classes above; unset fields stay unset."""
    given = {} if section is None else {name: getattr(section, name) for name in section.model_fields_set}
    return kind.model_construct(**given)


class ConfigView:
    """A config for a given number of ranks, with DeepSpeed's attribute names.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: the resolved values.
        zero_config, float16_config, bfloat16_config, aio_config, ...: the sections.
        Every other top-level key is an attribute of the same name.
    """

    def __init__(self, config: object, world_size: int) -> None:
        """
        Args:
            config: a dict, a path, JSON text or base64.

        Raises:
            ConfigError: the config is invalid; lists all problems.
        """
        self._param_dict: Mapping[str, Any] = load_config(config)
        self.world_size = world_size
        self._show(resolve(self._param_dict, world_size=world_size))

    @classmethod
    def of(cls, resolved: Resolved, world_size: int) -> ConfigView:
        """Create the view of a resolved config."""
        view = cls.__new__(cls)
        view._param_dict = resolved.raw
        view.world_size = world_size
        view._show(resolved)
        return view

    def _show(self, resolved: Resolved) -> None:
        root, batch = resolved.config, resolved.batch
        self._root = root
        self.train_batch_size = batch.train_batch_size
        self.train_micro_batch_size_per_gpu = batch.micro_batch_size
        self.gradient_accumulation_steps = batch.accumulation_steps
        self.zero_config = _as(DeepSpeedZeroConfig, root.zero_optimization)
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config = _as(DeepSpeedFP16Config, root.fp16)
        self.bfloat16_config = _as(DeepSpeedBF16Config, root.bf16)
        self.activation_checkpointing_config = root.activation_checkpointing or ActivationCheckpointing()
        self.aio_config = root.aio or Aio()
        self.flops_profiler_config = root.flops_profiler or FlopsProfilerSection()
        self.monitor_config = MonitorSections(**cast("dict[str, Any]", root.monitors))
        autocast = root.torch_autocast or TorchAutocast()
        self.torch_autocast_enabled, self.torch_autocast_dtype = autocast.enabled, autocast.dtype
        types = root.data_types or DataTypes()
        self.grad_accum_dtype, self.param_dtype = types.grad_accum_dtype, types.param_dtype
        self.checkpoint_config = checkpoint = root.checkpoint or Checkpoint()
        self.checkpoint_tag_validation_enabled = checkpoint.tag_validation != "Ignore"
        self.checkpoint_tag_validation_fail = checkpoint.tag_validation == "Fail"
        self.load_universal_checkpoint = checkpoint.load_universal
        self.use_node_local_storage = checkpoint.use_node_local_storage
        optimizer, scheduler = resolved.optimizer, resolved.scheduler
        self.optimizer_name = None if optimizer is None else optimizer.type.lower()
        self.optimizer_params = None if optimizer is None else dict(optimizer.params)
        self.scheduler_name = None if scheduler is None else scheduler.type
        self.scheduler_params = None if scheduler is None else dict(scheduler.params)

    def __getattr__(self, name: str) -> Any:
        root = self.__dict__.get("_root")
        if root is not None and name in type(root).model_fields:
            return getattr(root, name)
        if name in section_names():
            return None  # the section of an unused extra
        raise AttributeError(f"this config has no attribute {name!r}")

    def print_user_config(self) -> str:
        """Return the original config as text."""
        return repr(dict(self._param_dict))
