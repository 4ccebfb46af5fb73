"""accelerate.utils.deepspeed: how ds.json is read, and what the script's optimizer object does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.config import load_config
from hf_zero.config.batch import STEPS
from hf_zero.config.load import normalise
from hf_zero.integration.huggingface.engine_choice import prepared_by
from hf_zero.integration.huggingface.late_numbers import knows_skip
from hf_zero.integration.patches import Patches

PATCHES = Patches("accelerate.utils.deepspeed")
# Fields of DeepSpeedPlugin, flags of the launcher and arguments of Accelerator and Trainer state these.
_STATED_ELSEWHERE = {STEPS: 1, "gradient_clipping": 1.0}
_IN_BACKWARD = "the update is made in backward(), not in the script's optimizer.step()"
_STEP_WORKS = "DeepSpeedEngineWrapper.backward no longer steps, and the optimizer's step() and zero_grad() do"


@PATCHES.add(
    "HfDeepSpeedConfig.__init__(self, config_file_or_dict)",
    without="ds.json is read as plain JSON, and messages name no lines of it",
    until="accelerate reads ds.json with comments, and remembers the line of every key",
)
def around_reading(original: Callable[..., None], self: Any, config_file_or_dict: Any) -> None:
    """Accept comments and trailing commas, report duplicate keys, and keep the place of every key."""
    config = load_config(config_file_or_dict)
    normalise(config)
    for key, number in _STATED_ELSEWHERE.items():
        if hasattr(self, "trainer_config_process"):
            config.setdefault(key, "auto")  # Trainer fills it at once
        else:
            config.assume(key, number)  # prepare() may come late, and programs compute with what they read here
    original(self, config)


@PATCHES.add("DeepSpeedOptimizerWrapper.step(self)", without=_IN_BACKWARD, until=_STEP_WORKS)
def around_step(original: Callable[..., None], self: Any) -> None:
    """accelerate's has no effect: here the update happens where the script asks for it."""
    prepared = prepared_by(self.optimizer)
    if prepared is None:
        original(self)
    elif self.gradient_state.sync_gradients:
        prepared.step()


@PATCHES.add("DeepSpeedOptimizerWrapper.zero_grad(self, set_to_none)", without=_IN_BACKWARD, until=_STEP_WORKS)
def around_zero_grad(original: Callable[..., None], self: Any, set_to_none: Any = None) -> None:
    """accelerate's has no effect: here it drops gradients that wait for step()."""
    prepared = prepared_by(self.optimizer)
    if prepared is None:
        original(self, set_to_none)
    elif self.gradient_state.sync_gradients:
        prepared.zero_grad()


@PATCHES.add(
    "DeepSpeedOptimizerWrapper.step_was_skipped(self)",
    without="the host waits for the device after every update, to learn whether it was skipped",
    until="accelerate asks only where there is a loss scale, as without an engine",
)
def around_step_was_skipped(original: Callable[..., bool], self: Any) -> bool:
    """Asked after every update; where no loss scale depends on it, "no" as long as it is unknown, as without an engine,
    where no update is skipped without a loss scale."""
    return original(self) if knows_skip(self.optimizer) else False
