"""Model compression: quantization, pruning, layer reduction and distillation."""

from __future__ import annotations

from hf_zero.config.features import Extra, OwnSection
from hf_zero.extras.compression.rules import RULES, policy_of
from hf_zero.extras.compression.section import Compression, Distillation

EXTRA = Extra(
    name="compression",
    sections=(
        OwnSection(path="compression_training", kind=Compression, doc="Quantization, pruning and layer reduction."),
        OwnSection(path="hf_zero.distillation", kind=Distillation, doc="Distillation from a teacher."),
    ),
    rules=RULES,
    policy=policy_of,
    features=("hf_zero.extras.compression.feature:compression_feature",),
    services={"explain": "hf_zero.extras.compression.feature:compression_words"},
)
