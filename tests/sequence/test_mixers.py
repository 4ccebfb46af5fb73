"""Layers that combine positions outside of attention: hybrid models train on parts as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from hf_zero.comm import Channel, Collectives, collectives_for, ledger
from hf_zero.sequence.attention import attach, detach
from hf_zero.sequence.batches import part_of
from hf_zero.sequence.mixers import attach_mixers, find_mixers
from hf_zero.sequence.scans import _around_convolution, functions_of
from hf_zero.sequence.shared import RUNNING, Mixing, Shared
from tests.mesh.training import differences
from tests.sequence.training import batches, compare, in_parts, packed, padded
from tests.support.one_process import Difference, assert_small, in_one_process
from tests.support.ranks import run_ranks
from tests.tensor.models import HYBRIDS, config_of, model_of

Found = dict[str, Difference]
KINDS = tuple(kind for kind in HYBRIDS if kind in CONFIG_MAPPING)
CPU = torch.device("cpu")
CHANGES: dict[str, Any] = {
    "plain": lambda batch: batch,
    "left": lambda batch: padded(batch, left=7),
    "right": lambda batch: padded(batch, right=7),
    "packed": packed,
}


def _some_kinds(rank: int) -> Found:
    """Every way to combine positions, with another stage and kind of batch each: one rank has all of the padding."""
    kinds = (
        "bamba",
        "falcon_h1",
        "jamba",
        "kimi_linear",
        "lfm2",
        "minimax",
        "qwen3_next",
        "recurrent_gemma",
        "zaya",
        "mamba2",
    )
    known = [kind for kind in kinds if kind in KINDS]
    cases = zip(known, [0, 1, 2, 3] * len(known), [*CHANGES][1:] * len(known), strict=False)
    return {
        f"{kind}, stage {stage}, {name}": compare(rank, kind, stage, 2, steps=2, world=2, change=CHANGES[name])
        for kind, stage, name in cases
    }


def test_hybrid_models_train_as_in_one_process() -> None:
    """Ranks shared the sequences of Qwen3-Next, and the loss was wrong, without a word.

    Three of four layers have linear attention: a causal convolution and a recurrence over positions, which began anew
    on each rank.
    """
    assert_small(run_ranks(_some_kinds, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_exchanged_where_the_class_allows_it(kind: str) -> None:
    """If transformers renames a class or function, its layers run on whole sequences, which takes more memory."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config_of(kind))
    mixers = find_mixers(model, model.config)
    exchanged = [bool(functions_of(mixer, 2)) for mixer in mixers]
    assert mixers and exchanged == [kind not in ("minimax", "recurrent_gemma", "zamba", "zaya")] * len(mixers)
    assert not any(functions_of(mixer, 7) for mixer in mixers if hasattr(mixer, "A_log"))  # heads do not divide


def _several_ranks(rank: int) -> Found:
    return {
        "1 x 4": compare(rank, "qwen3_next", 3, 4, steps=1, world=4, change=CHANGES["left"]),
        "shorter than what a convolution sees": compare(rank, "lfm2", 0, 4, steps=1, world=4, length=4),
        "2 x 2": compare(rank, "nemotron_h", 2, 2, steps=1, world=4, change=CHANGES["packed"]),
    }


def test_four_ranks_train_as_one_process() -> None:
    assert_small(run_ranks(_several_ranks, 4))


def _sweep(rank: int, size: int, kind: str) -> Found:
    return {
        f"{name}, stage {stage}": compare(rank, kind, stage, size, steps=3, world=size, change=change)
        for name, change in CHANGES.items()
        for stage in (0, 3)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_sweep(size: int, kind: str) -> None:
    assert_small(run_ranks(_sweep, size, size, kind))


class _Recurrence(nn.Module):
    """A mixer whose state begins anew with each document, and which padding does not enter."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.tensor([0.3, -0.2, 0.5, 0.1]))

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        assert cache is None
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[:, :, None]
        starts = [] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
        states = [torch.zeros_like(hidden_states[:, 0])]
        for at in range(hidden_states.shape[1]):
            is_first = at in starts or (seq_idx is not None and at > 0 and bool(seq_idx[0, at] != seq_idx[0, at - 1]))
            before = torch.zeros_like(states[-1]) if is_first else states[-1]
            states.append(before * self.A_log + hidden_states[:, at])
        return torch.stack(states[1:], dim=1), None


def _two_ranks(rank: int) -> None:
    group = collectives_for(CPU, Channel.LAYERS, ((0, 1),))
    _check_documents(rank, group)
    _check_convolution(rank, group)
    _check_traffic(rank, group)
    _check_refusals(rank, group)
    _check_evaluation(rank, group)


def _check_documents(rank: int, group: Collectives) -> None:
    """Document bounds in both forms, a mask that one rank does not have, and the gradients of inputs and weights."""
    own = slice(rank * 4, rank * 4 + 4)
    torch.manual_seed(3)
    whole, mask = torch.randn(1, 8, 4, requires_grad=True), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    for more in ({"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]])}, {"cu_seq_lens_q": torch.tensor([0, 3, 6, 8])}):
        plain, whole.grad = _Recurrence(), None
        expected, _ = plain(whole, attention_mask=mask, **more)
        expected.square().sum().backward()
        mixer = _Recurrence()
        handles = attach_mixers([mixer], Shared(group, None, skips_evaluation=False))
        part = whole.detach()[:, own].requires_grad_()
        named = {name: value[:, own] if value.dim() > 1 else value for name, value in more.items()}
        found, _ = mixer(part, DynamicCache(), None if rank else mask[:, own], **named)
        torch.testing.assert_close(found, expected[:, own])
        found.square().sum().backward()
        torch.testing.assert_close(part.grad, whole.grad[:, own])
        gradient = mixer.A_log.grad.clone()
        group.all_reduce(gradient).wait()
        torch.testing.assert_close(gradient, plain.A_log.grad)
        for handle in handles:
            handle.remove()
        assert torch.equal(mixer(part)[0], _Recurrence()(part)[0])


def _check_convolution(rank: int, group: Collectives) -> None:
    """Documents that begin where a part does, right before, and within; parts shorter than what a position sees."""
    torch.manual_seed(4)
    whole, weight = torch.randn(1, 2, 8), torch.randn(2, 4)
    for ids in ([0] * 8, [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 2, 2, 2]):
        documents = torch.tensor([ids])
        for cut in (whole, whole[..., :4]):
            length = cut.shape[-1]
            own = slice(rank * length // 2, (rank + 1) * length // 2)
            expected = _convolved(cut, weight, seq_idx=documents[:, :length])
            RUNNING.mixers.append(Mixing(nn.Identity(), group, 1, length // 2, ("causal_conv1d_fn",)))
            shared = _around_convolution("causal_conv1d_fn", _convolved)
            found = shared(cut[..., own], weight, seq_idx=documents[:, :length])
            RUNNING.mixers.pop()
            torch.testing.assert_close(found, expected[..., own])


def _convolved(rows: Tensor, weight: Tensor, seq_idx: Tensor) -> Tensor:
    """A causal convolution within documents, as that of the package causal_conv1d."""
    output = torch.zeros_like(rows)
    for at in range(rows.shape[-1]):
        for back in range(min(weight.shape[-1], at + 1)):
            if seq_idx[0, at] == seq_idx[0, at - back]:
                output[..., at] += rows[..., at - back] * weight[:, weight.shape[-1] - 1 - back]
    return output


def _check_traffic(rank: int, group: Collectives) -> None:
    """The bytes of docs/sequence_parallelism.md: per direction two messages around a scan, one with the ends of parts
    for a convolution, and one with the input of a mixer that runs on whole sequences."""
    rows = 2 * 6 * 4  # samples x positions, fp32
    for kind in ("qwen3_next", "lfm2", "jamba", "minimax"):
        config: Any = config_of(kind)
        if kind == "qwen3_next":  # older versions of transformers copy key heads before the scan
            config.linear_num_key_heads = config.linear_num_value_heads
        model: Any = AutoModelForCausalLM.from_config(config).train()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = width * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
        if kind == "qwen3_next":
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            values = config.linear_num_value_heads * config.linear_value_head_dim
            scanned = 2 * keys + 2 * values + 2 * config.linear_num_value_heads
            num, size = 3, rows * scanned + _ends(rows, config.linear_conv_kernel_dim, 2 * keys + values)
        elif kind == "jamba":
            channels = config.mamba_expand * config.hidden_size
            common = 2 * 2 * config.mamba_d_state
            num, size = 5, rows * (4 * channels + common) + _ends(rows, config.mamba_d_conv, channels)
        elif kind == "lfm2":
            num, size = 1, _ends(rows, config.conv_L_cache, config.hidden_size)
        else:
            num, size = 1, rows * 2 * config.hidden_size
        attach(model, group, skips_evaluation=False)
        part = part_of(batches(1)[0], rank, 2, CPU)
        ledger.reset()
        model(**part, labels=part["shift_labels"]).loss.backward()
        calls = [tally for (_, operation), tally in ledger.tallies.items() if operation == "all_to_all"]
        assert sum(tally.calls for tally in calls) == 2 * (2 + num), kind
        assert sum(tally.num_bytes for tally in calls) == 2 * (rows * attention + size), kind
        detach(model)


def _ends(rows: int, kernel: int, channels: int) -> int:
    return 2 * rows // 6 * (kernel - 1) * channels


def _check_refusals(rank: int, group: Collectives) -> None:
    model: Any = model_of("lfm2")
    attach(model, group, skips_evaluation=False)
    ids = batches(1)[0]["input_ids"][:, :6]
    with pytest.raises(NotImplementedError, match="Lfm2ForCausalLM got past_key_values=, but its recurrent states"):
        model(input_ids=ids, past_key_values=DynamicCache(config=model.config))
    model.model.layers[0].conv.forward = lambda hidden_states, **_: hidden_states  # as a kernel for the whole module
    with pytest.raises(NotImplementedError, match="Lfm2ShortConv has not called causal_conv1d_fn, around which ranks"):
        model(input_ids=ids)
    detach(model)
    odd: Any = model_of("llama")
    odd.model.layers[0].mlp = _Transposed()
    attach(odd, group, skips_evaluation=False)
    with pytest.raises(NotImplementedError, match=r"_Transposed returns \(2, 64, 12\) for 2 sequences of 12 positions"):
        odd(input_ids=ids)
    detach(odd)
    assert not RUNNING.mixers and not RUNNING.sights


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(32, 64, 3, padding=1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.along(hidden_states.transpose(1, 2))


def _check_evaluation(rank: int, group: Collectives) -> None:
    """Whole sequences where evaluation does not share them: nothing is sent. A model in evaluation mode otherwise."""
    model, batch = model_of("qwen3_next").eval(), padded(batches(1)[0], left=7)
    with torch.no_grad():
        expected = model(**batch).logits
        attach(model, group, skips_evaluation=True)
        ledger.reset()
        assert torch.equal(model(**batch).logits, expected) and not ledger.tallies
        attach(model, group, skips_evaluation=False)
        part = part_of(batch, rank, 2, CPU)
        found = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
    own = slice(rank * 6, rank * 6 + 6)
    seen = batch["attention_mask"][:, own].bool()
    torch.testing.assert_close(found[seen], expected[:, own][seen])
    detach(model)


def test_on_two_ranks() -> None:
    run_ranks(_two_ranks, 2)


def _recomputed(rank: int) -> Found:
    """Backward computes layers again, without the inputs of the forward: ranks do not know whose rows are padded."""
    found: Found = {}
    data = [padded(batch, left=7) for batch in batches(2)]
    for kind, reentrant in (("qwen3_next", False), ("falcon_h1", True), ("recurrent_gemma", False)):
        model = model_of(kind)
        plain = in_one_process(model, data)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        found[kind] = differences(in_parts(rank, model, data, stage=3, size=2), plain)
    return found


def test_recomputed_layers() -> None:
    assert_small(run_ranks(_recomputed, 2))
