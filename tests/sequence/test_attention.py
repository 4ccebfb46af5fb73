"""The exchange around attention: its results, its traffic, and unsupported models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config
from transformers.masking_utils import AttentionMaskInterface

import hf_zero.sequence.forwards as forwards
import hf_zero.sequence.forwards as masks
import hf_zero.sequence.shared as shared
from hf_zero.comm import Channel, Collectives, LoneCollectives, collectives_for, ledger
from hf_zero.sequence.attention import attach, check_config, check_model, detach, install, is_attached
from hf_zero.sequence.batches import UlyssesSPDataLoaderAdapter, part_of
from hf_zero.sequence.groups import SequenceGroups
from hf_zero.sequence.layer import HEADS, POSITIONS, DistributedAttention, exchange
from hf_zero.sequence.mixers import find_mixers
from hf_zero.sequence.registration import UlyssesSPAttentionHF
from tests.sequence.training import Rows, batches, packed, padded
from tests.support.ranks import run_ranks
from tests.tensor.models import model_of

CPU = torch.device("cpu")


def test_alone_nothing_travels() -> None:
    tensors = [torch.randn(2, 4, 6, 3, requires_grad=True), torch.randn(2, 2, 6, 3)]
    swapped = exchange(LoneCollectives(), tensors, split=HEADS, join=POSITIONS)
    assert all(torch.equal(one, other) for one, other in zip(tensors, swapped, strict=True))
    model = model_of("llama").eval()
    attach(model, LoneCollectives(), skips_evaluation=False)
    batch = packed(batches(1)[0])
    with torch.no_grad():
        loss = model(**batch).loss
        detach(model)
        assert not is_attached(model) and torch.equal(model(**batch).loss, loss)
    assert not shared.RUNNING.sights and forwards.IGNORED == -100


def test_key_heads_are_copied_as_little_as_possible() -> None:
    assert [shared.copies_of_key_heads(heads, 4) for heads in (8, 4, 2, 1, 6)] == [1, 1, 2, 4, 2]
    with pytest.raises(ValueError, match=r"does not hold: 12 != 8 x n; use .* divides 12: 2, 3, 4, 6, 12"):
        shared.check_heads(12, 8)


def test_models_that_cannot_share_say_why() -> None:
    def register(model: Any, attention: str | None = None, size: int = 2, **more: Any) -> Any:
        return UlyssesSPAttentionHF.register_with_transformers(model, attention, size, 1, **more)

    assert register(model_of("llama"), size=1) is None
    with pytest.raises(ValueError, match="does not hold: 4 != 3 x n"):
        register(model_of("llama"), size=3)
    with pytest.raises(ValueError, match="uses 'sdpa', but core_attn_implementation is 'eager'"):
        register(model_of("llama"), "eager")
    with pytest.raises(ValueError, match="'swift' is not known to transformers: eager, "):
        register(model_of("llama"), "swift")
    with pytest.raises(ValueError, match="needs seq_length="):
        register(model_of("llama"), seq_length_is_variable=False)
    with pytest.raises(ValueError, match="sequence length = .* does not hold: 9 != 2 x n"):
        register(model_of("llama"), seq_length=9, seq_length_is_variable=False)
    with pytest.raises(ValueError, match="Linear does not use transformers' attention interface"):
        register(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="world size = data ranks x sequence_parallel_size does not hold: 1 != n x 2"):
        register(model_of("llama"))
    crossed = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9))
    crossed.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="encoder-decoder models cannot share"):
        register(crossed)
    SequenceGroups.prepare(nn.Linear(2, 2), None, None)  # type: ignore[arg-type]  # nothing to undo


_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_models_with_an_index_over_positions_are_refused(kind: str) -> None:
    """The indexer of sparse attention scores all positions outside of the attention that ranks exchange heads for, and
    each rank saw only its own part, without a word."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    try:
        check_config(CONFIG_MAPPING[kind](), 2)
    except ValueError as error:
        assert "combines positions in a way that ranks cannot share" in str(error)
        return
    # In older versions the config of some of them does not say what their layers are; their modules do.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](num_hidden_layers=1))
    with pytest.raises(ValueError, match="combines positions in a way that ranks cannot share"):
        check_model(model, 2)


def test_the_kinds_of_layers_are_named() -> None:
    config = model_of("llama").config
    config.layer_types = ["full_attention", "wavelets"]
    with pytest.raises(ValueError, match="LlamaConfig, by its layer_types: wavelets: this model"):
        check_config(config, 2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM, in model.layers.1 \(LlamaDecoderLayer, linear_attention\)"
    ):
        check_model(_without_cache(config), 2)


def _without_cache(config: Any) -> Any:
    """A model whose second layer has nothing that could keep a state."""
    model: Any = AutoModelForCausalLM.from_config(config)
    model.model.layers[1].self_attn = _Alone()
    return model


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.cumsum(1) * self.A_log


def test_the_module_around_a_decay_is_found() -> None:
    """A gate with the decay of a state space concerns single positions; the state is that of the module around it."""
    model: Any = model_of("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    around = model.model.layers[1].self_attn
    around.gate = _Mixer()
    assert find_mixers(model, model.config) == [around]
    model.model.layers[0].extra = shared = _Mixer()
    model.model.extra = shared
    assert find_mixers(model, model.config) == [shared, around]


@pytest.mark.parametrize("mixer", [_Mixer, lambda: nn.Conv1d(4, 4, 3), lambda: nn.GRU(4, 4)])
def test_modules_that_combine_positions_are_found(mixer: Any) -> None:
    """In a model whose config does not say what its layers are. Convolutions for other inputs are allowed."""
    model: Any = model_of("llama")
    layer = model.model.layers[1]
    layer.extra = mixer()
    assert find_mixers(model, model.config) == [layer.extra if isinstance(layer.extra, _Mixer) else layer]
    layer.extra.config = GPT2Config()  # such as a tower for sound
    assert not find_mixers(model, model.config)
    layer.extra = nn.Conv1d(4, 4, 1)  # of single positions
    assert not find_mixers(model, model.config)
    layer.extra = nn.Linear(4, 4)
    model.model.extra = nn.ModuleList([nn.Conv1d(4, 4, 3)])  # of what, is not known
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, in model \(LlamaModel\): this model also combines"):
        check_model(model, 2)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "mixtral", "gemma2", "gpt_oss", "llama4_text"])
def test_models_with_attention_alone_are_accepted(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    config = CONFIG_MAPPING[kind](**({**_SMALL, "num_hidden_layers": 2} if kind != "gpt2" else {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    check_model(model, 2)


class _Alone(nn.Module):
    """Attention of its own, which does not use transformers' interface."""

    def forward(self, hidden_states: Tensor, **more: Any) -> tuple[Tensor, None]:
        return hidden_states, None


def test_a_model_whose_attention_exchanged_nothing_is_an_error() -> None:
    """transformers says that a model takes attention implementations if its file looks like it, which may be wrong."""
    model: Any = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn = _Alone()
    attach(model, LoneCollectives(), skips_evaluation=False)
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM has called no attention"):
        model(**batches(1)[0])
    detach(model)


def test_a_batch_is_dealt_out() -> None:
    batch = {**padded(packed(batches(1, length=5)[0], first=3), right=1), "name": "x", "weights": torch.ones(3)}
    left, right = (part_of(batch, rank, 2, CPU) for rank in range(2))
    whole = torch.cat([left["input_ids"], right["input_ids"]], dim=1)
    assert torch.equal(whole[:, :5], batch["input_ids"]) and whole.shape == (2, 6)
    labels = torch.cat([left["shift_labels"], right["shift_labels"]], dim=1)
    assert torch.equal(labels[:, :4], batch["labels"][:, 1:]) and (labels[:, 4:] == -100).all()
    assert "labels" not in left and left["name"] == "x" and torch.equal(right["weights"], batch["weights"])
    assert right["position_ids"][0].tolist() == [0, 1, 2] and right["attention_mask"][1].tolist() == [1, 0, 0]
    bounds = {"cu_seq_lens_q": torch.tensor([0, 3, 5]), "max_length_q": 3}
    assert part_of({**bounds, "input_ids": torch.ones(1, 5)}, 0, 2)["cu_seq_lens_q"].tolist() == [0, 3, 5, 6]
    plain = part_of({"input_ids": torch.ones(1, 4, dtype=torch.int64)}, 1, 2, CPU)
    assert plain["position_ids"].tolist() == [[2, 3]] and "shift_labels" not in plain
    with pytest.raises(ValueError, match=r"input_ids \[samples, positions\]; the batch has \['labels'\]"):
        part_of({"labels": torch.ones(2, 2)}, 0, 2, CPU)


class _Broken(Rows):
    def __iter__(self) -> Any:
        yield self.rows[0]
        raise OSError("the disk is gone")


def _two_ranks(rank: int) -> None:
    group = collectives_for(CPU, Channel.LAYERS, ((0, 1),))
    _check_layers(rank, group)
    _check_traffic(rank, group)
    _check_forwards(rank, group)
    loader = (_Broken if rank else Rows)([batches(1)[0], batches(1)[0]])
    adapter = UlyssesSPDataLoaderAdapter(loader, rank, torch.distributed.group.WORLD, 2, CPU)
    assert len(adapter) == 4 and adapter.rows is loader.rows
    with pytest.raises(RuntimeError, match="rank 1: OSError: the disk is gone"):
        list(adapter)


def _check_layers(rank: int, group: Collectives) -> None:
    """`DistributedAttention` with even, few and uneven heads, including gradients."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)

    torch.manual_seed(3)
    layer = DistributedAttention(attend, torch.distributed.group.WORLD)
    for heads, key_heads in ((4, 4), (4, 1), (6, 3), (3, 3)):
        whole = [torch.randn(6, 2, number, 5, requires_grad=True) for number in (heads, key_heads, key_heads)]
        parts = [tensor.detach()[rank * 3 :][:3].requires_grad_() for tensor in whole]
        expected, found = attend(*whole), layer(*parts)
        torch.testing.assert_close(found, expected[rank * 3 :][:3])
        expected.square().sum().backward()
        found.square().sum().backward()
        for tensor, part in zip(whole, parts, strict=True):
            assert tensor.grad is not None
            torch.testing.assert_close(part.grad, tensor.grad[rank * 3 :][:3])
    with pytest.raises(ValueError, match="does not hold: 3 != 2 x n"):
        layer(*(torch.randn(3, 1, number, 5) for number in (3, 1, 1)))


def _check_traffic(rank: int, group: Collectives) -> None:
    """Two messages per layer and direction, of queries, keys, values and outputs, and no others of that size."""
    model = model_of("qwen2, one key head")  # 4 heads of 8, 1 key head, 2 layers
    attach(model, group, skips_evaluation=False)
    ledger.reset()
    part = part_of(batches(1)[0], rank, 2, CPU)
    model(**part, labels=part["shift_labels"]).loss.backward()
    calls = [tally for (_, operation), tally in ledger.tallies.items() if operation == "all_to_all"]
    rows = 2 * 6 * 8 * 4  # samples x positions x size of a head, fp32
    assert sum(tally.calls for tally in calls) == 2 * 2 * 2
    assert sum(tally.num_bytes for tally in calls) == 2 * 2 * rows * (4 + 2 + 2 + 4)
    detach(model)


def _check_forwards(rank: int, group: Collectives) -> None:
    """Positions and the next label, which a part does not contain; and parts that do not fit."""
    batch = batches(1)[0]
    model = model_of("gpt2").eval()
    with torch.no_grad():
        expected = model(**batch).logits
    attach(model, group, skips_evaluation=False)
    assert is_attached(model) and shared.MODULES[model].group is group
    half = slice(rank * 6, rank * 6 + 6)
    with torch.no_grad():
        found = model(input_ids=batch["input_ids"][:, half], labels=batch["labels"][:, half])
        torch.testing.assert_close(found.logits, expected[:, half])
        with pytest.raises(ValueError, match=r"parts have different shapes .*: 2 x 5, 2 x 6"):
            model(input_ids=batch["input_ids"][:, : 5 + rank])
        counted = 2 * (6 if rank == 0 else 5)
        logits = model(input_ids=batch["input_ids"][:, half]).logits.flatten(0, 1)
    following = torch.cat([batch["labels"][:, 1:], torch.full((2, 1), -100)], dim=1)[:, half].flatten()
    assert (following != -100).sum() == counted
    torch.testing.assert_close(found.loss, nn.functional.cross_entropy(logits, following))
    detach(model)
    install("sdpa", ())  # a second time: nothing is wrapped twice
    original = getattr(AttentionMaskInterface._global_mapping["sdpa"], masks.MARK)
    assert not hasattr(original, masks.MARK) and not masks.asked_for_documents()


def test_on_two_ranks() -> None:
    run_ranks(_two_ranks, 2)
