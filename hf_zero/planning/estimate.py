"""The estimate of one candidate: memory and traffic of one rank, and the time of a step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import nn

from hf_zero.config import ConfigError, OptimizerPolicy, Problem
from hf_zero.config.policies import Resolved
from hf_zero.config.schema.long_sequences import ActivationCheckpointing, Tiling, on_host
from hf_zero.explain.views import wiring_of
from hf_zero.layout.traffic import ModelSizes, Traffic, Transfer, Wiring, exchanges_of, traffic_of, with_same_weights
from hf_zero.optim.registry import build_optimizer, states_per_element, stored_bytes_per_element
from hf_zero.planning.candidates import Candidate, Training, ds_config, resolved
from hf_zero.planning.event_model import Setup, Shape, Step, exchange_seconds, simulate
from hf_zero.planning.machine import Hardware
from hf_zero.planning.memory import KINDS, OptimizerSize, RankMemory, Setting, rank_memory
from hf_zero.planning.model import PlannedModel, TilingChoice, trace
from hf_zero.planning.trace import ModelTrace, in_place_of
from hf_zero.precision import precision_from


@dataclass(frozen=True, eq=False)
class Estimate:
    """The estimate of one candidate. Figures are computed when they are read.

    Attributes:
        training: with the batch of this estimate.
        config: its ds.json.
        answers: the same, resolved.

    Raises:
        ConfigError: the ranks that share states cannot be divided into groups for the experts.
    """

    model: PlannedModel
    hardware: Hardware
    training: Training
    candidate: Candidate
    config: dict[str, Any]
    answers: Resolved

    @classmethod
    def of(
        cls,
        model: PlannedModel,
        hardware: Hardware,
        training: Training,
        candidate: Candidate,
        config: dict[str, Any] | None = None,
    ) -> Estimate:
        """Estimate a candidate with the batch of `training`.

        Args:
            config: default: the candidate's own.

        Raises:
            ConfigError: the config is invalid.
        """
        config = ds_config(candidate, training) if config is None else config
        answers = resolved(config, training, model, hardware.ranks)
        return cls(model, hardware, training, candidate, config, answers)

    def __post_init__(self) -> None:
        size, ranks = self.model.expert_size, self.wiring.shard_ranks
        if ranks % size:
            rule = f"ranks per shard group = n x ranks along expert does not hold: {ranks} != n x {size}"
            raise ConfigError(Problem("--expert-parallel", size, rule, "give a divisor of the shard group"))

    @cached_property
    def wiring(self) -> Wiring:
        """The groups of ranks that share states and gather."""
        hardware, answers = self.hardware, self.answers
        steps = answers.batch.accumulation_steps
        return wiring_of(answers.zero, hardware.ranks, hardware.per_host, answers.tensor_size, steps)

    @cached_property
    def setting(self) -> Setting:
        return Setting(
            self.answers,
            optimizer_size(self.training.optimizer),
            self.wiring.shard_ranks,
            second_shard=self.wiring.second_shard,
            separate=self.hardware.separate,
            hosts=self.hardware.hosts,
        )

    @property
    def tiling(self) -> TilingChoice:
        keys = self.answers.section(Tiling)
        return TilingChoice(mlp=keys.tiled_mlp, loss=keys.tiled_loss)

    @property
    def seen(self) -> ModelTrace:
        """The trace of one micro-batch."""
        checkpointing, on_cpu = self.candidate.checkpointing, not self.hardware.separate
        return traced(self.model, self.training, checkpointing=checkpointing, tiling=self.tiling, on_cpu=on_cpu)

    @property
    def inputs_on_host(self) -> int:
        """Bytes of inputs that `activation_checkpointing.cpu_checkpointing` moves to host memory; 0 without it."""
        moves = self.answers.section(ActivationCheckpointing).cpu_checkpointing and self.hardware.separate
        if not (moves and self.candidate.checkpointing):
            return 0
        tokens = self.training.micro_batch * self.training.local_length
        return on_host(tokens * self.model.hidden * self.model.dtype.itemsize, self.model.layers)

    @cached_property
    def memory(self) -> RankMemory:
        memory, moved = rank_memory(self.model, self.setting, self.seen), self.inputs_on_host
        return memory.with_activations_on_host(moved) if moved else memory

    @property
    def host_bytes(self) -> int:
        """Host memory of all ranks of a host."""
        return self.memory.host_total * self.hardware.per_host

    @property
    def disk_bytes(self) -> int:
        """Bytes of all ranks of a host on its drive."""
        return self.memory.disk_total * self.hardware.per_host

    @cached_property
    def lacks(self) -> tuple[str, ...]:
        """What does not fit, as text; empty if everything fits."""
        return tuple(self._lacks())

    @property
    def fits(self) -> bool:
        return not self.lacks

    def exchanges(self, accumulation: int = 1) -> list[Transfer]:
        """Activations that a rank sends in so many micro-batches."""
        group, per_host = self.training.exchanging, self.hardware.per_host
        return exchanges_of(self.seen.messages, group=group, per_host=per_host, accumulation=accumulation)

    @cached_property
    def traffic(self) -> Traffic:
        return Traffic.of([*self._of_states(), *self.exchanges(self.training.accumulation)])

    @property
    def flops(self) -> float:
        return self.seen.flops * self.training.accumulation

    @property
    def seconds(self) -> float:
        """Time of a step (an update)."""
        return self._step.seconds

    @property
    def bound(self) -> str:
        """The lane that is busy longest."""
        return self._step.bound

    @property
    def tokens_per_s(self) -> float:
        return self.training.tokens * self.training.data_ranks(self.hardware.ranks) / self.seconds

    def _lacks(self) -> Iterator[str]:
        memory, hardware = self.memory, self.hardware
        if memory.device_total > hardware.limit:
            largest = max(KINDS, key=lambda kind: memory.device.get(kind, 0))
            yield (
                f"{gigabytes(memory.device_total)} of device memory ({gigabytes(memory.device[largest])} of it "
                f"{largest}); {gigabytes(hardware.limit)} can be used"
            )
        if self.host_bytes > hardware.host_limit and hardware.separate:
            yield (
                f"{gigabytes(self.host_bytes)} of host memory for {hardware.per_host} rank(s) per host; "
                f"{gigabytes(hardware.host_limit)} can be used"
            )
        if self.disk_bytes > hardware.disk:
            yield f"{gigabytes(self.disk_bytes)} on a host's drive; {gigabytes(hardware.disk)} can be used"

    def _of_states(self) -> list[Transfer]:
        model, zero, wiring = self.model, self.answers.zero, self.wiring
        size, (apart, trained_apart) = model.dtype.itemsize, model.apart
        rest = model.num_stored - apart
        sizes = ModelSizes(
            gathered=rest,
            trained=model.num_trained - trained_apart,
            kept=min(rest, zero.keys.stage3_max_live_parameters),
            weight_bytes=size,
            gradient_bytes=size,
        )
        transfers = traffic_of(sizes, wiring)
        if apart:  # expert gradients are reduced among the ranks with the same experts
            trained, persistent = (0, trained_apart) if zero.stage == 3 else (trained_apart, 0)
            ranks, per_host = with_same_weights(self.hardware.ranks, self.hardware.per_host, model.expert_size)
            shard = wiring.shard_ranks // model.expert_size
            alike = replace(wiring, ranks=ranks, per_host=per_host, shard=shard, second_shard=1, gradient_bits=None)
            transfers += traffic_of(replace(sizes, gathered=0, kept=0, trained=trained, persistent=persistent), alike)
        return transfers

    @cached_property
    def _step(self) -> Step:
        model, hardware, training, seen = self.model, self.hardware, self.training, self.seen
        zero, machine = self.answers.zero, hardware.machine()
        optimizer, parameters = zero.offload_optimizer, zero.offload_param if zero.stage == 3 else None
        tokens = training.micro_batch * training.local_length
        flops, touched, (apart, _) = seen.forward_flops / tokens, seen.forward_touched / tokens, model.apart
        numel, layers = model.num_stored - apart, max(1, model.layers)
        shape = Shape(model.name, numel, layers, flops=flops, apart=apart, touched=touched)
        precision = self.answers.precision
        if hardware.separate and precision_from(precision).model is None and precision.autocast is None:
            machine = replace(machine, flops=machine.flops * hardware.gpu.fp32)
        exchange = {"forward": 0.0, "backward": 0.0}
        for each in self.exchanges():
            exchange[each.phase] += exchange_seconds(machine, each.operation, each.within, each.across)
        setup = Setup(
            stage=zero.stage,
            offload_optimizer=optimizer is not None and hardware.separate,
            offload_parameters=parameters is not None and hardware.separate,
            offload_ratio=1.0 if optimizer is None else optimizer.first_ratio,
            tokens=tokens * training.accumulation,
            recomputes=self.candidate.checkpointing,
            clips=self._waits_for_gradients,
            streams=zero.streaming is not None,
            overlaps_step=zero.overlap_step,
            update=zero.offload_update,
            trained=model.num_trained / max(1, model.num_stored),
            micro_batches=training.accumulation,
            disk_optimizer=optimizer is not None and optimizer.device == "nvme",
            disk_parameters=parameters is not None and parameters.device == "nvme",
            shard=self.wiring.shard_ranks,
            second_shard=self.wiring.second_shard,
            tensor=training.tensor_parallel,
            experts=training.expert_parallel,
            exchange=(exchange["forward"], exchange["backward"]),
            gathers=zero.keys,
            agreement=self._agreement,
        )
        return simulate(machine, shape, setup)

    @property
    def _waits_for_gradients(self) -> bool:
        """Whether updates start only after all gradients are complete."""
        answers, streaming = self.answers, self.answers.zero.streaming
        clip_norm, skips = answers.gradients.clip_norm, answers.precision.skip_nonfinite
        return clip_norm > 0 or skips if streaming is None else bool(streaming.why_gradients_stay(clip_norm, skips))

    @property
    def _agreement(self) -> Literal["plan", "memory", "messages"]:
        if not self.hardware.separate and self.hardware.hosts == 1:
            return "memory"
        return "plan" if self.answers.zero.follows_plans else "messages"


@lru_cache(maxsize=64)  # candidates share traces, and `remedies` needs them again
def traced(
    model: PlannedModel, training: Training, *, checkpointing: bool, tiling: TilingChoice, on_cpu: bool
) -> ModelTrace:
    return trace(
        model,
        micro_batch=training.micro_batch,
        length=training.length,
        checkpointing=checkpointing,
        tiling=tiling,
        sequence_size=training.sequence_parallel,
        on_cpu=on_cpu,
    )


def gigabytes(size: float) -> str:
    """Format a size, such as 1.2 GB or 35 MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


@lru_cache(maxsize=4)
def optimizer_size(name: str) -> OptimizerSize:
    """Measure the states per element of the optimizer of this type on one small parameter."""
    policy = OptimizerPolicy(type=name, params={"lr": 1e-3} if name.lower() != "adafactor" else {})
    plain = inspect.unwrap(torch.optim.Optimizer.add_param_group)  # its wrapper imports torch's compiler
    with in_place_of((torch.optim.Optimizer, "add_param_group", plain)):
        optimizer = build_optimizer(policy, [{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    return OptimizerSize(states_per_element(optimizer), stored_bytes_per_element(optimizer))
