"""TRL's trainers on ranks that hold parts of the same matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_zero.comm import LoneCollectives
from hf_zero.comm.parts import HeldPart, keep_part
from hf_zero.layout.buckets import Interval
from hf_zero.layout.cuts import Cut
from tests.support.ranks import RankFailure
from tests.support.reference import assert_same_numbers
from tests.support.requirements import requires
from tests.tensor.threads import ThreadCollectives, in_threads
from tests.trl.runs import GLOBAL_BATCH, TOLERANCE, Run, assert_same_training, run, without_engine

pytestmark = requires(modules=("trl", "peft"))
CASES = [
    ("sft", "full", 2, 2),
    ("sft", "full", 3, 4),
    ("dpo", "full", 1, 2),
    ("dpo", "full", 3, 4),  # also loads its reference at stage 3
    ("dpo", "lora", 3, 4),
    ("kto", "full", 2, 2),
]
LOGGED = ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected", "logps/chosen", "logps/rejected")


@pytest.mark.parametrize(
    ("method", "adapter", "stage", "processes"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_the_whole_vocabulary_counts(method: str, adapter: str, stage: int, processes: int, tmp_path: Path) -> None:
    """TRL 1.16 computes log-probabilities from `lm_head.weight`, of which a rank has some rows: with two ranks the
    first loss of SFTTrainer was 5.07, that of half of the vocabulary, instead of 5.71."""
    case = Run(
        method=method,
        adapter=adapter,
        stage=stage,
        processes=processes,
        options={
            "cut": True,
            "per_device_train_batch_size": 2 * GLOBAL_BATCH // processes,
            "max_steps": 3,
            "save_steps": 3,
        },
        ds={"tensor_parallel": {"autotp_size": 2}},
    )
    alone = {"per_device_train_batch_size": GLOBAL_BATCH, "max_steps": 3, "save_steps": 3}
    result, expected = run(case, tmp_path), without_engine(replace(case, processes=1, options=alone))
    assert_same_training(result, expected)
    logged = [name for name in LOGGED if expected.column(name)]
    for name in logged:
        assert_same_numbers(result.column(name), expected.column(name), 10 * TOLERANCE, name)
    assert "entropy" in logged


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_trainers_that_draw_other_tokens_on_each_rank_are_refused(method: str, tmp_path: Path) -> None:
    """They seed every rank differently: ranks waited for each other in generate() until the timeout."""
    case = Run(method=method, options={"cut": True}, ds={"tensor_parallel": {"autotp_size": 2}})
    with pytest.raises(RankFailure, match="must draw the same tokens, but their random states differ"):
        run(case, tmp_path)


def test_distillation_is_refused() -> None:
    """Its loss compares the logits of student and teacher column by column, from the rows that a rank has."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    student, teacher, hidden = nn.Parameter(torch.randn(6, 4)), torch.randn(6, 4), torch.randn(3, 4)
    keep_part(student, HeldPart(LoneCollectives(), Cut((6, 4), 0, ((Interval(0, 6),),))))
    with pytest.raises(ValueError, match="tensor_parallel.autotp_size: TRL's DistillationTrainer"):
        ChunkedDivergenceFunction.apply(hidden, student, None, hidden, teacher, None, 0.5)


def test_in_16_bits_the_scores_are_those_of_trl() -> None:
    """Products are rounded as TRL rounds them, so that the scores of parts are those of the whole head."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 6).bfloat16(), torch.randn(11, 6).bfloat16()
    targets, options = torch.randint(11, (9,)), (0.7, 32, 3.0, 1.5)
    factors = torch.randn(2, 9)

    def scored(weight: nn.Parameter) -> tuple[list[Tensor], Tensor, Tensor]:
        leaf = hidden.clone().requires_grad_()
        scores = ChunkedLogProbFunction.apply(leaf, weight, None, targets, *options)
        (factors * torch.stack(scores[:2])).sum().backward()
        assert leaf.grad is not None and weight.grad is not None and leaf.grad.dtype == torch.bfloat16
        return [score.detach() for score in scores], leaf.grad, weight.grad

    def body(group: ThreadCollectives) -> tuple[list[Tensor], Tensor, Tensor]:
        own = nn.Parameter(weight.clone())
        keep_part(own, HeldPart(group, Cut((11, 6), 0, ((Interval(0, 6),), (Interval(6, 11),)))))
        return scored(own)

    expected, of_hidden, of_weight = scored(nn.Parameter(weight.clone()))
    parts = in_threads(body, 2)
    for scores, gradient, _ in parts:
        for score, whole in zip(scores, expected, strict=True):
            torch.testing.assert_close(score, whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, of_hidden, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(torch.cat([gradient for *_, gradient in parts]), of_weight, rtol=2e-2, atol=2e-2)
