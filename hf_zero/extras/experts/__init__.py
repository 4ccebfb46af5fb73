"""Expert parallelism: each rank holds some experts, and tokens are sent to the ranks of their experts.

This module defines the config section `expert_parallel`, with DeepSpeed's keys, and its incompatibilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_zero.config.features import Extra, OwnSection
from hf_zero.config.rules import RANKS, Advice, Ranks, Rule
from hf_zero.config.schema.fields import Flag, Positive, Section, ignored, supported, unsupported
from hf_zero.config.schema.parallel import TensorParallel
from hf_zero.config.schema.zero import GroupSize

if TYPE_CHECKING:
    from hf_zero.config.schema.root import Root


PATH = "expert_parallel.autoep_size"
_SEEN = "transformers' packed experts are detected automatically"
_ROUTED = "the model's own router decides; set it in the model's config"
_COMPUTED = "the model's experts_implementation decides (eager, batched_mm, grouped_mm)"
_SENT = (
    "per token and layer of experts a rank sends 4 x experts per token x hidden_size elements, forward and backward, "
    "in addition to the traffic of parameters, which counts experts as if they were sharded with the rest"
)
_CUT = "experts are cut like other matrices, over the ranks of a tensor group (tensor_parallel.autotp_size)"
_EXCHANGED = "rows are sent by one all-to-all in each direction"


def _seen(doc: str) -> Any:
    return ignored(None, doc, why=_SEEN, met=True)


def _routed(default: Any, doc: str) -> Any:
    return unsupported(default, doc, why=_ROUTED)


def _not_in_one_group(
    _: int, experts: ExpertParallel, sequence_size: int, mics: int, group: GroupSize, stage: int, ranks: Ranks
) -> object:
    size = experts.over(ranks.tensor_size)
    shard, parts = mics if mics > 0 else group, size * sequence_size
    breaks = size > 1 and stage > 0 and isinstance(shard, int) and shard % parts != 0
    return breaks and {"shard": shard, "parts": parts}


def _cut_otherwise(size: int, experts: ExpertParallel, ranks: Ranks) -> object:
    return experts.enabled and size not in (1, ranks.tensor_size) and {"tensor": ranks.tensor_size}


def _not_in_tensor_groups(_: int, experts: ExpertParallel, ranks: Ranks) -> object:
    breaks = experts.width > 1 and experts.width % ranks.tensor_size != 0
    return breaks and {"width": experts.width, "tensor": ranks.tensor_size}


class ExpertParallel(Section):
    """Experts are distributed over ranks, and tokens are sent to them (docs/experts.md)."""

    enabled: Flag = supported(False, "Distribute experts over groups of autoep_size ranks.")
    autoep_size: Positive = supported(
        1, "Consecutive ranks that together hold all experts, whole tensor groups among them.", unit="ranks"
    )
    preset_model: str | None = _seen("Known model family.")
    moe_layer_pattern: str | None = _seen("Names of layers with experts.")
    expert_pattern: str | None = _seen("Name of their experts.")
    router_pattern: str | None = _seen("Name of their router.")
    expert_w1: str | None = _seen("Name of a matrix.")
    expert_w2: str | None = _seen("Name of a matrix.")
    expert_w3: str | None = _seen("Name of a matrix.")
    num_experts_attr: str | None = _seen("Name of the number of experts in the model's config.")
    top_k_attr: str | None = _seen("Name of the number of experts per token in the model's config.")
    has_shared_experts: Flag | None = _seen("Whether the model has experts that all tokens use.")
    shared_experts_pattern: str | None = _seen("Name of the shared experts.")
    shared_experts_gate_pattern: str | None = _seen("Name of the gate of the shared experts.")
    expert_activation: str | None = _seen("Activation of the experts.")
    use_grouped_mm: Flag = ignored(True, "Grouped products.", why=_COMPUTED, met=True)
    disable_triton_grouped_mm: Flag = ignored(False, "Without Triton.", why=_COMPUTED, met=True)
    gate_up_impl: str = ignored("separate", "Products of gate and up.", why=_COMPUTED, met=True)
    combine_impl: str = ignored(
        "auto", "How outputs are combined.", why="the ranks of the tokens weight and add them", met=True
    )
    row_weighting_impl: str = ignored("auto", "How rows are weighted.", why="only DeepEP uses it", met=True)
    async_split_plan: Flag = ignored(False, "Copy counts asynchronously.", why=_EXCHANGED, met=True)
    comm_backend: Any = unsupported("comm", "How rows are sent.", why="DeepEP is not supported; remove it")
    comm_num_sm: Positive = ignored(12, "For DeepEP.", why=_EXCHANGED, met=True)
    comm_qp_margin: Any = ignored(4, "For DeepEP.", why=_EXCHANGED, met=True)
    comm_max_tokens_per_rank: Any = ignored(0, "For DeepEP.", why=_EXCHANGED, met=True)
    expert_tensor_parallel_size: Positive = supported(
        1, "1, or autotp_size: so many times autoep_size ranks together hold all experts.", unit="ranks"
    )
    validate_folding_routing: Flag = ignored(
        False, "Compare routing between tensor ranks.", why="they route the same values with the same router", met=True
    )
    route_norm: Flag | None = _routed(None, "Normalize the weights of a token's experts.")
    route_scale: Any = _routed(1.0, "Scale them.")
    routed_scaling_factor: Any = _routed("auto", "Scale them.")
    score_apply: str = _routed("auto", "Weight before or after the experts.")
    score_func: str = _routed("auto", "softmax or sigmoid.")
    top_k: Any = _routed("auto", "Experts per token.")
    num_expert_groups: Any = _routed(None, "Groups of experts for group-limited routing.")
    num_limited_groups: Any = _routed(None, "Groups that a token may use.")
    load_balance_coeff: Any = _routed(None, "Loss of the router (DeepSpeed refuses it, too).")

    @property
    def width(self) -> int:
        """Number of ranks that together hold all experts."""
        return self.autoep_size * self.expert_tensor_parallel_size if self.enabled else 1

    def over(self, tensor_size: int) -> int:
        """Number of ranks per expert group: those of `width` with the same parts of matrices."""
        return max(1, self.width // tensor_size)

    rules = (
        Rule(
            keys=(PATH, "expert_parallel", "zero_optimization.stage", RANKS),
            broken=lambda _, experts, stage, ranks: experts.over(ranks.tensor_size) > 1 and stage == 0,
            rule="expert parallelism is not supported with stage 0: rank 0 would have to save the states of all ranks; "
            "stage 1 sends as many bytes",
            fix="set zero_optimization.stage to 1, 2 or 3",
        ),
        Rule(
            keys=(
                PATH,
                "expert_parallel",
                "sequence_parallel_size",
                "zero_optimization.mics_shard_size",
                "hf_zero.shard_group",
                "zero_optimization.stage",
                RANKS,
            ),
            broken=_not_in_one_group,
            rule="expert parallelism is not supported with a shard group of {shard}: ranks per shard group = n x "
            "ranks per expert group x sequence_parallel_size does not hold: {shard} != n x {parts}",
            fix="use a larger shard group, which contains all experts",
        ),
        Rule(
            keys=("expert_parallel.expert_tensor_parallel_size", "expert_parallel", RANKS),
            broken=_cut_otherwise,
            rule=f"{_CUT}: expert_tensor_parallel_size = ranks per tensor group does not hold: "
            "{expert_tensor_parallel_size} != {tensor}",
            fix="leave it out, or set tensor_parallel.autotp_size to the same number",
        ),
        Rule(
            keys=(PATH, "expert_parallel", RANKS),
            broken=_not_in_tensor_groups,
            rule=f"{_CUT}: autoep_size x expert_tensor_parallel_size = n x ranks per tensor group does not hold: "
            "{width} != n x {tensor}",
            fix="give a multiple of {tensor}",
        ),
        Advice(
            keys=(PATH, "expert_parallel", RANKS),
            applies=lambda _, experts, ranks: experts.over(ranks.tensor_size) > 1,
            text=_SENT,
        ),
        Advice(
            keys=(PATH, "expert_parallel", RANKS),
            applies=lambda _, experts, ranks: experts.width == ranks.tensor_size > 1 and {"width": experts.width},
            text=f"{_CUT}, which together hold all of them: no tokens are sent. For expert groups of N ranks besides, "
            "set it to N x {width}",
        ),
    )


def expert_size(config: Root) -> int:
    """Number of ranks that together hold all experts, or the same parts of all experts; 1: each holds them."""
    return config.section(ExpertParallel).over(max(1, config.section(TensorParallel).autotp_size))


def _experts(config: Root) -> ExpertParallel | None:
    section = config.section(ExpertParallel)
    return section if section.width > 1 else None


EXTRA = Extra(
    name="experts",
    sections=(OwnSection(path="expert_parallel", kind=ExpertParallel, doc="Experts over ranks (docs/experts.md)."),),
    policy=_experts,
    services={
        "expert_size": "hf_zero.extras.experts:expert_size",
        "spread_experts": "hf_zero.extras.experts.spread:spread",
    },
)
