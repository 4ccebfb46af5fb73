"""Instead of the second phase of Trainer's filling: model sizes, numbers of steps, and no "auto" left to trip on."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from hf_zero.api.model_view import model_view
from hf_zero.config import Views, examine
from hf_zero.config.canonical import normalise
from hf_zero.config.fill import apply, drop_strays, fill
from hf_zero.integration.host_words import raise_both, stand_in_model
from hf_zero.integration.takeovers import stepped_aside
from hf_zero.integration.views import training_view


def around(original: Callable[..., None]) -> Callable[..., None]:
    def trainer_config_finalize(self: Any, args: Any, model: Any, num_training_steps: int) -> None:
        evaluates_only = num_training_steps == 0
        try:
            training = training_view(args, total_steps=num_training_steps or None)
            views = Views(
                world_size=args.world_size,
                training=dataclasses.replace(training, steps_only=True),
                model=model_view(model),
            )
        except AttributeError as error:  # arguments or a model of a shape that we do not know
            stepped_aside("HfTrainerDeepSpeedConfig.trainer_config_finalize", error)
            return original(self, args, model, num_training_steps)
        problems = examine(self.config, views).problems
        if problems:
            twin = copy.copy(self)
            twin.config, twin.mismatches = copy.deepcopy(dict(self.config)), []
            raise_both(problems, lambda: original(twin, args, stand_in_model(), num_training_steps))
        apply(self.config, fill(self.config, views))
        # A later train() knows the number of steps; until then the schedule keeps its autos.
        drop_strays(self.config, keep="scheduler.params" if evaluates_only else "")
        normalise(self.config)

    return trainer_config_finalize
