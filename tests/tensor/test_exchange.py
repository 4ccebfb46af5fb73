"""How often tensor-parallel ranks communicate, and what stays alive in between."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor

from hf_zero.comm import LoneCollectives, ledger
from hf_zero.tensor import layers
from hf_zero.tensor.layers import enter, gather, leave
from hf_zero.tensor.shard import shard_model
from tests.tensor.threads import ThreadCollectives, in_threads
from tests.tensor.training import batches, config_of, model_of

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
