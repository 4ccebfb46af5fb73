"""With tiled MLPs and loss enabled in ds.json, losses and gradients of Hugging Face models do not change."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_zero import initialize
from hf_zero.api.parameter_access import safe_get_full_grad
from hf_zero.comm import ledger
from hf_zero.config import ConfigError
from hf_zero.tiling import functions as mlp_module
from hf_zero.tiling import loss as loss_module
from hf_zero.tiling.functions import dense_mlps, is_dense_mlp, norms_of_tokens
from hf_zero.tiling.loss import DeferredLogits, loss_tile_tokens, tiled_loss_of
from tests.support.architectures import ARCHITECTURES, LLAMA
from tests.support.models import tiny_llama
from tests.support.ranks import run_ranks
from tests.support.traffic import calls_and_bytes

LENGTH = 48
IGNORED = -100


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Tiles of as many tokens as the hidden width, 36, instead of a thousand."""
    with small():
        yield


class small:
    def __enter__(self) -> None:
        loss_module.TILE_TOKENS = mlp_module.TILE_TOKENS = 8

    def __exit__(self, *_: object) -> None:
        loss_module.TILE_TOKENS = mlp_module.TILE_TOKENS = 1024


def settings(**sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **sections,
    }


def batch(rows: int = 2, seed: int = 1, ignored: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (rows, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :ignored] = IGNORED
    return {"input_ids": ids, "labels": labels}


def gemma2() -> Any:
    """Logits are divided, soft-capped and multiplied before the loss."""
    sizes = {**LLAMA, "final_logit_softcapping": 0.3, "head_dim": 6, "layer_types": ["full_attention"] * 2}
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes))


def build(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gemma2":
        return gemma2()
    if kind == "cohere":
        return tf.CohereForCausalLM(tf.CohereConfig(**LLAMA, logit_scale=3.0))
    if kind in ("llama", "tied llama"):
        return tiny_llama(tied=kind != "llama")
    return ARCHITECTURES[kind].build()


def train(model: Any, tiled: dict[str, bool], batches: list[dict[str, Any]], **sections: Any) -> tuple[list[Any], Any]:
    """Losses of all forwards, gradients of one update and the updated model."""
    model.train()
    config = settings(gradient_accumulation_steps=len(batches), hf_zero=tiled, **sections)
    engine, _, _, _ = initialize(model=model, config=config)
    losses = []
    for values in batches:
        loss = engine(**values).loss
        losses.append(loss.detach().clone())
        engine.backward(loss)
        engine.step()
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.destroy()
    return losses, weights


BOTH = {"tiled_mlp": True, "tiled_loss": True}


def assert_same(found: tuple[list[Any], Any], expected: tuple[list[Any], Any], **more: float) -> None:
    tolerance = more or {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    torch.testing.assert_close(found[1], expected[1], **tolerance)


@pytest.mark.parametrize("kind", ["llama", "tied llama", "qwen3", "gpt2", "gemma2", "cohere"])
def test_losses_and_updates_are_those_of_the_plain_model(kind: str) -> None:
    """Two micro-batches with different numbers of labels; with a learning rate of 0.1 weights show the gradients."""
    batches = [batch(ignored=5), batch(seed=2, ignored=30)]
    assert_same(train(build(kind), BOTH, batches), train(build(kind), {}, batches))


@pytest.mark.parametrize("recompute", [False, True])
def test_what_trainer_passes(recompute: bool) -> None:
    """num_items_in_batch as tensor or number, shifted labels, checkpointed layers."""
    shifted = nn.functional.pad(batch()["labels"], (0, 1), value=IGNORED)[..., 1:].contiguous()
    batches: list[dict[str, Any]] = [
        {**batch(), "num_items_in_batch": torch.tensor(150)},
        {**batch(seed=2), "num_items_in_batch": 150},
        {**batch(), "shift_labels": shifted},
    ]
    found = []
    for tiled in (BOTH, {}):
        model = build("llama")
        if recompute:
            model.gradient_checkpointing_enable()
        found.append(train(model, tiled, batches))
    assert_same(*found)


def test_without_a_label_the_loss_is_nan_and_gradients_are_none() -> None:
    nothing = {**batch(), "labels": torch.full((2, LENGTH), IGNORED)}
    found, weights = train(build("llama"), {"tiled_loss": True}, [nothing])
    assert found[0].isnan() and all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize(
    ("targets", "whole"),
    [(["q_proj", "up_proj", "down_proj"], []), (["up_proj", "lm_head"], []), (["q_proj"], ["lm_head"])],
)
def test_lora_with_frozen_and_with_trained_head(targets: list[str], whole: list[str]) -> None:
    found = []
    for tiled in (BOTH, {}):
        model: Any = build("llama")
        torch.manual_seed(1)
        lora = LoraConfig(r=4, target_modules=targets, modules_to_save=whole, init_lora_weights=False)
        found.append(train(get_peft_model(model, lora), tiled, [batch(), batch(seed=2)]))
    assert_same(*found)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "autocast"])
def test_mixed_precision(precision: str) -> None:
    more: dict[str, Any] = {precision: {"enabled": True}}
    if precision == "autocast":
        more = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    batches = [batch(), batch(seed=2)]
    found = [train(build("llama"), tiled, batches, **more) for tiled in (BOTH, {})]
    assert_same(*found, rtol=1e-2, atol=2e-3)


def _errors_in_bf16(rank: int, stage: int) -> dict[str, float]:
    """Errors of gradients relative to fp32: the largest with tiles over the largest without."""
    batches, found = [batch(ignored=5), batch(seed=2, ignored=30)], {}
    for kind in ("llama", "tied llama"):
        exact = build(kind).bfloat16().float().train()
        for values in batches:
            (exact(**values).loss / 2).backward()
        largest = []
        for tiled in (BOTH, {}):
            model = build(kind).train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            more = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
            with small():
                engine, *_ = initialize(
                    model=model, config=settings(gradient_accumulation_steps=2, hf_zero=tiled, **more)
                )
                for values in batches:
                    engine.backward(engine(**values).loss)
                    engine.step() if values is batches[0] else None
            pairs = zip(model.parameters(), exact.parameters(), strict=True)
            largest.append(max(_difference(safe_get_full_grad(own), other.grad) for own, other in pairs))
            engine.destroy()
        found[kind] = largest[0] / largest[1]
    return found


def _difference(found: Any, exact: Any) -> float:
    return ((found.float() - exact).norm() / exact.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tiles_round_no_more_than_the_plain_model_in_bf16(stage: int) -> None:
    """Products of tiles are summed in fp32, layers are checkpointed, two ranks accumulate."""
    for found in run_ranks(_errors_in_bf16, 2, stage):
        assert all(ratio < 1.3 for ratio in found.values()), found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_logits_are_computed_for_whoever_wants_them(caplog: pytest.LogCaptureFixture) -> None:
    model = build("gemma2").train()
    expected = model(**batch())
    engine, _, _, _ = initialize(model=model, config=settings(hf_zero=BOTH))
    with caplog.at_level(logging.WARNING, logger="hf_zero"):
        found = engine(**batch())
        assert isinstance(found.logits, DeferredLogits) and found.logits.shape == expected.logits.shape
        assert not warnings(caplog)
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits.argmax(-1), expected.logits.argmax(-1))
        torch.testing.assert_close(torch.softmax(found.logits, -1), torch.softmax(expected.logits, -1))
        torch.testing.assert_close(engine(input_ids=batch()["input_ids"]).logits, expected.logits)
    texts = warnings(caplog)
    assert len(texts) == 2 and "all logits are computed for argmax()" in texts[0] and "gets no labels" in texts[1]
    engine.eval()
    torch.testing.assert_close(engine(**batch()).logits, expected.logits)
    engine.destroy()
    assert "forward" not in vars(model.lm_head) and "_loss_function" not in vars(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", ["smoothed", "own"])
def test_losses_that_the_model_does_not_compute(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Trainer's label smoothing removes the labels; a user's own loop may ignore the model's loss."""
    model = build("llama").train()
    values = batch()
    smoother = LabelSmoother(epsilon=0.1)

    def loss_of(forward: Any) -> Tensor:
        if kind == "smoothed":
            outputs = forward(input_ids=values["input_ids"])
            return smoother(outputs, values["labels"], shift_labels=True)
        logits = forward(**values).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), values["labels"][:, 1:].flatten())

    (expected := loss_of(model)).backward()
    gradients = [value.grad for value in model.parameters()]
    model.zero_grad(set_to_none=True)
    engine, _, _, _ = initialize(model=model, config=settings(hf_zero=BOTH))
    with caplog.at_level(logging.WARNING, logger="hf_zero"):
        loss = loss_of(engine)
    assert any("saves no memory here" in text for text in warnings(caplog))
    torch.testing.assert_close(loss, expected)
    engine.backward(loss)
    for value, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(safe_get_full_grad(value), gradient)
    engine.destroy()


@pytest.mark.slow
def test_compiled() -> None:
    """Tiles run outside the graphs; the rest is compiled."""
    losses = []
    for tiled in (BOTH, {}):
        model = build("llama").train()
        engine, _, _, _ = initialize(model=model, config=settings(hf_zero=tiled))
        engine.compile(backend="aot_eager")
        loss = engine(**batch()).loss
        engine.backward(loss)
        losses.append((loss.detach(), [safe_get_full_grad(value) for value in model.parameters()]))
        engine.destroy()
    torch.testing.assert_close(losses[0], losses[1])


def test_which_modules_are_dense_mlps() -> None:
    assert [name for name, _ in dense_mlps(build("qwen3-moe"))] == ["model.layers.0.mlp"]
    assert len(dense_mlps(build("gpt2"))) == len(dense_mlps(build("llama"))) == 2
    convolution = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4))
    assert not is_dense_mlp(convolution) and not is_dense_mlp(nn.Linear(4, 4))
    assert is_dense_mlp(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))


@pytest.mark.parametrize(
    ("kind", "of_layer", "last"),
    [
        ("llama", ("input_layernorm", "post_attention_layernorm"), "model.norm"),
        ("gpt2", ("ln_1", "ln_2"), "transformer.ln_f"),
    ],
)
def test_norms_are_tiled_with_the_mlps(kind: str, of_layer: tuple[str, str], last: str) -> None:
    model = build(kind)
    found = norms_of_tokens(model)
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    assert [name.rpartition(".")[2] for name, _, _ in found] == [*(of_layer * layers), last.rpartition(".")[2]]
    assert found[-1][0] == last and {width for *_, width in found} == {hidden}
    engine = initialize(model=model, config={"train_batch_size": 1, "hf_zero": {"tiled_mlp": True}})[0]
    assert all("forward" in vars(norm) for _, norm, _ in found)
    engine.destroy()
    assert not any("forward" in vars(norm) for _, norm, _ in found)


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)hf_zero\.tiled_mlp.*MixtralForCausalLM has no dense MLP"):
        initialize(model=build("mixtral"), config=settings(hf_zero=BOTH))
    classifier = tf.LlamaForSequenceClassification(tf.LlamaConfig(**LLAMA))
    with pytest.raises(ConfigError, match=r"hf_zero\.tiled_loss = true"):
        initialize(model=classifier, config=settings(hf_zero=BOTH))
    with pytest.raises(ConfigError, match="(?s)tiled_loss.*distillation"):
        teacher = {"tiled_loss": True, "distillation": {"teacher": "nowhere"}}
        initialize(model=build("llama"), config=settings(hf_zero=teacher))
    model = build("llama")
    model.loss_function = nn.functional.cross_entropy
    with pytest.raises(ConfigError, match="(?s)tiled_loss.*computes its loss with cross_entropy"):
        initialize(model=model, config=settings(hf_zero=BOTH))


def test_a_tile_holds_a_gibibyte_of_logits_at_most() -> None:
    loss_module.TILE_TOKENS = 1024
    assert loss_tile_tokens(128256, 4096) == 2092 and loss_tile_tokens(2000, 64) == 1024
    assert tiled_loss_of.__doc__


# --- ranks -------------------------------------------------------------------------------------------------------

# Including the kind of checkpointing that TRL uses with adapters at stage 3.
CASES = ((0, False), (1, False), (2, False), (3, False), (3, True))


def run_stages(rank: int) -> dict[str, Any]:
    """By case and whether tiled: losses, weights and gathers of one update with two micro-batches."""
    found: dict[str, Any] = {}
    with small():
        for stage, reentrant in CASES:
            for tiled in (True, False):
                zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}
                found[f"{stage} {reentrant} {tiled}"] = _run_stage(rank, zero, BOTH if tiled else {}, reentrant)
    return found


def _run_stage(rank: int, zero: dict[str, Any], tiled: dict[str, bool], reentrant: bool) -> Any:
    model = build("tied llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    engine, _, _, _ = initialize(
        model=model, config=settings(gradient_accumulation_steps=2, hf_zero=tiled, zero_optimization=zero)
    )
    losses = []
    ledger.reset()
    for seed in (1, 2):
        # Ranks have different numbers of tokens, and so of tiles.
        values = {name: value[:, : LENGTH - 20 * rank] for name, value in batch(seed=seed + 2 * rank).items()}
        loss = engine(**values).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    calls = calls_and_bytes()
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return losses, weights, calls


def test_two_ranks_at_every_stage() -> None:
    for found in run_ranks(run_stages, 2):
        for stage, reentrant in CASES:
            tiled, plain = found[f"{stage} {reentrant} True"], found[f"{stage} {reentrant} False"]
            torch.testing.assert_close(tiled[0], plain[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(tiled[1], plain[1], rtol=1e-5, atol=1e-6)
            assert tiled[2] == plain[2], f"stage {stage}: other collectives"
