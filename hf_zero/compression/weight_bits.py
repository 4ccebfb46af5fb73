"""Weight quantisation of one layer: how many bits it has now, and the weight as forward sees it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_zero.compression.fake_quantize import quantized, straight_through
from hf_zero.compression.layers import Layer
from hf_zero.compression.schedule import BitsNow, bits_at, exact_share
from hf_zero.config import ConfigError, Problem
from hf_zero.config.compression import Rule, WeightPolicy


@dataclass(slots=True, eq=False)
class WeightBits:
    """Acts once `is_on`. Noise of stochastic rounding is the same for all forwards of an update, on all ranks."""

    layer: Layer
    rule: Rule
    policy: WeightPolicy
    is_on: bool = False
    updates: int = 0  # since it began
    now: BitsNow = field(init=False)

    def __post_init__(self) -> None:
        self.now = bits_at(self.rule, 0)

    @property
    def num_groups(self) -> int:
        """An embedding has a group per row."""
        if self.layer.kind == "embedding":
            return int(self.layer.parameter.shape[0])
        return self.policy.num_groups

    def problem(self) -> Problem | None:
        """Groups that do not divide the weight."""
        shape = tuple(self.layer.parameter.shape)
        if self.layer.parameter.numel() % self.num_groups == 0:
            return None
        path = "compression_training.weight_quantization.shared_parameters.quantize_groups"
        rule = f"must divide the number of elements of {self.layer.name}, which has the shape {shape}"
        return Problem(path, self.num_groups, rule, "choose a divisor, or narrow `modules`")

    def advance(self, updates: int) -> BitsNow | None:
        """So many updates of the model are over; returns the new bits where they have changed."""
        self.is_on, before = updates >= self.policy.offset, self.now
        self.updates = max(0, updates - self.policy.offset)
        self.now = bits_at(self.rule, self.updates)
        return self.now if self.is_on and self.now.bits != before.bits else None

    def apply(self, weight: Tensor) -> Tensor:
        """The weight that forward multiplies with."""
        return straight_through(weight, self._rounded) if self.is_on else weight

    def _rounded(self, weight: Tensor) -> Tensor:
        symmetric = self.policy.symmetric
        found = quantized(weight, self.now.bits, self.num_groups, symmetric=symmetric, noise=self._noise(weight))
        share = exact_share(self.policy.change_ratio, self.updates - self.now.since)
        return found if share == 0.0 else torch.lerp(found, weight.detach(), share)

    def _noise(self, weight: Tensor) -> Tensor | None:
        if not self.policy.stochastic:
            return None
        generator = torch.Generator(weight.device)
        generator.manual_seed(zlib.crc32(f"{self.layer.name}:{self.updates}".encode()))
        shape = (self.num_groups, weight.numel() // self.num_groups)
        return torch.rand(shape, generator=generator, device=weight.device) - 0.5


def check_groups(bits: list[WeightBits]) -> None:
    """Raises ConfigError for all layers whose weights cannot be divided."""
    problems = [problem for problem in (one.problem() for one in bits) if problem is not None]
    if problems:
        raise ConfigError(problems)
