"""Tiny versions of all models of transformers with a tensor-parallel plan, compared partitioned and whole."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import transformers.models
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_zero.comm.parts import held_part, whole_shape
from hf_zero.tensor.shard import shard_model
from tests.tensor.peculiar import CLASSES, INPUTS, MORE
from tests.tensor.threads import ThreadCollectives, in_threads

VOCABULARY, LENGTH, RATE = 64, 12, 0.05
# Attributes of configs that have them. Sizes are even, and rows a multiple of 16 bytes for grouped products.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 64, "moe_k": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4, "first_k_dense_replace": 1, "hidden_act_param": 1,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "linear_num_heads": 4,
    "linear_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16,
    "mamba_d_state": 16, "mamba_dt_rank": 8, "n_groups": 1, "sliding_window_size": 8,
}  # fmt: skip
MLA_SIZES = {"num_key_value_heads": 4, "qk_head_dim": 24}  # every query head has its own key


@dataclass(frozen=True)
class Planned:
    """A config class with its own plan, and the model that is trained for it."""

    name: str
    config: type[PreTrainedConfig]

    def model_class(self) -> type[PreTrainedModel]:
        """The class that computes a loss, if there is one, else the base model."""
        if self.name in CLASSES:
            return getattr(transformers, CLASSES[self.name], None) or self._inner(CLASSES[self.name])
        package = self.config.__module__.rpartition(".")[0]
        found: list[type[PreTrainedModel]] = []
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if module.name.startswith("modeling_"):
                loaded = importlib.import_module(f"{package}.{module.name}")
                found += [each for _, each in inspect.getmembers(loaded, inspect.isclass) if self._is_for(each, loaded)]
        if not found:
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

            return MODEL_FOR_CAUSAL_LM_MAPPING[self.config]
        return min(found, key=_rank_of)

    def _inner(self, name: str) -> type[PreTrainedModel]:
        modeling = importlib.import_module(self.config.__module__.replace("configuration_", "modeling_"))
        found: type[PreTrainedModel] = getattr(modeling, name)
        return found

    def _is_for(self, candidate: type, module: Any) -> bool:
        own = candidate.__module__ == module.__name__ and issubclass(candidate, PreTrainedModel)
        return own and getattr(candidate, "config_class", None) is self.config


def _rank_of(model: type[PreTrainedModel]) -> tuple[int, int]:
    ends = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "TextModel", "Model")
    place = next((i for i, end in enumerate(ends) if model.__name__.endswith(end)), len(ends))
    return place + ("PreTrained" in model.__name__) * 100, len(model.__name__)


def planned(*packages: str) -> Iterator[Planned]:
    """All planned models of these packages of transformers.models, or of all packages, ordered by name."""
    root = transformers.models.__path__[0]
    for package in sorted(packages or (each.name for each in pkgutil.iter_modules([root]))):
        for module in pkgutil.iter_modules([f"{root}/{package}"]):
            if module.name.startswith("configuration_"):
                loaded = importlib.import_module(f"transformers.models.{package}.{module.name}")
                for name, found in sorted(vars(loaded).items()):
                    if inspect.isclass(found) and found.__module__ == loaded.__name__ and _has_plan(found):
                        yield Planned(name.removesuffix("Config"), found)


def _has_plan(found: type) -> bool:
    return issubclass(found, PreTrainedConfig) and bool(vars(found).get("base_model_tp_plan"))


def tiny(config: type[PreTrainedConfig], more: dict[str, Any]) -> PreTrainedConfig:
    """`config` with the applicable SIZES, `more`, and without dropout."""
    names = set(inspect.signature(config.__init__).parameters) | set(getattr(config, "__dataclass_fields__", {}))
    names |= set(config.attribute_map)
    sizes = SIZES | (MLA_SIZES if "kv_lora_rank" in names else {}) | more
    chosen = {config.attribute_map.get(name, name): value for name, value in sizes.items() if name in {*names, *more}}
    chosen |= {name: 0.0 for name in names if "dropout" in name or name.endswith("pdrop") or "jitter" in name}
    rope = getattr(config(), "rope_parameters", None) or {}
    if (
        "mrope_section" in {*rope, *getattr(config, "ignore_keys_at_rope_validation", ())}
        and "rope_parameters" not in more
        and not nested(rope)
    ):
        half = int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1) / 2)
        section = [half - 2 * (half // 4), half // 4, half // 4]
        chosen.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0} | rope)
        chosen["rope_parameters"] |= {"mrope_section": section}
    for name, sub in config.sub_configs.items():
        chosen[name] = tiny(sub, MORE.get(sub.__name__.removesuffix("Config"), {}))
    return config(**chosen)


def nested(rope: dict[str, Any]) -> bool:
    """Whether there are rope parameters per type of layer."""
    return any(isinstance(each, dict) for each in rope.values())


def build(each: Planned) -> nn.Module:
    config: Any = tiny(each.config, MORE.get(each.name, {}))
    if each.name == "T5GemmaModule":
        config = transformers.T5GemmaConfig(
            encoder=config, decoder=tiny(each.config, {"is_decoder": True}), dropout_rate=0
        )
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in each.model_class()(config).parameters())
    assert numel < 3e6, f"{each.name} is not tiny: {numel} parameters"
    torch.manual_seed(3)
    model: nn.Module = each.model_class()(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 2:
                parameter.zero_()  # some experts are uninitialized memory
            parameter.add_(torch.randn_like(parameter) * 0.03)
    return model.train()


def inputs_for(each: Planned, model: nn.Module) -> dict[str, Any]:
    """Tokens, and labels if the model computes a loss; or the inputs listed for it, with tokens in place of None."""
    ids = torch.randint(3, VOCABULARY - 8, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    names = {"input_ids": None} | ({"labels": None} if computes_loss(model) else {})
    return {name: ids.clone() if value is None else value for name, value in INPUTS.get(each.name, names).items()}


def computes_loss(model: nn.Module) -> bool:
    return "labels" in inspect.signature(model.forward).parameters


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    outputs = model(**inputs)
    if "labels" in inputs and outputs.loss is not None:
        return outputs.loss
    found = outputs[0]
    generator = torch.Generator().manual_seed(9)
    return (found * torch.randn(found.shape, generator=generator)).mean() * 5


@torch.no_grad()
def _update(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= RATE * parameter.grad


def _two_losses(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, float]:
    """The losses before and after an update; gradients of the first one are kept."""
    first = loss_of(model, inputs)
    first.backward()
    _update(model)
    with torch.no_grad():
        return first.item(), loss_of(model, inputs).item()


def compare(each: Planned, size: int = 2) -> tuple[float, float, float]:
    """Largest relative differences of (the loss, a gradient by the largest of its tensor, the loss after an update).

    Raises:
        AssertionError: nothing is partitioned, or a parameter has no gradient only when partitioned.
    """
    whole = build(each)
    return compare_models(whole, inputs_for(each, whole), size)


def compare_models(whole: nn.Module, inputs: dict[str, Any], size: int) -> tuple[float, float, float]:
    """Like `compare`. `whole` is trained by it."""
    models = [copy.deepcopy(whole) for _ in range(size)]
    plain = _two_losses(whole, inputs)
    expected = dict(whole.named_parameters())

    def body(group: ThreadCollectives) -> tuple[float, float, float]:
        model = models[group.rank]
        shard_model(model, group, torch.device("cpu"))
        assert any(held_part(parameter) is not None for parameter in model.parameters()), "nothing is cut"
        first, second = _two_losses(model, copy.deepcopy(inputs))
        worst = max(_difference(name, p, expected[name]) for name, p in model.named_parameters())
        return _relative(first, plain[0]), worst, _relative(second, plain[1])

    losses, gradients, later = zip(*in_threads(body, size), strict=True)
    return max(losses), max(gradients), max(later)


def _relative(found: float, plain: float) -> float:
    return abs(found - plain) / (1 + abs(plain))


def _difference(name: str, parameter: nn.Parameter, plain: nn.Parameter) -> float:
    assert tuple(plain.shape) == whole_shape(parameter)
    if parameter.grad is None or plain.grad is None:
        assert parameter.grad is None and plain.grad is None, f"{name}: has no gradient in one of both"
        return 0.0
    part = held_part(parameter)
    wanted = plain.grad if part is None else part.of(plain.grad)
    return float((parameter.grad - wanted).abs().max() / (plain.grad.abs().max() + 1e-4)) if wanted.numel() else 0.0
