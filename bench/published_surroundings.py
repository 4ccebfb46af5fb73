"""Reproduces in a trace what other programs do while a model runs: adapters, autocast, losses, gathers into buffers.

hf_zero computes in the dtype of the weights. Under autocast weights are in fp32, and operators cast their inputs:
matrix products and convolutions to 16 bits, norms, softmax and losses to fp32
(https://docs.pytorch.org/docs/stable/amp.html). The meta device has no autocast; the casts are done here, and live as
long as autograd keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_zero.planning import model as planned
from hf_zero.planning.memory import Setting

_IN_16_BITS = (
    (nn.functional, "linear"),
    (nn.functional, "conv2d"),
    (torch, "matmul"),
    (torch, "bmm"),
    (torch, "baddbmm"),
    (torch, "addmm"),
)
_IN_FP32 = ((nn.functional, "layer_norm"), (nn.functional, "softmax"), (nn.functional, "cross_entropy"))


SHAPES = ("output_apart", "target_length")
"""Keys of a run: its output is not tied to the input (transformers 5 ties those of all T5); length of its targets."""


@contextmanager
def as_it_ran(run: Mapping[str, Any]) -> Iterator[None]:
    """Patch functions while a run's model is built, traced and planned.

    FSDP2 gathers into a buffer that it copies from (`foreach_all_gather` and `foreach_all_gather_copy_out` in
    _fsdp_collectives.py), and so does DeepSpeed at stage 3 (`_all_gather_dtype` and `AllGatherCoalescedHandle` in
    partition_parameters.py); hf_zero gathers large units where they are used.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Setting, "gathers_directly", False))
        if run["lora_rank"]:
            stack.enter_context(mock.patch.object(planned, "_with_lora", _adding(run)))
        if run.get("output_apart"):
            stack.enter_context(mock.patch.object(planned, "build_model", _apart(planned.build_model)))
        if "target_length" in run:
            stack.enter_context(mock.patch.object(planned, "sample_inputs", _short(run["target_length"])))
        if "loss" in run:
            stack.enter_context(mock.patch.dict(LOSS_MAPPING, {"ForCausalLM": _LOSSES[run["loss"]]}))
        if run.get("copies_attention"):
            stack.enter_context(mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": _copying}))
        if run.get("softmax") == "16 bits":  # as in nn.MultiheadAttention; transformers' eager attention uses fp32
            stack.enter_context(mock.patch.object(nn.functional, "softmax", _narrow(nn.functional.softmax)))
        if run.get("clamps_scores"):
            stack.enter_context(mock.patch.object(nn.functional, "softmax", _clamping(nn.functional.softmax)))
        if run["program"] == "autocast" or run.get("autocast"):
            casts = _Autocast(torch.bfloat16)
            for holder, name in _IN_16_BITS:
                stack.enter_context(mock.patch.object(holder, name, casts.low(getattr(holder, name))))
            for holder, name in _IN_FP32:
                stack.enter_context(mock.patch.object(holder, name, casts.high(getattr(holder, name))))
        yield


def _copying(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """nn.MultiheadAttention, as in torchvision's models: its result is copied to another layout for the last matrix,
    and both are kept."""
    result, scores = sdpa_attention_forward(*args, **kwargs)
    return result.clone(), scores


def _apart(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def made(*args: Any) -> nn.Module:
        model: Any = build(*args)
        output = model.get_output_embeddings()
        output.weight = nn.Parameter(output.weight.detach().clone(), requires_grad=output.weight.requires_grad)
        return model  # type: ignore[no-any-return]

    return made


def _short(length: int) -> Callable[..., dict[str, Any]]:
    sample = planned.sample_inputs

    def made(*args: Any) -> dict[str, Any]:
        inputs = sample(*args)
        return {**inputs, "labels": inputs["labels"][:, :length]}

    return made


def _adding(run: Mapping[str, Any]) -> Callable[[nn.Module, int], nn.Module]:
    """Add adapters to the run's target modules, with its dropout, whose input and mask autograd keeps."""

    def add(model: nn.Module, rank: int) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        targets, dropout = run.get("lora_targets", "all-linear"), run.get("lora_dropout", 0.0)
        adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=targets, lora_dropout=dropout))
        for module in adapted.modules() if run.get("lora_form") == "joint" else ():
            if hasattr(getattr(module, "q_proj", None), "lora_A"):
                _join(module)
            elif hasattr(getattr(module, "query_key_value", None), "lora_A"):
                module.query_key_value.forward = _Joint(module.query_key_value.base_layer, [module.query_key_value])
        return adapted

    return add


class _Joint:
    """LitGPT's `LoRAQKVLinear`: one product for queries, keys and values; attention keeps values, which are a view of
    the whole product. Outputs of the adapters of queries and values are padded with zeros, for which autograd keeps
    them."""

    def __init__(self, base: Callable[[Tensor], Tensor], adapters: Sequence[Any]) -> None:
        self._base, self._adapters = base, adapters

    def __call__(self, x: Tensor) -> Tensor:
        given, added = self._base(x), self._adapters[0].lora_dropout["default"](x)
        added = torch.cat([each.lora_B["default"](each.lora_A["default"](added)) for each in self._adapters], dim=-1)
        width = (x.shape[-1] + given.shape[-1]) // 2  # of queries and values
        rows = added[..., :width].reshape(-1, width).clone()
        zeros = given.new_zeros(rows.shape[0], given.shape[-1])
        index = torch.empty(width, dtype=torch.long, device=x.device)
        return given + zeros.index_copy(1, index, rows).view(given.shape)


def _join(attention: Any) -> None:
    """Make queries, keys and values, which have separate matrices, views of one result."""
    parts = attention.q_proj, attention.k_proj, attention.v_proj
    bases = [getattr(each, "base_layer", each).forward for each in parts]
    joint = _Joint(lambda x: torch.cat([base(x) for base in bases], dim=-1), [parts[0], parts[2]])
    widths = [getattr(each, "base_layer", each).out_features for each in parts]
    views: list[Tensor] = []

    def first(x: Tensor) -> Tensor:
        views[:] = joint(x).split(widths, dim=-1)
        return views.pop(0)

    parts[0].forward = first
    for each in parts[1:]:
        each.forward = lambda _: views.pop(0)


# Losses of other programs: which copies of logits are kept. (transformers today: one copy in fp32, which is freed.)

_held: list[Tensor] = []  # tensors that the training loop holds, of the latest trace


def _copied(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    """transformers 4.48.1 (`ForCausalLMLoss`): a copy in fp32, and another one without the last position."""
    wide = logits.float()
    shifted, following = wide[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.functional.cross_entropy(shifted.view(-1, vocab_size), following.view(-1))


def _in_16_bits(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    """GPTBigCode's loss in transformers 4.48.1: no fp32."""
    shifted, following = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.functional.cross_entropy(shifted.view(-1, vocab_size), following.view(-1))


def _unshifted(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    """minGPT and its descendants, whose labels are shifted in the data: no copy."""
    return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


def _wide(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    """fairseq, whose labels are shifted in the data: log-probabilities in fp32."""
    log_probs = nn.functional.log_softmax(logits, dim=-1, dtype=torch.float32)
    return nn.functional.nll_loss(log_probs.view(-1, vocab_size), labels.view(-1))


class _Listed(torch.autograd.Function):
    """torchtune (`CEWithChunkedOutputLoss`, compiled): logits of eight chunks are kept in 16 bits until backward
    reaches them; nothing else is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.logits = logits
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        shape, like = ctx.logits.shape, ctx.logits.new_empty(0)
        ctx.logits = None
        return like.new_empty(shape)


def _listed(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    result: Tensor = _Listed.apply(logits)
    return result


def _in_chunks(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    """LitGPT (`chunked_cross_entropy`): 128 positions at a time, in 16 bits. Its loop holds logits until the next ones
    exist."""
    _held[:] = [logits]
    pairs = zip(logits[..., :-1, :].split(128, dim=1), labels[..., 1:].split(128, dim=1))
    parts = [
        nn.functional.cross_entropy(some.reshape(-1, vocab_size), following.reshape(-1), reduction="none")
        for some, following in pairs
    ]
    return torch.cat(parts).mean()


def _kept(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    """transformers of early 2024 cast logits to fp32 in the model; the script (fsdp_qlora's train.py) holds the model's
    output, including logits, until the end of backward."""
    _held[:] = [logits.float()]
    shifted, following = _held[0][..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.functional.cross_entropy(shifted.view(-1, vocab_size), following.view(-1))


_LOSSES: dict[str, Callable[..., Tensor]] = {
    "copied": _copied,
    "16 bits": _in_16_bits,
    "unshifted": _unshifted,
    "wide": _wide,
    "listed": _listed,
    "chunks": _in_chunks,
    "kept": _kept,
}


class _Autocast:
    """Casts inputs of operators. Copies of weights are kept until backward begins, as in autocast's cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: dict[int, Tensor] = {}

    def low(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def cast(*args: Any, **kwargs: Any) -> Tensor:
            return function(*map(self._low, args), **{key: self._low(value) for key, value in kwargs.items()})

        return cast

    def high(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def cast(*args: Any, **kwargs: Any) -> Tensor:
            result = function(*map(_high, args), **{key: _high(value) for key, value in kwargs.items()})
            if function.__name__ == "cross_entropy" and result.requires_grad:
                result.register_hook(lambda _: self._kept.clear())
            return result

        return cast

    def _low(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        copy = value.to(self._dtype)
        if isinstance(value, nn.Parameter) and torch._C._current_graph_task_id() < 0:  # not in backward
            copy = self._kept.setdefault(id(value), copy)
        return copy


def _narrow(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Softmax in the dtype of the scores, whatever dtype is requested."""
    return lambda scores, dim=None, **_: softmax(scores, dim=dim)


def _clamping(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """OPT in transformers of early 2023 computes the maximum of each score and the smallest number of its dtype, for
    which autograd keeps masked scores."""

    def clamped(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return softmax(torch.maximum(scores, scores.new_empty(())), *args, **kwargs)

    return clamped


def _high(value: Any) -> Any:
    is_low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_low else value
