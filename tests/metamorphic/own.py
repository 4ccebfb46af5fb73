"""The same with a loop and an optimizer of the program's own; also without any engine, for comparison.

Without an engine (stage PLAIN) ranks average gradients themselves. In bf16 the optimizer has the fp32 model, and
forward a copy of it in bf16, as with an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim.lr_scheduler import LambdaLR

import hf_zero
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.api.parameter_access import safe_get_full_fp32_param, safe_set_full_fp32_param
from hf_zero.api.zero_init import Init
from tests.metamorphic.body import CHECKPOINTS, UNUSED, RankResult, labels_of, logits_of, loss_of
from tests.metamorphic.model import EPS, RATE, Batch, build_model, ds_config, evaluated, samples, share, stack
from tests.metamorphic.spec import PLAIN, ROWS, Segment
from tests.support.own_optimizers import Lookahead, Momentum, ScheduleFree, Trust

_MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, eps=EPS, weight_decay=0.1),
    "RAdam": partial(torch.optim.RAdam, eps=EPS),
    "Momentum": partial(Momentum, decay=0.1),
    "Trust": Trust,
    "ScheduleFree": ScheduleFree,
    "Lookahead": partial(Lookahead, lr=RATE, momentum=0.9),
}
_RATES = {"AdamW": RATE, "RAdam": RATE}  # others: 5 * RATE


def run_own(segment: Segment, rank: int) -> RankResult:
    return _Loop(segment, rank, (_WithoutEngine if segment.shape.stage == PLAIN else _WithEngine)(segment)).run()


def optimizer_of(name: str, groups: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    divided: list[list[nn.Parameter]] = {
        "one": [trained],
        "two": [matrices, others],
        "empty": [[], others, matrices],
        "frozen": [matrices, frozen, others],
        "each": [[parameter] for parameter in trained],
    }[groups]
    rate = _RATES.get(name, 5 * RATE)
    return _MAKERS[name]([{"params": each, "lr": rate / (1 + place % 3)} for place, each in enumerate(divided)])


def schedule_of(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, [partial(_slower, place) for place in range(len(optimizer.param_groups))])


def _slower(place: int, step: int) -> float:
    return 1 / (1 + 0.3 * step * (1 + place % 2))


class _WithEngine:
    """What the program calls if it has an engine."""

    def __init__(self, segment: Segment) -> None:
        task, shape = segment.task, segment.shape
        config = ds_config(task, shape, segment.folder)
        del config["optimizer"]
        config.pop("scheduler", None)
        config["zero_allow_untested_optimizer"] = True
        if task.optimizer == "Trust":
            config.setdefault("hf_zero", {})["optimizer_sees"] = "whole_tensors"
        with Init(config_dict_or_path=config, enabled=shape.at_init):
            model = build_model(task, shape.recompute)
        if not task.hooks.startswith("late"):
            hook_gradients(model, task.hooks)
        optimizer = optimizer_of(task.optimizer, task.groups, model)
        schedule = schedule_of(optimizer) if task.schedule else None
        self.model = self.module = hf_zero.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
        )[0]
        self.module = model
        self.optimizer = self.model.optimizer
        self.base = optimizer
        self._micro_ranks = shape.micro_batch * shape.data_ranks
        if task.hooks.startswith("late"):
            hook_gradients(model, task.hooks)

    def gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        return GatheredParameters(parameters)

    def accumulate(self, number: int) -> None:
        """The number of micro-batches of the next updates."""
        if self.model.gradient_accumulation_steps() != number:
            self.model.set_train_batch_size(number * self._micro_ranks)

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()

    def norm(self) -> float:
        return float(self.model.get_global_grad_norm())

    def edit(self, way: str, rank: int) -> None:
        weights = edited(self.module)
        if way == "gathered":
            with GatheredParameters(weights, modifier_rank=0):
                for weight in weights if rank == 0 else ():
                    weight.data.mul_(0.9)
        elif way == "written":
            with GatheredParameters(weights, modifier_rank=0), torch.no_grad():
                for weight in weights:
                    weight.mul_(0.9)
        else:
            for weight in weights:
                values = safe_get_full_fp32_param(weight)
                assert values is not None
                safe_set_full_fp32_param(weight, values * 0.9)

    def published(self) -> None:
        """Masters have been written to; the engine notices it."""

    def save(self, folder: str) -> None:
        self.model.save_checkpoint(folder)

    def load(self, folder: str) -> None:
        self.model.load_checkpoint(folder)

    def weights(self) -> dict[str, Tensor]:
        trained = {name: value for name, value in self.module.named_parameters() if value.requires_grad}
        found = {name: safe_get_full_fp32_param(value) for name, value in trained.items()}
        return {name: value.clone() for name, value in found.items() if value is not None}

    def close(self) -> None:
        self.model.destroy()


class _WithoutEngine:
    """The same without one. `masters` is the model that the optimizer updates."""

    def __init__(self, segment: Segment) -> None:
        task, self._shape = segment.task, segment.shape
        self.masters = build_model(task)
        self.optimizer = self.base = optimizer_of(task.optimizer, task.groups, self.masters)
        self._schedule = schedule_of(self.optimizer) if task.schedule else None
        is_16_bit = task.precision == "bf16"
        self.model = self.module = copy.deepcopy(self.masters).bfloat16() if is_16_bit else self.masters
        hook_gradients(self.module, task.hooks)
        self._clip, self._number, self._left, self._norm = task.clip, 0, 0, 0.0

    def gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        return nullcontext()

    def accumulate(self, number: int) -> None:
        self._number = self._left = number

    def backward(self, loss: Tensor) -> None:
        (loss / self._number).backward()

    def step(self) -> None:
        self._left -= 1
        if self._left:
            return
        for master, weight in zip(self.masters.parameters(), self.module.parameters(), strict=True):
            if weight.grad is None:  # on all ranks
                continue
            gradient = weight.grad.float()
            torch.distributed.all_reduce(gradient)
            weight.grad, master.grad = None, gradient / self._shape.world
        trained = [master for master in self.masters.parameters() if master.requires_grad]
        self._norm = float(nn.utils.clip_grad_norm_(trained, self._clip or float("inf")))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._schedule is not None:
            self._schedule.step()
        self.published()

    def norm(self) -> float:
        return self._norm

    @torch.no_grad()
    def edit(self, way: str, rank: int) -> None:
        for weight in edited(self.masters):
            weight.mul_(0.9)
        self.published()

    @torch.no_grad()
    def published(self) -> None:
        for master, weight in zip(self.masters.parameters(), self.module.parameters(), strict=True):
            weight.copy_(master)

    def save(self, folder: str) -> None:
        """Nothing resumes from it."""

    def load(self, folder: str) -> None:
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.masters.named_parameters() if value.requires_grad}

    def close(self) -> None:
        """Nothing is open."""


def edited(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim > 1][-2:]


def hook_gradients(model: nn.Module, kind: str) -> None:
    """Halve the gradient of every other trained parameter."""
    for parameter in [parameter for parameter in model.parameters() if parameter.requires_grad][::2] if kind else ():
        if kind.endswith("grad"):
            parameter.register_hook(lambda gradient: 0.5 * gradient)
        else:
            parameter.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None, "a hook sees no gradient"
    parameter.grad.mul_(0.5)


class _Loop:
    """The program."""

    def __init__(self, segment: Segment, rank: int, side: _WithEngine | _WithoutEngine) -> None:
        self.segment, self.task, self.shape, self.rank = segment, segment.task, segment.shape, rank
        self.side = side
        if self.task.penalty == "inside":
            head = self.side.module.get_submodule("head" if self.task.model != "llama" else "lm_head")
            head.register_forward_pre_hook(lambda module, given: (given[0] * (1 + self._term(given[0])),))

    def run(self) -> RankResult:
        side, segment = self.side, self.segment
        if segment.start:
            side.load(f"{segment.folder}/{CHECKPOINTS}")
        losses, norms = [], []
        for update in range(segment.start, segment.stop):
            if self.shape.evaluates:
                self._evaluate()
            losses += self._update(update)
            norms.append(side.norm())
            if update == 0:
                self._between()
            if self.task.optimizer == "Lookahead" and update % 2:
                side.base.sync()  # type: ignore[attr-defined]
                side.published()
            if self.shape.saves and update == segment.start:
                side.save(f"{segment.folder}/{UNUSED}")
        if segment.stop < self.task.updates:
            self._mode("eval")
            side.save(f"{segment.folder}/{CHECKPOINTS}")
            result = RankResult(tuple(losses), tuple(norms), {}, torch.empty(0), torch.empty(0))
        else:
            self._average_buffers()
            logits = self._evaluate()
            result = RankResult(tuple(losses), tuple(norms), side.weights(), logits, labels_of(segment))
        side.close()
        return result

    def _mode(self, mode: str) -> None:
        if self.task.optimizer == "ScheduleFree":
            getattr(self.side.optimizer, mode)()
            self.side.published()

    def _between(self) -> None:
        """After the first update."""
        side, optimizer = self.side, self.side.optimizer
        if self.task.edit == "masters":
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for master in group["params"]:
                        if master.requires_grad:
                            master.clamp_(-0.3, 0.3)
            side.published()
        elif self.task.edit:
            side.edit(self.task.edit, self.rank)
        if self.task.resets == "clear":
            optimizer.state.clear()
        elif self.task.resets == "new":
            optimizer.state = type(optimizer.state)(dict)
        elif self.task.resets == "pop":
            for group in optimizer.param_groups:
                for master in group["params"]:
                    optimizer.state.pop(master, None)
        elif self.task.resets:
            for state in optimizer.state.values():
                for key, value in state.items():
                    state[key] = value.zero_() if isinstance(value, Tensor) else type(value)(0)

    def _update(self, update: int) -> list[float]:
        """The mean loss of an update's micro-batches, and what its probes have found."""
        growth = 2 if self.task.grows and update else 1
        first = update * ROWS if not self.task.grows else max(0, 2 * update - 1) * ROWS
        rows = samples(self.task, growth * ROWS, first)
        number = growth * self.shape.accumulation
        self.side.accumulate(number)
        total, probed = 0.0, 0.0
        for micro in range(number):
            batch = stack(share(self.shape, self.rank, micro, rows))
            self._mode("train")
            loss = self._loss(batch)
            if self.task.probe:  # after the engine's forward, which has published what was written into masters
                probed += self._probe(batch) / number
            self.side.backward(loss)
            self.side.step()
            total += loss.item() / number
        return [total, probed] if self.task.probe else [total]

    def _loss(self, batch: Batch) -> Tensor:
        if self.task.penalty == "gradient":
            x = batch["x"].requires_grad_()
            loss, logits = self.side.model(x=x, y=batch["y"])
            (gradient,) = torch.autograd.grad(logits.float().square().sum(), x, create_graph=True)
            return loss + gradient.square().mean()
        loss = loss_of(self.side.model(**batch))
        if self.task.penalty and self.task.penalty != "inside":
            return loss + self._term(loss.detach())
        return loss

    def _term(self, value: Tensor) -> Tensor:
        """Of some weights, which are read here and needed in backward."""
        parameters = [p for p in self.side.module.parameters() if p.ndim > 1]
        if self.task.penalty == "frozen":
            pairs = [(a, b) for a in parameters for b in parameters if a.shape == b.shape and a is not b]
            pairs = [(a, b) for a, b in pairs if a.requires_grad and not b.requires_grad]
        else:
            pairs = [(a, a) for a in parameters if a.requires_grad][:3]
        terms = [torch.zeros((), dtype=value.dtype)]
        with self.side.gathered(parameters):
            for one, other in pairs:
                if self.task.penalty == "norm":
                    terms.append(0.1 * one.norm())
                elif self.task.penalty == "product":
                    terms.append(0.1 * (one @ one.t()).square().mean())
                elif self.task.penalty == "frozen":
                    terms.append(0.3 * (one - other).pow(2).sum() + 0.1 * (one * other).sum())
                else:
                    terms.append(0.3 * one.pow(2).mean())
        return torch.stack([term.to(value.dtype) for term in terms]).sum()

    def _probe(self, batch: Batch) -> float:
        if self.task.probe == "saliency":
            x = batch["x"].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.side.model(x=x, y=batch["y"])[0] * len(x), x)
            return float(gradient.norm(dim=-1).mean())
        module = self.side.module

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = functional_call(module, weights, (x[None], y[None]))[0]
            return result

        with self.side.gathered(list(module.parameters())):
            weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
            found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, batch["x"], batch["y"])
        squares = [value.float().square().view(len(value), -1).sum(1) for value in found.values()]
        return float(torch.stack(squares).sum(0).sqrt().mean())

    def _average_buffers(self) -> None:
        """Every rank has running statistics of its own samples."""
        for buffer in self.side.module.buffers():
            if buffer.is_floating_point() and self.task.model == "normed":
                total = buffer.float()
                torch.distributed.all_reduce(total)
                buffer.copy_(total / self.shape.world)

    def _evaluate(self) -> Tensor:
        self._mode("eval")
        self.side.model.eval()
        batch = stack(evaluated(self.task))
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "y")}
        with torch.no_grad():
            output = self.side.model(**inputs)
        self.side.model.train()
        return logits_of(output).float()
