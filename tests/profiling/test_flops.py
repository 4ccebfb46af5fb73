"""Operations per module compared with torch's counter, and cleanup after profiling."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hf_zero.profiling.breakdown import Breakdown
from hf_zero.profiling.flops import (
    FlopsProfiler,
    ModuleProfile,
    aggregated,
    get_model_profile,
    num_parameters,
    summary,
)
from tests.support.models import VOCABULARY, tiny_llama

SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = {"intermediate_size": 48}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
BART |= {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("attention_heads", 4), ("ffn_dim", 48))
}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **MLP, "image_size": 16, "patch_size": 4}
GROUPED = {**SMALL, **MLP, "num_key_value_heads": 2, "max_position_embeddings": 32}
# Config class, its arguments, class of the model.
ARCHITECTURES = {
    "llama": ("LlamaConfig", GROUPED, "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", GROUPED, "Qwen2ForCausalLM"),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": None}, "MistralForCausalLM"),
    "gpt2": ("GPT2Config", GPT2, "GPT2LMHeadModel"),
    "gpt_neox": ("GPTNeoXConfig", {**SMALL, **MLP, "max_position_embeddings": 32}, "GPTNeoXForCausalLM"),
    "opt": (
        "OPTConfig",
        {**SMALL, "ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
        "OPTForCausalLM",
    ),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "BloomForCausalLM",
    ),
    "bert": ("BertConfig", {**SMALL, **MLP, "max_position_embeddings": 32}, "BertForMaskedLM"),
    "t5": ("T5Config", T5, "T5ForConditionalGeneration"),
    "bart": ("BartConfig", {**BART, "max_position_embeddings": 32}, "BartForConditionalGeneration"),
    "vit": ("ViTConfig", VIT, "ViTForImageClassification"),
}


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    configuration, arguments, model_class = ARCHITECTURES[name]
    config = getattr(transformers, configuration)(**arguments, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    if name == "vit":
        return model, {"pixel_values": torch.randn(2, 3, 16, 16)}
    tokens = torch.arange(24).view(2, 12) % VOCABULARY
    inputs = {"input_ids": tokens}
    if name in ("t5", "bart"):
        inputs["decoder_input_ids"] = tokens
    return model, inputs


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_modules_have_the_counts_of_torchs_counter(name: str) -> None:
    model, inputs = built(name)
    counter, alone = FlopCounterMode(display=False), model(**inputs)
    with counter:
        model(**inputs)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    output = model(**inputs)
    profiler.stop_profile()
    found = {module.name: module for module in profiler.modules()}
    root, counts = type(model).__name__, counter.get_flop_counts()
    assert found[""].flops == counter.get_total_flops() > 0
    for key, counted in counts.items():
        if key.startswith(root):
            assert found[key[len(root) + 1 :]].flops == sum(counted.values()), key
    assert torch.equal(output.logits, alone.logits)
    leaves = sum(module.flops for module in found.values() if not list(model.get_submodule(module.name).children()))
    assert 0.5 * found[""].flops < leaves <= found[""].flops
    assert all(module.latency_s <= found[""].latency_s * 1.01 for module in found.values())


def test_the_published_vector() -> None:
    """Llama, hidden 64, 2 layers: 3,014,656 MACs by hand; DeepSpeed 0.19.8 reports the same."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    kwargs = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    for implementation in ("eager", "sdpa"):  # torch's counter alone misses attention on CPUs with sdpa
        model.set_attn_implementation(implementation)
        found = get_model_profile(model, kwargs=kwargs, print_profile=False, as_string=False)
        assert found == (2 * 3_014_656, 3_014_656, 106_816), implementation
    assert get_model_profile(model, kwargs=kwargs, print_profile=False) == ("6.03 MFLOPS", "3.01 MMACs", "106.82 K")
    assert not model.training


def test_profiling_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    model, inputs = tiny_llama(), {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    state = torch.get_rng_state()
    profiler = FlopsProfiler(model)
    profiler.print_model_profile()
    assert capsys.readouterr().out == ""  # before a start
    profiler.start_profile()
    model(**inputs).logits.sum().backward()
    profiler.stop_profile()
    profiler.print_model_profile(detailed=False)
    profiler.print_model_aggregated_profile(module_depth=1)
    out = capsys.readouterr().out
    assert "fwd MACs per GPU:" in out and "depth 1:" in out and "depth 5:" in out
    assert profiler.params == num_parameters(model) and profiler.get_total_macs() * 2 == profiler.get_total_flops()
    assert profiler.get_total_duration() > 0 and profiler.get_total_params(as_string=True) == "31.64 K"
    profiler.end_profile()
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert torch.equal(state, torch.get_rng_state())


def test_left_out_classes_take_their_operations_with_them() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    whole = get_model_profile(model, (2, 8), print_profile=False, as_string=False)
    assert whole[0] == 2 * 2 * (8 * 16 + 16 * 4)
    assert get_model_profile(model, (2, 8), print_profile=False, as_string=False, ignore_modules=[nn.Linear])[0] == 0
    with pytest.raises(AssertionError, match="input_shape"):
        get_model_profile(model)


def test_a_class_inside_of_one_that_is_left_out_is_left_out_once() -> None:
    """With both classes in the list, the inner one's FLOPs were subtracted twice: the model had fewer than none."""
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), block)
    left_out: list[list[type]] = [[type(block)], [type(block), nn.MultiheadAttention, nn.Dropout]]
    for classes in left_out:
        found = get_model_profile(model, (1, 4, 8), print_profile=False, as_string=False, ignore_modules=classes)
        assert found[0] == 2 * 4 * 8 * 8, classes


class InnerBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x @ self.weight).sum(), self.weight)[0]


def test_a_backward_within_forward_does_not_count() -> None:
    """Such as that of a tiled loss, whose forward computes gradients."""
    model = InnerBackward()
    assert counted(model, lambda: model(torch.ones(3, 8))) == {"": 2 * 3 * 8 * 4}


def test_the_report_goes_to_a_file_with_all_levels(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "flops.txt"
    get_model_profile(tiny_llama(), args=[torch.zeros(1, 4, dtype=torch.long)], output_file=str(path), top_modules=2)
    text = path.read_text()
    assert text.index("depth 0:") < text.index("depth 5:") < text.index("(q_proj): Linear(")
    assert "in_features=36, out_features=36" in text


def test_rates_count_all_micro_batches() -> None:
    """DeepSpeed 0.19.8 ignores gradient accumulation in FLOPS and samples per second."""
    model = ModuleProfile(name="", class_name="Net", params=10, flops=1000, latency_s=0.5)
    engine = SimpleNamespace(
        settings=SimpleNamespace(get_batch_info=lambda: (24, 4, 3)),
        groups=SimpleNamespace(world=SimpleNamespace(size=2)),
    )
    times = Breakdown(6000.0, {}, {"fwd": 1500.0, "bwd": 3000.0, "step": 1000.0})
    lines = dict(summary(model, 0.0, engine, times))
    assert lines["FLOPS per GPU = 3 * fwd flops / iter latency:"] == "1.5 KFLOPS"
    assert lines["bwd FLOPS per GPU = 2 * fwd flops / bwd latency:"] == "2 KFLOPS"
    assert lines["samples/second, all ranks:"] == "4.00" and lines["fwd latency:"] == "500 ms"
    assert lines["world size:"] == "2" and lines["gradient accumulation steps:"] == "3"
    assert "depth 1" not in "\n".join(aggregated([model], 3, 1))


def counted(model: nn.Module, run: Any) -> dict[str, int]:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    run()
    profiler.stop_profile()
    return {module.name: module.flops for module in profiler.modules()}


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def test_modules_count_whoever_calls_them() -> None:
    """Only a part of a model was called, or the model through a wrapper: the profiler said 0 FLOPs, without a word.

    torch names modules from the outermost one that is called. And FLOPs of backward between start and stop were added
    to those of forward.
    """
    x, model = torch.randn(3, 8), nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 4))
    first, last = 2 * 3 * 8 * 16, 2 * 3 * 16 * 4
    expected = {"": first + last, "0": first, "0.0": first, "0.1": 0, "1": last}
    assert counted(model, lambda: model(x)) == expected
    assert counted(model, lambda: Wrapper(model)(x)) == expected
    assert counted(model, lambda: model(x).sum().backward()) == expected
    assert counted(model, lambda: checkpoint(model, x, use_reentrant=False).sum().backward()) == expected
    assert counted(model, lambda: model[0](x)) == {"": first, "0": first, "0.0": first, "0.1": 0, "1": 0}
    assert counted(model, lambda: (model(x), model[1](x.repeat(1, 2)))) == {
        **expected,
        "": first + 2 * last,
        "1": 2 * last,
    }
    assert counted(model, lambda: x @ x.T) == dict.fromkeys(expected, 0), "operations outside of the model"
    wrapper = Wrapper(model)
    assert counted(wrapper, lambda: wrapper(x))["inner.0.0"] == first
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        counted(model, lambda: model(torch.randn(3, 7)))


def test_a_total_of_zero_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="hf_zero"):
        counted(nn.Linear(2, 2), lambda: None)
        counted(nn.ReLU(), lambda: None)
    (record,) = caplog.records
    assert "has counted no operation of Linear" in record.getMessage()


FUSED: dict[str, tuple[Any, tuple[tuple[int, ...], ...], int]] = {
    "lstm": (lambda: nn.LSTM(8, 16, 2, bidirectional=True), ((5, 2, 8),), 2 * 10 * 2 * 64 * (8 + 16 + 32 + 16)),
    "gru": (lambda: nn.GRU(8, 16), ((5, 2, 8),), 2 * 10 * 48 * (8 + 16)),
    "bilinear": (lambda: nn.Bilinear(4, 5, 6), ((3, 4), (3, 5)), 2 * 3 * 6 * (4 * 5 + 5)),
    "vector": (lambda: nn.Linear(4, 3), ((4,),), 2 * 12),
}


@pytest.mark.parametrize("name", FUSED)
def test_kernels_that_torchs_counter_does_not_know(name: str) -> None:
    """For an LSTM or a Bilinear layer the profiler said 0."""
    make, shapes, expected = FUSED[name]
    model = make()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert counted(model, lambda: model(*(torch.randn(*shape) for shape in shapes)))[""] == expected, grad


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_encoder_layer_counts_like_its_parts(norm_first: bool) -> None:
    """In evaluation torch computes nn.TransformerEncoderLayer in one kernel, of which half the FLOPs were counted."""
    layer, x = (
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first).eval(),
        torch.randn(2, 5, 16),
    )
    parts = counted(layer, lambda: layer(x))[""]
    with torch.no_grad():
        assert counted(layer, lambda: layer(x))[""] == parts == 2 * 10 * (4 * 16 * 16 + 2 * 16 * 32) + 4 * 2 * 25 * 16
    attention, y = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 5, 16)
    parts = counted(attention, lambda: attention(y, y, y, need_weights=False))[""]
    with torch.no_grad():
        assert counted(attention, lambda: attention(y, y, y, need_weights=False))[""] == parts > 0
