"""Resilience: checkpoints of a training in host memory, from which restarted ranks continue."""

from __future__ import annotations

from hf_zero.config.features import Extra, OwnSection
from hf_zero.config.schema.fields import Flag, Positive, Section, supported


class Resilience(Section):
    """Checkpoints in host memory, from which Trainer continues after a restart of ranks (docs/resilience.md)."""

    enabled: Flag = supported(False, "Keep checkpoints, if the launcher restarts ranks.")
    every: Positive = supported(1, "Interval of checkpoints.", unit="updates")
    replicate: Flag = supported(True, "With several hosts, also keep a copy on the next host.")


EXTRA = Extra(
    name="resilience",
    sections=(OwnSection(path="hf_zero.resilience", kind=Resilience, doc="Checkpoints in host memory."),),
    services={
        "begin_training": "hf_zero.extras.resilience.trainer:begin_training",
        "restarts": "hf_zero.extras.resilience.supervisor:run_with_restarts",
    },
)
