"""The model of a plan, on the meta device: shapes and dtypes without values."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_zero.comm.parts import held_part, whole_shape
from hf_zero.config import ConfigError, ModelView, Problem
from hf_zero.config.extras import service
from hf_zero.config.schema.long_sequences import LOSS_BYTES
from hf_zero.explain.views import config_file
from hf_zero.features import Features, Progress, TrainingFeature, text_config, unwrapped
from hf_zero.params.gathered_modules import GatheredModule, find_gathered_modules
from hf_zero.planning import collector_off, llama
from hf_zero.planning.packed import PackedBase, num_weights, pack_base, scale_bytes
from hf_zero.planning.trace import FEW, AbsentRanks, ModelTrace, NotAlike, Segment, Ulysses, stretch, trace_step
from hf_zero.precision import is_packed, with_scales
from hf_zero.quantities import count_of
from hf_zero.sequence.attention import check_config, check_model
from hf_zero.tensor.shard import cut_model
from hf_zero.tiling.functions import TiledMLPs, dense_mlps
from hf_zero.tiling.loss import TiledLoss, has_tiled_loss

_VOCABULARY = 32_000
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class TilingChoice:
    """Which of `hf_zero.tiled_mlp` and `hf_zero.tiled_loss` are on."""

    mlp: bool = False
    loss: bool = False

    @classmethod
    def that_fits(cls, module: nn.Module) -> TilingChoice:
        """Both, if the model supports them. A sharded head gathers its logits before the loss, so a tiled loss saves
        nothing there."""
        base: Any = unwrapped(module)
        head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
        is_whole = all(held_part(parameter) is None for parameter in head.parameters()) if head is not None else True
        return cls(mlp=bool(dense_mlps(module)), loss=is_whole and has_tiled_loss(base))

    def features(self, module: nn.Module) -> Features:
        made: list[TrainingFeature] = [TiledMLPs(module)] if self.mlp else []
        return Features(made + ([TiledLoss(unwrapped(module))] if self.loss else []))


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A model without weights, which is built from the other fields.

    Attributes:
        config: config of transformers, or the shape of a Llama.
        lora_rank: 0: all parameters are trained.
        tensor_size: ranks that share each matrix; `module` is the part of the first one, which is the largest.
        expert_size: ranks that experts are distributed over; `module` has those of the first one.
        base: how the layers that have adapters are stored; None: in `dtype`.
        notes: assumptions.
        module: one rank's part, on the meta device, in the dtype of the training, with LoRA adapters.

    Raises:
        ConfigError: it cannot be cut for `tensor_size` ranks, or its experts distributed over `expert_size`.
    """

    name: str
    config: Any
    dtype: torch.dtype
    lora_rank: int = 0
    tensor_size: int = 1
    expert_size: int = 1
    base: PackedBase | None = None
    notes: tuple[str, ...] = ()
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "module", self._build())

    def _build(self) -> nn.Module:
        config, is_plain = self.config, isinstance(self.config, llama.LlamaShape)
        if is_plain and (self.lora_rank or self.tensor_size > 1 or self.expert_size > 1):
            config, is_plain = _transformers_config(config.to_dict()), False  # these need transformers' own modules
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = llama.LlamaForCausalLM(config) if is_plain else build_model(config, self.lora_rank)
            model = model.to(self.dtype)
        if self.base is not None:
            if self.tensor_size > 1 or self.expert_size > 1:
                rule = "ranks cannot share quantized matrices or experts; stage 3 shards them"
                fix = "leave it out, or set the sizes of groups to 1"
                raise ConfigError(Problem("--base-bits", self.base.bits, rule, fix))
            pack_base(model, self.base)
        try:
            if self.tensor_size > 1:
                cut_model(model, AbsentRanks(self.tensor_size))
        except ValueError as error:
            fix = "give another number, or leave it out: stage 3 shards the same matrices"
            raise ConfigError(Problem("--tensor-parallel", self.tensor_size, str(error), fix)) from None
        try:
            if self.expert_size > 1:
                service("spread_experts")(model, AbsentRanks(self.expert_size), torch.device("meta"))
        except ValueError as error:
            fix = "give another number, or leave it out"
            raise ConfigError(Problem("--expert-parallel", self.expert_size, str(error), fix)) from None
        return model

    @cached_property
    def whole(self) -> tuple[int, int]:
        """(number of parameters, number of trained ones) of the whole model."""
        return _totals(
            (num_weights(p) if is_packed(p) else torch.Size(whole_shape(p)).numel(), p.requires_grad)
            for p in self.module.parameters()
        )

    @cached_property
    def gathered_modules(self) -> tuple[GatheredModule, ...]:
        """The modules around which stage 3 gathers parameters."""
        return tuple(find_gathered_modules(self.module))

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters on one rank, before ZeRO shards them."""
        return sum(map(num_weights, self.module.parameters()))

    @cached_property
    def num_stored(self) -> int:
        """Number of elements of `dtype` that need as many bytes as these parameters, and scales that can be sharded."""
        return sum(each.nbytes for each in with_scales(self.module.parameters())) // self.dtype.itemsize

    @cached_property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)

    @cached_property
    def num_frozen_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.module.parameters() if not parameter.requires_grad)

    @cached_property
    def apart(self) -> tuple[int, int]:
        """(number of expert parameters, number of trained ones); they are sharded over ranks with the same experts."""
        return _totals((p.numel(), p.requires_grad) for p in self.module.parameters() if is_apart(p))

    def buffer_bytes(self, *, shards_scales: bool) -> int:
        """Bytes of buffers, and of scales that are whole on every rank as well."""
        buffers = sum(buffer.nbytes for buffer in self.module.buffers())
        return buffers + scale_bytes(self.module, are_sharded=shards_scales)

    @cached_property
    def view(self) -> ModelView:
        shapes = tuple(whole_shape(parameter) for parameter in self.module.parameters())
        return ModelView(config=self.config.to_dict(), shapes=shapes)

    @property
    def layers(self) -> int:
        return int(getattr(text_config(self.config), "num_hidden_layers", 0) or 1)

    @property
    def heads(self) -> tuple[int, int, int]:
        """(number of query heads, number of key heads, size of a head)."""
        config = text_config(self.config)
        heads = int(getattr(config, "num_attention_heads", 0) or 1)
        key_heads = int(getattr(config, "num_key_value_heads", 0) or heads)
        return heads, key_heads, int(getattr(config, "head_dim", 0) or self.hidden // heads)

    @property
    def hidden(self) -> int:
        return int(getattr(text_config(self.config), "hidden_size", 0) or 1)

    def check_shares(self, sequence_size: int) -> None:
        """
        Raises:
            ConfigError: this number of ranks cannot share its sequences.
        """
        try:
            if sequence_size > 1 and isinstance(self.config, llama.LlamaShape):
                check_config(self.config, sequence_size)
            elif sequence_size > 1:
                check_model(unwrapped(self.module), sequence_size)
        except ValueError as error:
            fix = "give another number, or leave it out"
            raise ConfigError(Problem("--sequence-parallel", sequence_size, str(error), fix)) from None

    def cut(self, tensor_size: int) -> PlannedModel:
        """Return the model cut for `tensor_size` ranks.

        Raises:
            ConfigError: it cannot be cut for that many ranks.
        """
        return replace(self, tensor_size=tensor_size)


def load_model(
    source: str,
    precision: str = "bf16",
    lora_rank: int = 0,
    tensor_size: int = 1,
    expert_size: int = 1,
    base: PackedBase | None = None,
) -> PlannedModel:
    """Load a model from a folder, a config.json, a hub name (with the cached config.json, if any), or a number of
    parameters (`7e9`, `70b`), which gives a Llama of about that size.

    Raises:
        ConfigError: the source is none of these, or the model cannot be built from its config, cut for `tensor_size`
            ranks, or its experts distributed over `expert_size` ranks.
    """
    count = count_of(source)
    note = f"{source} parameters: a Llama of that size is assumed; give a config.json for the layout of your model"
    notes = (*[note] * bool(count), *([] if base is None else [str(base)]))
    try:
        with collector_off():
            config = _llama_of(count) if count else config_of(source)
            return PlannedModel(source, config, _DTYPES[precision], lora_rank, tensor_size, expert_size, base, notes)
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(Problem("--lora-rank", lora_rank, str(error), "pip install peft")) from None
    except (ValueError, AttributeError, KeyError, RuntimeError, TypeError) as error:
        rule = f"its class cannot be built from this configuration: {error}"
        raise ConfigError(Problem("--model", source, rule, "give another model, or its number of parameters")) from None


def _totals(numels: Iterable[tuple[int, bool]]) -> tuple[int, int]:
    """(sum of all, sum of the trained ones) of (number of elements, whether it is trained)."""
    pairs = list(numels)
    return sum(numel for numel, _ in pairs), sum(numel for numel, is_trained in pairs if is_trained)


def is_apart(parameter: nn.Parameter) -> bool:
    """Whether its states are sharded over their own groups of ranks (experts)."""
    part = held_part(parameter)
    return part is not None and part.is_mixed


def trace(
    model: PlannedModel,
    *,
    micro_batch: int,
    length: int,
    checkpointing: bool,
    tiling: TilingChoice = TilingChoice(),
    sequence_size: int = 1,
    on_cpu: bool = False,
) -> ModelTrace:
    """Trace one micro-batch: a few layers if all are equal, else all; a formula if a model's shapes depend on values.

    Args:
        length: tokens per sample, which `sequence_size` ranks share.
        on_cpu: the model will run on CPUs.
    """
    ulysses, length = Ulysses(sequence_size, model.heads[1]), -(-length // sequence_size)

    def run(module: nn.Module) -> ModelTrace:
        if checkpointing:
            _enable_checkpointing(module)
        inputs = sample_inputs(module, micro_batch, length, torch.device("meta"))
        gathered = {each.name: each.module for each in find_gathered_modules(module)}
        inputs = tiling.features(module).before_forward(Progress(0), inputs)
        return trace_step(module, inputs, gathered, ulysses, on_cpu=on_cpu)

    try:
        # Built again, because a trace may have enabled gradient checkpointing.
        seen = _from_few_layers(model, run) or run(replace(model, config=copy.deepcopy(model.config)).module)
    except Exception as error:  # noqa: BLE001  # anything that a model raises for tensors without values
        reason = str(error).split("\n")[0]
        seen = _by_formula(model, micro_batch * length, checkpointing, reason, ulysses)
    # Attention holds as much as on one rank, plus key heads that several ranks have; buffers of its messages are freed
    # before the layer's peak.
    copied = micro_batch * length * ulysses.copied_heads * 2 * model.heads[2] * model.dtype.itemsize
    copied *= 1 if checkpointing else model.layers
    return replace(seen, segments=tuple(replace(each, peak=each.peak + copied) for each in seen.segments))


def _from_few_layers(model: PlannedModel, run: Callable[[nn.Module], ModelTrace]) -> ModelTrace | None:
    layers = getattr(text_config(model.config), "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= FEW + 2:
        return None
    try:
        small = _with_layers(model, FEW)
        prefix = _layer_prefix(small)
        return stretch(run(small), layers, prefix)
    except Exception:  # noqa: BLE001  # the model is built differently: trace all layers
        return None


def _enable_checkpointing(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        if hasattr(model, "enable_input_require_grads") and not _trains_embeddings(model):
            model.enable_input_require_grads()  # type: ignore[operator]  # as Trainer and peft do


def sample_inputs(model: nn.Module, micro_batch: int, length: int, device: torch.device) -> dict[str, Any]:
    """Return inputs for a forward with a loss: tokens, images, spectrograms or audio, depending on the model's class.

    Args:
        length: tokens of text, or samples of audio; the config sets the size of images and spectrograms.
    """
    base: Any = unwrapped(model)
    config, kind = base.config, base.main_input_name
    shapes = {
        "pixel_values": lambda: (config.num_channels, *_extents(config.image_size)),
        "input_features": lambda: (config.num_mel_bins, 2 * config.max_source_positions),
        "input_values": lambda: (length,),
    }
    tokens = torch.zeros(micro_batch, length, dtype=torch.long, device=device)
    inputs: dict[str, Any] = {kind: tokens}
    if kind in shapes:
        inputs[kind] = torch.zeros(micro_batch, *shapes[kind](), dtype=base.dtype, device=device)
    classes = ("SequenceClassification", "ImageClassification")
    inputs["labels"] = tokens[:, 0].clone() if type(base).__name__.endswith(classes) else tokens
    if "use_cache" in config.to_dict():
        inputs["use_cache"] = False
    return inputs


def _extents(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _trains_embeddings(model: nn.Module) -> bool:
    try:
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:  # for example a model with audio inputs
        return True
    return any(parameter.requires_grad for parameter in embeddings.parameters())


def _by_formula(model: PlannedModel, tokens: int, checkpointing: bool, reason: str, ulysses: Ulysses) -> ModelTrace:
    """Estimate activations: 34 bytes per token, layer and hidden unit (Korthikanti et al. 2022, arXiv 2205.05198,
    without scores, which fused attention does not keep). 24 of them are inside attention and MLP, which tensor
    parallelism divides. With checkpointing, 2 bytes plus one whole layer. Logits in 16 bits, in fp32, and their
    gradient."""
    hidden, layers = model.hidden, model.layers
    vocabulary = int(getattr(text_config(model.config), "vocab_size", 0) or 0)
    layer = (10 + 24 // model.tensor_size) * tokens * hidden
    saved = (2 * tokens * hidden * layers + layer) if checkpointing else layer * layers
    saved += (2 + LOSS_BYTES) * tokens * vocabulary
    forward = 2.0 * model.num_parameters * tokens
    backward = forward * (1 + model.num_trained / max(1, model.num_parameters) + checkpointing)
    sent = dict(_sent_by_formula(model, tokens, ulysses))
    again = tuple((operation, size * (1 + checkpointing)) for operation, size in sent.items())
    segments = (
        Segment("begin", "", saved, forward, tuple(sent.items())),
        Segment("loss", "", saved, backward, again),
    )
    return ModelTrace(segments, f"activations are from a formula, since the model needs values to run ({reason[:120]})")


def _sent_by_formula(model: PlannedModel, tokens: int, ulysses: Ulysses) -> Iterator[tuple[str, int]]:
    """Yield the messages of one pass over all layers: with tensor parallelism, all-reduces after attention and MLP."""
    if model.tensor_size > 1:
        yield "all_reduce", 2 * model.layers * tokens * model.hidden * model.dtype.itemsize
    heads, _, extent = model.heads
    if ulysses.size > 1:
        yield "all_to_all", model.layers * ulysses.message_bytes(tokens, heads, 2 * extent, model.dtype.itemsize)


# Building


def build_model(config: Any, lora_rank: int = 0) -> nn.Module:
    import transformers

    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    model: nn.Module = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
    model.train()
    return _with_lora(model, lora_rank) if lora_rank else model


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))


def _with_layers(model: PlannedModel, layers: int) -> nn.Module:
    config = copy.deepcopy(model.config)
    text = text_config(config)
    text.num_hidden_layers = layers
    kinds = getattr(text, "layer_types", None)
    if kinds and len(set(kinds)) > 1:
        raise NotAlike("layers of several kinds")
    if kinds:
        text.layer_types = list(kinds[:layers])
    return replace(model, config=config).module


def _layer_prefix(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == FEW:
            return f"{name}."
    raise NotAlike("no list of layers")


def config_of(source: str) -> Any:
    """Return transformers' config for a folder, a config.json or a hub name.

    Raises:
        ConfigError: there is no config that can be used.
    """
    path = config_file(source)
    try:
        return _transformers_config(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).split("\n")[0]
        rule = f"its configuration cannot be used: {reason}"
        raise ConfigError(Problem("--model", source, rule, "give a config.json of transformers")) from None


def _transformers_config(values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(values.pop("model_type"), **values)


def _llama_of(count: float) -> llama.LlamaShape:
    """Return the shape of a Llama: hidden size = 128 x layers, as in published models of this kind; the size of the MLP
    follows from `count`."""
    if not 1e5 <= count <= 1e14:
        rule = "the number of parameters must be between 1e5 and 1e14"
        raise ConfigError(Problem("--model", count, rule, "give another number, or a model")) from None
    per_head = 128 if count >= 1e9 else 64
    wanted = (count * 128 / 12) ** (1 / 3)
    hidden = max(per_head, round(wanted / per_head) * per_head)
    vocabulary = _VOCABULARY if count >= 2e8 else max(256, round(count / 8 / hidden))
    layers = max(1, round((count - 2 * vocabulary * hidden) / (12 * hidden**2)))
    rest = (count - 2 * vocabulary * hidden) / layers - 4 * hidden**2
    return llama.LlamaShape(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=max(16, round(rest / (3 * hidden))),
        num_hidden_layers=layers,
        num_attention_heads=hidden // per_head,
        num_key_value_heads=hidden // per_head,
    )
