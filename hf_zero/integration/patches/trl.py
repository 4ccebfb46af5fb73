"""Patches of trl.

trl.trainer.utils                   digests of models
trl.generation.vllm_generation      weights with adapters for vLLM
trl.kernels.chunked_logprob         log-probabilities from a head that is cut over ranks
trl.kernels.chunked_divergence      the same for distillation: refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.api.gathered_parameters import (
    GatheredParameters,
    adapted_layers,
    gathered_weights,
    handles_of,
    names_without_adapters,
)
from hf_zero.comm.parts import held_part
from hf_zero.integration.patches import Patches
from hf_zero.tensor import log_probs
from hf_zero.tiling.compute import autocasts

PATCHES = Patches("trl.trainer.utils")
GENERATION = Patches("trl.generation.vllm_generation")
LOG_PROBS = Patches("trl.kernels.chunked_logprob")
DIVERGENCE = Patches("trl.kernels.chunked_divergence")


@PATCHES.add(
    "hash_module(module)",
    without="DPOTrainer and KTOTrainer cannot compute log-probabilities of the reference beforehand at stage 3",
    until="TRL gathers the weights from which it makes the key of what it has computed",
)
def around_hash_module(original: Callable[[Any], str], module: nn.Module) -> str:
    """The digest of whole weights, which are gathered one by one, because the model may not fit."""
    return original(_Whole(module) if handles_of(module.parameters()) else module)


class _Whole:
    """A view of a module with sharded parameters for digests."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        entries = self._module.state_dict(keep_vars=True).items()
        return {name: _Sharded(value) if handles_of([value]) else value.detach() for name, value in entries}


class _Sharded:
    """A parameter whose values are gathered on first access from the host. Collective then."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    def cpu(self) -> Tensor:
        with GatheredParameters([self._parameter]):
            return self._parameter.detach().cpu().clone()  # on a CPU, cpu() does not copy


@GENERATION.add(
    "VLLMGeneration._iter_named_params(self)",
    without="the whole model is gathered to send weights with adapters to vLLM, and the last of them arrive without "
    "adapters",
    until="TRL merges the adapters of one weight after the other, into new tensors",
)
def around_iter_named_params(original: Callable[[Any], Any], self: Any) -> Iterator[tuple[str, Tensor]]:
    """Merge adapters into each weight as it is gathered. Upstream gathers the whole model and merges in place; when
    the iteration ends it unmerges, although vLLM's sender has not sent what it collected last."""
    if self.accelerator.distributed_type != "DEEPSPEED" or not hasattr(self.model, "peft_config"):
        return original(self)  # type: ignore[no-any-return]
    try:
        adapted_layers(self.model)
    except ValueError:  # DoRA and quantized weights are not sums
        return original(self)  # type: ignore[no-any-return]
    return _merged(self)


def _merged(generation: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield merged weights under the names that vLLM expects, tied ones once. Collective."""
    first_names = {names[0] for names in names_without_adapters(generation.model).values()}
    for name, values in gathered_weights(generation.model):
        if name in first_names:
            yield generation._fix_param_name_to_vllm(name), values


_WRONG = "with tensor parallelism TRL's losses are those of a part of the vocabulary"


@LOG_PROBS.add(
    "ChunkedLogProbFunction.forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, "
    "final_logit_softcapping, logit_scale, outputs)",
    without=_WRONG,
    until="TRL calls the head, or knows heads of which each rank has some rows",
    since="trl 1.16",
)
def around_log_probs(
    original: Callable[..., Any],
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = log_probs.TokenScores._fields[1:],
) -> Any:
    """TRL's trainers multiply by `lm_head.weight` without calling the head, which would combine the ranks' columns."""
    if held_part(weight) is None:
        more = (temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
        return original(ctx, hidden, weight, bias, targets, *more)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if autocasts(kind) else hidden.dtype
    ctx.of_hf_zero = (temperature, final_logit_softcapping, logit_scale, dtype)
    log_sum, scores = log_probs.forward(_head(weight, bias, *ctx.of_hf_zero), hidden.to(dtype), targets)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, log_sum, scores.entropy)
    ctx.mark_non_differentiable(scores.log_sum_sq_probs, scores.mean_logits, scores.is_top1)
    others = list(scores._asdict().items())[1:]
    return scores.log_probs, *(score if name in outputs else None for name, score in others)


def _head(
    weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None, scale: float, dtype: torch.dtype
) -> log_probs.PartialHead:
    part = held_part(weight)
    assert part is not None, "asked before"
    return log_probs.PartialHead(
        weight=weight.to(dtype),
        bias=_cast(bias, dtype),
        part=part,
        scale=scale,
        softcap=softcap,
        temperature=temperature,
        dtype=dtype,
    )


@LOG_PROBS.add(
    "ChunkedLogProbFunction.backward(ctx, grad_logprobs, grad_entropy, _)",
    without=_WRONG,
    until="TRL calls the head, or knows heads of which each rank has some rows",
    since="trl 1.16",
)
def around_log_probs_backward(
    original: Callable[..., Any], ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *rest: Any
) -> Any:
    """The other half of `around_log_probs`. At stage 3 the head's rows are gathered again, as TRL does."""
    if not hasattr(ctx, "of_hf_zero"):
        return original(ctx, grad_logprobs, grad_entropy, *rest)
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    hidden, weight, bias, targets, log_sum, entropy = ctx.saved_tensors
    needs, of_scores = ctx.needs_input_grad, (_cast(grad_logprobs), _cast(grad_entropy))
    with maybe_gather_lm_head_ctx(weight, bias):
        head = _head(weight, bias, *ctx.of_hf_zero)
        found = log_probs.backward(head, hidden.to(head.dtype), targets, log_sum, entropy, *of_scores, needs[:3])
    own = (_cast(found.hidden, hidden.dtype), _cast(found.weight, weight.dtype), _cast(found.bias, weight.dtype))
    return *own, *(None for _ in needs[3:])


def _cast(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


@DIVERGENCE.add(
    "ChunkedDivergenceFunction.forward(ctx, student_hidden, student_weight, student_bias, teacher_hidden, "
    "teacher_weight, teacher_bias, beta, temperature, student_logit_scale, student_final_logit_softcapping, "
    "teacher_logit_scale, teacher_final_logit_softcapping)",
    without=_WRONG,
    until="TRL calls the heads, or knows heads of which each rank has some rows",
    since="trl 1.16",
)
def around_divergence(original: Callable[..., Any], ctx: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse heads that are cut over ranks, of which TRL would compare a part of the vocabulary."""
    if any(isinstance(value, Tensor) and held_part(value) is not None for value in (*args, *kwargs.values())):
        raise ValueError(
            "tensor_parallel.autotp_size: TRL's DistillationTrainer compares the logits of student and teacher from "
            "the rows of the heads that this rank has, which are not the whole vocabulary. Remove tensor_parallel"
        )
    return original(ctx, *args, **kwargs)
