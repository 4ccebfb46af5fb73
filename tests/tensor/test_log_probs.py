"""Log-probabilities from a head whose vocabulary is cut over ranks are those of the whole vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_zero.comm import ledger
from hf_zero.comm.parts import HeldPart
from hf_zero.layout.buckets import Interval
from hf_zero.layout.cuts import Cut
from hf_zero.tensor import log_probs
from hf_zero.tensor.log_probs import Gradients, PartialHead, TokenScores
from hf_zero.tensor.shard import shard_model
from tests.support.memory import most_allocated, profiled_memory
from tests.tensor.models import model_of
from tests.tensor.threads import ThreadCollectives, in_threads

WIDTH, HIDDEN, TOKENS = 11, 6, 9
HEADS = {
    "plain": {"scale": 1.0, "softcap": None, "temperature": 1.0},
    "all": {"scale": 0.7, "softcap": 2.5, "temperature": 0.6},
}


def head_of(
    group: ThreadCollectives, sizes: Sequence[int], weight: Tensor, bias: Tensor | None, **options: float | None
) -> PartialHead:
    """The head of one rank, which has `sizes[rank]` rows."""
    ends = list(accumulate(sizes))
    intervals = tuple((Interval(end - size, end),) for size, end in zip(sizes, ends, strict=True))
    part = HeldPart(group, Cut(tuple(weight.shape), 0, intervals))
    own_bias = None if bias is None else bias.split(list(sizes))[group.rank]
    return PartialHead(weight=part.of(weight), bias=own_bias, part=part, dtype=torch.float32, **options)  # type: ignore[arg-type]


def whole(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> TokenScores:
    """The scores from all logits."""
    logits = functional.linear(hidden, weight, bias) * scale
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    log_p = logits.log_softmax(-1)
    return TokenScores(
        log_probs=log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
        entropy=-(log_p.exp() * log_p).sum(-1),
        log_sum_sq_probs=log_p.exp().square().sum(-1).log(),
        mean_logits=logits.mean(-1),
        is_top1=logits.argmax(-1) == targets,
    )


@pytest.mark.parametrize("tile", [4 * WIDTH, 1 << 20], ids=["a few tokens", "all tokens"])
@pytest.mark.parametrize("kind", list(HEADS))
@pytest.mark.parametrize("sizes", [(6, 5), (4, 4, 3), (11,)])
def test_scores_and_gradients(sizes: tuple[int, ...], kind: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL 1.16 multiplies by the rows of the head that a rank has, without calling the head. With tensor parallelism
    its trainers therefore trained with the probabilities of a part of the vocabulary, and nothing said so."""
    monkeypatch.setattr(log_probs, "TILE_BYTES", tile)
    torch.manual_seed(0)
    hidden, targets = torch.randn(TOKENS, HIDDEN), torch.tensor([0, 10, 5, 6, 7, 8, 3, 4, 10])
    weight, bias = 2 * torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH)
    weight[7], bias[7] = weight[2], bias[2]  # equally likely: the first one counts
    hidden[4] = weight[2]
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = whole(*leaves, targets, **HEADS[kind])  # type: ignore[arg-type]
    factors = torch.randn(2, TOKENS)
    (factors.double() * torch.stack(expected[:2])).sum().backward()
    ledger.reset()

    def body(group: ThreadCollectives) -> tuple[TokenScores, Gradients]:
        head = head_of(group, sizes, weight, bias, **HEADS[kind])
        log_sum, scores = log_probs.forward(head, hidden, targets)
        needs = (True, True, True)
        return scores, log_probs.backward(head, hidden, targets, log_sum, scores.entropy, *factors, needs)

    found = in_threads(body, len(sizes))
    for scores, gradients in found:
        for name, value in scores._asdict().items():
            reference = getattr(expected, name)
            reference = reference if name == "is_top1" else reference.float()
            torch.testing.assert_close(
                value, reference, rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert leaves[0].grad is not None and gradients.hidden is not None
        torch.testing.assert_close(gradients.hidden, leaves[0].grad.float(), rtol=1e-5, atol=1e-5)
    for name, leaf in zip(("weight", "bias"), leaves[1:], strict=True):
        parts = [getattr(gradients, name) for _, gradients in found]
        assert leaf.grad is not None
        torch.testing.assert_close(torch.cat(parts), leaf.grad.float(), rtol=1e-5, atol=1e-5)
    calls = {name: tally.calls for (_, name), tally in ledger.tallies.items()}
    assert calls == {"all_gather": len(sizes), "all_reduce": len(sizes)}, "once, not once for each tile"


def test_one_score_has_a_gradient_and_the_head_is_frozen() -> None:
    torch.manual_seed(1)
    hidden, weight, targets = torch.randn(4, HIDDEN), torch.randn(WIDTH, HIDDEN), torch.tensor([1, 2, 3, 9])
    leaf = hidden.clone().requires_grad_()
    whole(leaf, weight, None, targets, **HEADS["plain"]).entropy.sum().backward()  # type: ignore[arg-type]

    def body(group: ThreadCollectives) -> Gradients:
        head = head_of(group, (6, 5), weight, None, **HEADS["plain"])
        log_sum, scores = log_probs.forward(head, hidden, targets)
        needs = (True, False, False)
        return log_probs.backward(head, hidden, targets, log_sum, scores.entropy, None, torch.ones(4), needs)

    for found in in_threads(body, 2):
        assert found.weight is None and found.bias is None and found.hidden is not None and leaf.grad is not None
        torch.testing.assert_close(found.hidden, leaf.grad, rtol=1e-5, atol=1e-5)


def test_ranks_whose_rows_are_not_consecutive_are_refused() -> None:
    pieces = ((Interval(0, 2), Interval(4, 6)), (Interval(2, 4),))

    def body(group: ThreadCollectives) -> None:
        part = HeldPart(group, Cut((6, HIDDEN), 0, pieces))
        PartialHead(
            weight=torch.zeros(4, HIDDEN),
            bias=None,
            part=part,
            dtype=torch.float32,
            **HEADS["plain"],  # type: ignore[arg-type]
        )

    with pytest.raises(ValueError, match="need consecutive rows on every rank"):
        in_threads(body, 2)


def test_memory_does_not_grow_with_vocabulary_times_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of all tokens would be 4 bytes x vocabulary x tokens; four times the tokens only add what a token has."""
    monkeypatch.setattr(log_probs, "TILE_BYTES", 4 * 4096 * 32)
    torch.manual_seed(2)
    weight = torch.randn(4096, 16)
    peaks = []
    for tokens in (256, 1024):
        hidden, targets = torch.randn(tokens, 16), torch.randint(4096, (tokens,))

        def body(group: ThreadCollectives, hidden: Tensor = hidden, targets: Tensor = targets) -> None:
            head = head_of(group, (4096,), weight, None, **HEADS["all"])
            log_sum, scores = log_probs.forward(head, hidden, targets)
            ones = torch.ones(len(targets))
            log_probs.backward(head, hidden, targets, log_sum, scores.entropy, ones, ones, (True, True, False))

        with profiled_memory() as profiled:
            body(ThreadCollectives(0, [None], threading.Barrier(1)))
        peaks.append(most_allocated(profiled))
    per_token = (peaks[1] - peaks[0]) / (1024 - 256)
    assert per_token < 4 * (16 + 40), "hidden states, their gradient, and a few numbers"
    assert peaks[1] < 4 * 4096 * 1024, "a copy of the logits"


@pytest.mark.parametrize("package", ["liger_kernel.transformers.model.llama", "cut_cross_entropy.transformers.llama"])
def test_a_forward_that_does_not_call_the_head_is_refused(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such forwards take the rows that a rank has for the whole vocabulary, as TRL 1.16 does."""
    models = [model_of("llama") for _ in range(2)]

    def body(group: ThreadCollectives) -> None:
        shard_model(models[group.rank], group, torch.device("cpu"))

    monkeypatch.setattr(type(models[0]).forward, "__module__", package)
    with pytest.raises(ValueError, match=f"{package.partition('.')[0]} has replaced the forward of LlamaForCausalLM"):
        in_threads(body, 2)
