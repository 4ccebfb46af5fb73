"""PEFT adapters with tensor parallelism: gradients and training equal those of one process with whole matrices."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import nn

from hf_zero.comm import LoneCollectives
from hf_zero.comm.parts import held_part, whole_value
from hf_zero.features import unwrapped
from hf_zero.tensor.adapters import layer_in
from hf_zero.tensor.groups import TensorGroups, tp_model_init
from hf_zero.tensor.shard import shard_model
from tests.support.one_process import assert_small, batches
from tests.support.ranks import run_ranks
from tests.tensor.lora import ATTENTION, adapted, lora, with_noise
from tests.tensor.models import model_of
from tests.tensor.plans import build, compare_models, inputs_for, planned
from tests.tensor.threads import ThreadCollectives, in_threads
from tests.tensor.training import compare

GRADIENT, TOLERANCE = 3e-5, 1e-5
KINDS = ("llama", "uneven", "gpt2", "qwen2", "qwen3", "phi3", "mixtral")
CPU = torch.device("cpu")

HEAD_AND_EMBEDDING = ["embed_tokens", "lm_head", "q_proj"]
# Models, and their adapters other than plain LoRA on all linear layers.
OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("uneven", {"use_dora": True}),
    "DoRA of fused matrices": ("gpt2", {"use_dora": True}),
    "DoRA of whole keys": ("qwen3", {"use_dora": True}),
    "DoRA of packed matrices": ("phi3", {"use_dora": True}),
    "biases": ("uneven", {"lora_bias": True}),
    "biases of fused matrices": ("gpt2", {"lora_bias": True}),
    "by the root of the rank": ("llama", {"use_rslora": True}),
    "attention only": ("llama", {"target_modules": ATTENTION}),
    "experts": ("mixtral", {"target_modules": "all-linear", "lora_dropout": 0.0}),
    "what is trained whole": ("llama", {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "copies of what is tied": ("qwen3", {"modules_to_save": ["lm_head", "embed_tokens", "q_norm"]}),
    "embedding and head": ("llama", {"target_modules": HEAD_AND_EMBEDDING}),
    "embedding and head, DoRA": ("llama", {"target_modules": HEAD_AND_EMBEDDING, "use_dora": True}),
    "tied embedding and head": ("qwen3", {"target_modules": HEAD_AND_EMBEDDING}),
    "single tokens": ("llama", {"trainable_token_indices": [1, 5, 9]}),
    "single tokens, tied": ("qwen3", {"trainable_token_indices": [1, 5, 9]}),
}
OF_OTHER_TYPES = (
    PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM", encoder_hidden_size=16),
    TrainableTokensConfig(token_indices=[1, 5, 9], target_modules=["embed_tokens"], task_type="CAUSAL_LM"),
)


def _check(model: nn.Module, size: int) -> None:
    loss, gradient, later = compare_models(model, batches(1)[0], size)
    assert loss < TOLERANCE and gradient < GRADIENT and later < TOLERANCE, (loss, gradient, later)


@pytest.mark.parametrize("why", ["DoRA", "experts", "what is trained whole", "embedding and head", "single tokens"])
def test_gradients_of_two_ranks(why: str) -> None:
    kind, more = OTHERWISE[why]
    _check(adapted(kind, **more), 2)


@pytest.mark.parametrize("config", OF_OTHER_TYPES, ids=lambda each: each.peft_type.value)
def test_adapters_of_other_types(config: Any) -> None:
    _check(adapted("uneven", config), 2)


def test_adapters_that_transformers_puts_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.add_adapter` leaves a model of transformers, not one of PEFT.

    transformers 5.24 requires PEFT 0.22 there before its release; this test does not need it.
    """
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model: Any = model_of("qwen2")
    torch.manual_seed(8)
    model.add_adapter(lora("qwen2", task_type=None))
    _check(with_noise(model), 2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients(size: int) -> None:
    for kind in KINDS:
        _check(adapted(kind), size)
    for kind, more in OTHERWISE.values():
        _check(adapted(kind, **more), size)
    for config in OF_OTHER_TYPES:
        _check(adapted("uneven", config), size)


# PEFT itself fails with all linear layers of these models, or with DoRA of experts in one tensor.
NOT_OF_PEFT = {
    "DeepseekV4": "linear layers in groups",
    "FalconH1": "Mamba's output",
    "Llama4": "routers that are linear layers",
    "Llama4Text": "the same",
    "NemotronH": "Mamba's output",
    "Phimoe": "routers that are linear layers",
}
REFUSED = ("does not hold", "does not work with use_dora", "cuts nothing", "(tp_plan) that cuts layers")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("size", "more"), [(2, {}), (4, {}), (2, {"use_dora": True})])
def test_everything_linear_of_every_plan(size: int, more: dict[str, Any]) -> None:
    found = {}
    for each in planned():
        whole = build(each)
        inputs = inputs_for(each, whole)
        try:
            model = get_peft_model(whole, lora("", task_type=None, **more))  # type: ignore[arg-type]
            loss, gradient, later = compare_models(with_noise(model), inputs, size)
            if math.isnan(loss + later) or loss > 1e-5 or later > 1e-4 or gradient > 3e-4:
                found[each.name] = f"differs: {loss}, {gradient}, {later}"
        except Exception as error:  # noqa: BLE001  (all are told at once)
            found[each.name] = f"{type(error).__name__}: {error}"
    for words in REFUSED:
        found = {name: why for name, why in found.items() if words not in why and name not in NOT_OF_PEFT}
    assert found == {}


def test_another_adapter_chosen_after_the_cut() -> None:
    """Parameters that were frozen when the model was partitioned must also have their gradients summed."""
    model = adapted("qwen3")
    model.add_adapter("second", lora("qwen3", r=3))  # type: ignore[operator]
    models = [copy.deepcopy(model) for _ in range(2)]
    batch = batches(1)[0]

    def gradients(each: Any) -> dict[str, torch.Tensor]:
        each.set_adapter("second")
        each(**batch).loss.backward()
        found = {}
        for name, parameter in each.named_parameters():
            if parameter.requires_grad:
                part = held_part(parameter)
                found[name] = parameter.grad if part is None else part.whole(parameter.grad)
        return found

    def body(group: ThreadCollectives) -> dict[str, torch.Tensor]:
        shard_model(models[group.rank], group, CPU)
        return gradients(models[group.rank])

    expected = gradients(model)
    for found in in_threads(body, 2):
        assert found.keys() == expected.keys() and all("second" in name for name in found)
        worst = max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())
        assert worst < GRADIENT


@pytest.mark.parametrize("why", ["DoRA", "biases of fused matrices", "experts"])
def test_merging_into_parts(why: str) -> None:
    kind, more = OTHERWISE[why]
    model: Any = adapted(kind, **more).eval()
    models = [copy.deepcopy(model) for _ in range(2)]
    batch = batches(1)[0]
    with torch.no_grad():
        before = model(**batch).logits

    def body(group: ThreadCollectives) -> tuple[float, float]:
        mine: Any = models[group.rank]
        shard_model(mine, group, CPU)
        with torch.no_grad():
            mine.merge_adapter()
            merged = mine(**batch).logits
            weights = {name: whole_value(p, p).clone() for name, p in mine.named_parameters()}
            mine.unmerge_adapter()
            again = mine(**batch).logits
        with pytest.raises(ValueError, match="merged and unloaded"):
            mine.merge_and_unload()
        shard_model(mine, group, CPU)  # has been done
        worst = max((weights[name] - value).abs().max().item() for name, value in expected.items())
        return worst, max((found - before).abs().max().item() for found in (merged, again))

    reference = copy.deepcopy(model)
    reference.merge_adapter()
    expected = {name: value.detach() for name, value in reference.named_parameters()}
    assert max(max(found) for found in in_threads(body, 2)) < TOLERANCE


def _train(rank: int, tensor: int, world: int, cases: Any, stages: tuple[int, ...], steps: int) -> dict[str, Any]:
    return {
        f"{kind}, {more}, stage {stage}": compare(rank, adapted(kind, **more), stage, tensor, world=world, steps=steps)
        for (kind, more), stage in itertools.product(cases, stages)
    }


def _check_training(tensor: int, world: int, cases: Any, stages: tuple[int, ...], steps: int) -> None:
    assert_small(run_ranks(_train, world, tensor, world, cases, stages, steps, timeout_s=280))


DROPS = {"lora_dropout": 0.3}


def test_two_ranks_train_as_one_process() -> None:
    """Including dropout: ranks draw for the whole input, of which they have parts of different sizes."""
    _check_training(2, 2, [("gpt2", DROPS), ("uneven", {**DROPS, "use_dora": True})], (3,), 3)


@pytest.mark.slow  # two ranks test this kind's gradients, test_parity.py tests more ranks
def test_four_ranks_train_as_one_process() -> None:
    _check_training(2, 4, [("mixtral", {"target_modules": "all-linear"})], (0, 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tensor", "world"), [(2, 2), (4, 4), (2, 4)])
def test_every_kind_trains_as_one_process(kind: str, tensor: int, world: int) -> None:
    _check_training(tensor, world, [(kind, {})], (0, 1, 2, 3), 12)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_adapter_trains_as_one_process(tensor: int, stage: int) -> None:
    _check_training(tensor, tensor, [(kind, {**DROPS, **more}) for kind, more in OTHERWISE.values()], (stage,), 4)


def _otherwise(rank: int, kind: str, steps: int) -> dict[str, Any]:
    checkpointed: Any = adapted(kind)
    checkpointed.enable_input_require_grads()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    more: dict[str, Any] = {"world": 2, "steps": steps}
    return {
        "three accumulated": compare(rank, adapted(kind), 2, 2, accumulated=3, **more),
        "optimizer on the host": compare(
            rank, adapted(kind), 2, 2, zero_optimization=offload, zero_force_ds_cpu_optimizer=False, **more
        ),
        "checkpointed": compare(rank, checkpointed, 3, 2, **more),
        "bf16": compare(rank, adapted(kind), 1, 2, bf16={"enabled": True}, **more),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uneven", "gpt2", "mixtral"])
def test_accumulation_offload_checkpointing_and_bf16(kind: str) -> None:
    both = run_ranks(_otherwise, 2, kind, 10)
    assert both[0] == both[1]
    assert_small([{"bf16": found.pop("bf16")} for found in both], 0.1)
    assert_small(both)


def _refused(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shard_model(model, LoneCollectives(), CPU)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    common: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    _refused(adapted("llama", IA3Config(**common)), "adapter 'default' has type IA3; train LoRA, or remove")
    _refused(adapted("llama", PrefixTuningConfig(num_virtual_tokens=2, **common)), "'default' has type PREFIX_TUNING")
    injected = inject_adapter_in_model(IA3Config(target_modules=["k_proj"], feedforward_modules=[]), model_of("llama"))
    del injected.peft_config
    _refused(injected, r"layers.0.self_attn.k_proj: .* this is PEFT's Linear; leave it out")
    variant = adapted("llama", target_modules=["q_proj"], init_lora_weights="mica")
    _refused(variant, "q_proj: .* adapter 'default' is another variant .MiCALinearVariant.")
    _refused(
        adapted("llama", target_modules=["q_proj"], modules_to_save=["mlp"]),
        r"layers.0.mlp: PEFT's ModulesToSaveWrapper wraps matrices .*mlp.gate_proj.; leave it out",
    )
    quantized = model_of("llama")
    query: Any = quantized.get_submodule("model.layers.0.self_attn.q_proj")
    query.weight = nn.Parameter(query.weight.detach().to(torch.int8), requires_grad=False)
    _refused(quantized, "q_proj.weight is, in torch.int8: load the model without quantization_config")
    parameter = adapted("llama", target_modules=[], target_parameters=["self_attn.q_proj.weight"])
    _refused(parameter, "q_proj: .* this is PEFT's ParamWrapper")


def test_adapters_put_around_parts_are_refused() -> None:
    model = model_of("llama")
    shard_model(model, LoneCollectives(), CPU)
    _refused(get_peft_model(model, LoraConfig(target_modules=ATTENTION)), "each rank only holds a part")  # type: ignore[arg-type]


def test_a_model_noted_before_peft_stood_around_it() -> None:
    model = tp_model_init(model_of("llama"), tp_size=1, dtype=torch.float32)
    around = get_peft_model(model, lora("llama"))  # type: ignore[arg-type]
    assert unwrapped(around) is model and TensorGroups.given(around) is None
    query = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer_in(query) is query.get_submodule("base_layer") and layer_in(model) is model
