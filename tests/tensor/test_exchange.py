"""How often tensor-parallel ranks communicate, and what stays alive in between."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_zero.comm import LoneCollectives, ledger
from hf_zero.tensor import layers
from hf_zero.tensor.layers import enter, gather, leave, partial_cross_entropy
from hf_zero.tensor.shard import shard_model
from tests.support.one_process import batches
from tests.tensor.models import config_of, model_of
from tests.tensor.threads import ThreadCollectives, in_threads

RANKS = 2


def sums(kind: str, checkpointing: bool) -> dict[str, int]:
    """All-reduces of one rank, by the half of the step in which they occur."""
    models, batch = [model_of(kind) for _ in range(RANKS)], batches(1)[0]
    for model in models if checkpointing else ():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    counts: Counter[str] = Counter()

    def body(group: ThreadCollectives) -> ThreadCollectives:
        shard_model(models[group.rank], group, torch.device("cpu"))
        return group

    groups = in_threads(body, RANKS)
    losses: list[Tensor] = [torch.empty(0)] * RANKS
    for half in ("forward", "backward"):

        def run(group: ThreadCollectives, half: str = half) -> None:
            if half == "forward":
                losses[group.rank] = models[group.rank](**batch).loss
            else:
                losses[group.rank].backward()  # type: ignore[no-untyped-call]

        ledger.reset()
        in_threads(run, RANKS)
        counts[half] = sum(t.calls for (_, name), t in ledger.tallies.items() if name == "all_reduce") // RANKS
        assert not layers._ENTERED.keys() & set(groups)
    return dict(counts)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_matrices_with_one_input_sum_its_gradient_once(checkpointing: bool) -> None:
    """Queries, keys, values, gate and up summed theirs one by one: five messages per layer instead of two."""
    layers, head, embedding = config_of("llama").num_hidden_layers, 1, 1
    again = layers if checkpointing else 0  # of attention; a layer's last part is not recomputed
    expected = {"forward": 2 * layers + embedding, "backward": 2 * layers + head + again}
    assert sums("llama", checkpointing) == expected


def test_what_has_changed_enters_anew_and_nothing_stays() -> None:
    alone, other = LoneCollectives(), LoneCollectives()
    source = torch.randn(3, requires_grad=True) * 1
    first = enter(alone, source)
    assert enter(alone, source) is first and enter(other, source) is not first
    leave(other, source)
    with torch.no_grad():
        source.mul_(2)
    changed = enter(alone, source)
    assert changed is not first
    for ends in (lambda tensor: leave(alone, tensor), lambda tensor: gather(alone, tensor, [3])):
        entered = enter(alone, torch.randn(3, requires_grad=True) * 1)
        seen = weakref.ref(entered)
        ends(torch.randn(3))
        del entered
        gc.collect()
        assert seen() is None


def test_without_a_graph_nothing_enters() -> None:
    alone, source = LoneCollectives(), torch.randn(3, requires_grad=True)
    with torch.inference_mode():
        assert enter(alone, source) is source
    assert enter(alone, source.detach()).grad_fn is None


@pytest.mark.parametrize("sizes", [(5, 5), (4, 3, 3)])
def test_the_loss_of_parts_of_the_logits(sizes: tuple[int, ...]) -> None:
    """`tiled_loss` gathered every tile's logits to compute a number per token: 8 bytes per token and rank suffice."""
    torch.manual_seed(0)
    logits, labels = 20 * torch.randn(7, sum(sizes)), torch.tensor([0, 9, -100, 4, 5, 2, 8])
    whole = logits.clone().requires_grad_()
    expected = functional.cross_entropy(whole, labels, reduction="sum")
    (3 * expected).backward()
    ledger.reset()

    def body(group: ThreadCollectives) -> tuple[Tensor, Tensor]:
        part = logits.split(sizes, dim=-1)[group.rank].clone().requires_grad_()
        loss = partial_cross_entropy(group, part, labels, sizes, ignore_index=-100)
        (3 * loss).backward()
        assert part.grad is not None
        return loss.detach(), part.grad

    losses, gradients = zip(*in_threads(body, len(sizes)), strict=True)
    assert whole.grad is not None
    torch.testing.assert_close(torch.stack(losses), expected.detach().expand(len(sizes)))
    torch.testing.assert_close(torch.cat(gradients, dim=-1), whole.grad)
    tallies = {name: tally for (_, name), tally in ledger.tallies.items()}
    assert tallies.keys() == {"all_gather"} and tallies["all_gather"].calls == len(sizes)
    assert torch.equal(gradients[0][2], torch.zeros(sizes[0])), "an ignored token"
