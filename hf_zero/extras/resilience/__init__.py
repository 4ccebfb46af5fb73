"""Resilience: checkpoints of a training in host memory, from which ranks that are started again go on."""

from __future__ import annotations

from hf_zero.config.features import Extra, OwnSection
from hf_zero.config.schema.fields import Flag, Positive, Section, supported


class Resilience(Section):
    """Checkpoints in host memory, from which Trainer goes on when ranks are started again (docs/resilience.md)."""

    enabled: Flag = supported(False, "Keep them; without a launcher that starts ranks again, nothing is kept.")
    every: Positive = supported(1, "From one to the next.", unit="updates")
    replicate: Flag = supported(True, "On several hosts, hold a copy of what is kept on the next one, too.")


EXTRA = Extra(
    name="resilience",
    sections=(OwnSection(path="hf_zero.resilience", kind=Resilience, doc="Checkpoints in host memory."),),
    services={
        "begin_training": "hf_zero.extras.resilience.trainer:begin_training",
        "peers": "hf_zero.extras.resilience.peers:Peers",
    },
)
