"""Distillation: a loss that also pulls the model towards a teacher. It takes the place of `output.loss`, so that
whatever reads that (Trainer, a loop of one's own) trains with it.

    loss = labels * the model's own loss
         + logits * T^2 * cross entropy of softmax(teacher / T) and softmax(student / T)      mean over answers
         + hidden * sum over layers of the mean squared error of hidden states
         + attention * the same of attention maps

A regression (one logit) has the mean squared error in the place of the cross entropy. Where the caller says how many
items an update has (`num_items_in_batch`, as Trainer does), the teacher's parts are weighted by this batch's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.policy import DistillationPolicy

_IGNORED = -100
_NOT_FOR_TEACHERS = ("labels", "num_items_in_batch", "return_loss")


class Distillation:
    """A teacher's part in the loss.

    Args:
        teacher: runs the teacher's forward.
        teacher_layers: the student's layers by their numbers in the teacher; empty: every k-th.
    """

    def __init__(
        self, policy: DistillationPolicy, teacher: Callable[..., Any], teacher_layers: Sequence[int] = ()
    ) -> None:
        self.policy = policy
        self.teacher = teacher
        self.teacher_layers = tuple(teacher_layers)

    def keywords(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """What the student's forward gets: also asked for what is compared."""
        found = dict(keywords)
        if self.policy.hidden:
            found["output_hidden_states"] = True
        if self.policy.attention:
            found["output_attentions"] = True
        return found

    def apply(self, inputs: Sequence[Any], keywords: Mapping[str, Any], output: Any) -> Any:
        """`output` with the new loss in it.

        Raises:
            WrongArgument: the output has no loss: the labels were kept back.
        """
        if getattr(output, "loss", None) is None:
            raise WrongArgument(
                "distillation adds to output.loss, and the model returned none: pass labels to forward (under Trainer: "
                "no label_smoothing_factor and no compute_loss_func)"
            )
        asked = {key: value for key, value in keywords.items() if key not in _NOT_FOR_TEACHERS}
        with torch.no_grad():
            taught = self.teacher(*inputs, **asked)
        labels = keywords.get("labels")
        share = _share_of_update(labels, keywords.get("num_items_in_batch"))
        output["loss"] = self.policy.labels * output.loss + share * self.teachers_part(output, taught, labels)
        return output

    def teachers_part(self, output: Any, taught: Any, labels: Tensor | None = None) -> Tensor:
        """The loss without the model's own."""
        policy = self.policy
        found: Tensor = output.logits.new_zeros(())
        if policy.logits:
            found = found + policy.logits * logit_loss(output.logits, taught.logits, policy.temperature, labels)
        if policy.hidden:
            own, theirs = output.hidden_states, taught.hidden_states
            pairs = zip(own, (theirs[index] for index in self._states(len(own), len(theirs))), strict=True)
            found = found + policy.hidden * _squared_errors(pairs)
        if policy.attention:
            own, theirs = _maps(output), _maps(taught)
            chosen = self.teacher_layers or _every(len(own), len(theirs))
            found = found + policy.attention * _squared_errors(zip(own, (theirs[i] for i in chosen), strict=True))
        return found

    def _states(self, own: int, theirs: int) -> list[int]:
        """Of the teacher's states (embeddings first) those that the student's are compared with."""
        chosen = self.teacher_layers or _every(own - 1, theirs - 1)
        return [max(chosen[0] - 1, 0), *(index + 1 for index in chosen)]


def logit_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, labels: Tensor | None = None) -> Tensor:
    """Soft cross entropy in fp32, mean over answers: those whose label is not -100, where there is one for each."""
    own, theirs = student.float(), teacher.detach().float()
    if own.shape[-1] == 1:
        return functional.mse_loss(own, theirs)
    each = -(theirs.div(temperature).softmax(-1) * own.div(temperature).log_softmax(-1)).sum(-1) * temperature**2
    if labels is None or labels.shape != each.shape:
        return each.mean()
    counts = (labels != _IGNORED).to(each.dtype)
    return (each * counts).sum() / counts.sum().clamp(min=1)


def _share_of_update(labels: Tensor | None, num_items: Any) -> Tensor | float:
    """What share of the update's items this batch has, where the caller divides by their number."""
    if num_items is None or labels is None:
        return 1.0
    counted = (labels[..., 1:] if labels.dim() > 1 else labels) != _IGNORED
    share: Tensor = counted.sum() / num_items
    return share


def _every(own: int, theirs: int) -> list[int]:
    step = max(1, theirs // max(1, own))
    return [step * (index + 1) - 1 for index in range(own)]


def _maps(output: Any) -> Sequence[Tensor]:
    maps = output.attentions
    if not maps or maps[0] is None:
        raise WrongArgument(
            "hf_zero.distillation.attention_weight needs attention maps, which this attention does not make: load the "
            'model (and its teacher) with attn_implementation="eager", or set the weight to 0'
        )
    return list(maps)


def _squared_errors(pairs: Any) -> Tensor:
    errors = [functional.mse_loss(own.float(), theirs.detach().float()) for own, theirs in pairs]
    return torch.stack(errors).sum()
