"""Expert parallelism: ranks hold some experts each, and tokens travel to those that they are routed to."""

from __future__ import annotations

from hf_zero.config.features import Extra, OwnSection
from hf_zero.extras.experts.section import ExpertParallel, examine

EXTRA = Extra(
    name="experts",
    sections=(OwnSection(path="expert_parallel", kind=ExpertParallel, doc="Experts over ranks (docs/experts.md)."),),
    examine=examine,
    services={
        "expert_size": "hf_zero.extras.experts.section:expert_size",
        "spread_experts": "hf_zero.extras.experts.spread:spread",
    },
)
