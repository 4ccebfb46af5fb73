"""Data efficiency: curriculum sampling, token dropping and layer dropping."""

from __future__ import annotations

from hf_zero.config.features import Extra, OwnSection
from hf_zero.extras.data_efficiency.rules import RULES, policy_of
from hf_zero.extras.data_efficiency.section import CurriculumLearning, DataEfficiency, ProgressiveLayerDropSection

_HERE = "hf_zero.extras.data_efficiency"
EXTRA = Extra(
    name="data_efficiency",
    sections=(
        OwnSection(
            path="data_efficiency", kind=DataEfficiency, doc="Sampling and token dropping (docs/data_efficiency.md)."
        ),
        OwnSection(
            path="curriculum_learning", kind=CurriculumLearning, doc="Short sequences first (docs/data_efficiency.md)."
        ),
        OwnSection(
            path="progressive_layer_drop",
            kind=ProgressiveLayerDropSection,
            doc="Layer dropping (docs/data_efficiency.md).",
        ),
    ),
    rules=RULES,
    policy=policy_of,
    features=(
        f"{_HERE}.sampling:length_curriculum_of",
        f"{_HERE}.sampling:sampled_curriculum_of",
        f"{_HERE}.layers:random_ltd_of",
        f"{_HERE}.layers:layer_drop_of",
    ),
    services={"train_sampler": f"{_HERE}.sampling:sampler_for"},
)
