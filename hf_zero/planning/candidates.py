"""The candidates of a plan: stages, offload and gradient checkpointing, in order of preference, each as a ds.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_zero.config import (
    ConfigDict,
    ConfigError,
    Problem,
    Resolved,
    TrainingView,
    Views,
    examine,
    load_config,
    resolve,
)
from hf_zero.config.extras import service
from hf_zero.config.schema.batch import MICRO, STEPS, TRAIN
from hf_zero.config.schema.precision import model_dtype
from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam
from hf_zero.config.sources import is_auto
from hf_zero.planning.model import PlannedModel, TilingChoice

Place = Literal["cpu", "nvme"]
MOST_PER_FORWARD = 64  # samples of a micro-batch that is searched


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train.

    Attributes:
        copy_per_host: states are sharded over the ranks of each host, so every host has a copy (`hf_zero.shard_group`).
        second_shard: size of the groups within a host that gather parameters (hpZ); 1: all ranks that share the states.
        is_given: the user's own ds.json, which is reported but never chosen.
        streams: uses `hf_zero.streaming`.
        ratio: with `optimizer` "cpu", the fraction of the states in host memory (`offload_optimizer.ratio`).
    """

    stage: int
    optimizer: Place | None = None
    parameters: Place | None = None
    checkpointing: bool = False
    copy_per_host: bool = False
    second_shard: int = 1
    is_given: bool = False
    streams: bool = False
    ratio: float = 1.0

    @property
    def name(self) -> str:
        """Name in tables, such as `stage 3, optimizer cpu, checkpointing`."""
        words = ["yours: " * self.is_given + f"stage {self.stage}"]
        words += [f"{self._part}optimizer {self.optimizer}"] if self.optimizer else []
        words += [f"parameters {self.parameters}"] if self.parameters else []
        words += ["streaming"] * self.streams
        words += ["a copy per host"] * self.copy_per_host
        words += [f"hpZ {self.second_shard}"] if self.second_shard > 1 else []
        return ", ".join(words + ["checkpointing"] * self.checkpointing)

    @property
    def _part(self) -> str:
        return f"{self.ratio:.0%} of the " if self.ratio < 1 else ""

    @property
    def short(self) -> str:
        words = ["yours_" * self.is_given + f"z{self.stage}"]
        part = f"{self.ratio * 100:.0f}" if self.ratio < 1 else ""
        words += [f"opt-{self.optimizer}{part}"] if self.optimizer else []
        words += [f"param-{self.parameters}"] if self.parameters else []
        words += ["stream"] * self.streams
        words += ["host"] * self.copy_per_host
        words += [f"hpz-{self.second_shard}"] if self.second_shard > 1 else []
        return "_".join(words + ["ckpt"] * self.checkpointing)


# In order of preference: stage 0 > 1 > 2 > 2 with offload > 3 > 3 with offload, then NVMe.
PREFERRED = (
    Candidate(0),
    Candidate(1),
    Candidate(2),
    Candidate(1, optimizer="cpu"),
    Candidate(2, optimizer="cpu"),
    Candidate(3),
    Candidate(3, parameters="cpu"),
    Candidate(3, optimizer="cpu"),
    Candidate(3, optimizer="cpu", parameters="cpu"),
    Candidate(3, optimizer="cpu", parameters="cpu", streams=True),
    Candidate(3, optimizer="nvme"),
    Candidate(3, optimizer="nvme", parameters="cpu"),
    Candidate(3, optimizer="nvme", parameters="nvme"),
)


_ELEMENTWISE = frozenset({"adam", "adamw", "adam8bit", "adamw8bit", "adagrad", "lion", "sgd"})  # one rule per element


@dataclass(frozen=True, slots=True)
class Training:
    """The settings that the user has given.

    Attributes:
        length: tokens per sample.
        micro_batch: samples per forward on one rank, or on a group of ranks that share them.
        searches: also try other micro-batches, from `micro_batch` up.
        global_batch: samples per update of all ranks, from which accumulation follows; None: not given.
        checkpointing: gradient checkpointing; None: try both and use the better one.
        optimizer: `optimizer.type` of ds.json.
        nvme_path: None: no drive is used.
        tensor_parallel: ranks that share each matrix.
        sequence_parallel: ranks that share each sequence.
        expert_parallel: ranks that experts are distributed over.
    """

    length: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    checkpointing: bool | None = None
    optimizer: str = "AdamW"
    nvme_path: str | None = None
    clip: float = 1.0
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    expert_parallel: int = 1
    searches: bool = False
    global_batch: int | None = None

    def batches(self, ranks: int) -> Iterator[Training]:
        """Yield the training with each micro-batch to try, ascending, and the accumulation that belongs to it."""
        if not self.searches:
            yield self
            return
        for micro in range(self.micro_batch, MOST_PER_FORWARD + 1):
            if self.global_batch is None:
                if micro % self.micro_batch == 0 and (micro // self.micro_batch).bit_count() == 1:
                    yield replace(self, micro_batch=micro, searches=False)
            elif self.global_batch % (micro * self.data_ranks(ranks)) == 0:
                steps = self.global_batch // (micro * self.data_ranks(ranks))
                yield replace(self, micro_batch=micro, accumulation=steps, searches=False)

    def samples(self, ranks: int) -> int:
        """Samples per update of all ranks."""
        return self.micro_batch * self.accumulation * self.data_ranks(ranks)

    @property
    def can_stream(self) -> bool:
        """Whether `hf_zero.streaming` supports it and saves memory."""
        is_elementwise = self.optimizer.lower() in _ELEMENTWISE
        return is_elementwise and self.precision == "bf16" and self.tensor_parallel == 1

    @property
    def tokens(self) -> int:
        """Tokens per step of all ranks that see the same samples."""
        return self.length * self.micro_batch * self.accumulation

    @property
    def local_length(self) -> int:
        """Tokens per sample on one rank."""
        return -(-self.length // self.sequence_parallel)

    @property
    def neighbours(self) -> int:
        """Number of consecutive ranks that see the same samples. (At most one of the factors is above 1.)"""
        return self.tensor_parallel * self.sequence_parallel

    @property
    def exchanging(self) -> int:
        """Number of consecutive ranks that exchange activations in every layer."""
        return max(self.neighbours, self.expert_parallel)

    def data_ranks(self, ranks: int) -> int:
        return ranks // self.neighbours

    def view(self) -> TrainingView:
        return TrainingView(
            per_device_train_batch_size=self.micro_batch,
            gradient_accumulation_steps=self.accumulation,
            max_grad_norm=self.clip,
            bf16=self.precision == "bf16",
            fp16=self.precision == "fp16",
        )

    def flags(self, candidate: Candidate) -> str:
        """The corresponding flags of a script with TrainingArguments."""
        words = [f"--per_device_train_batch_size {self.micro_batch}"]
        words += [f"--gradient_accumulation_steps {self.accumulation}"] if self.accumulation > 1 else []
        words += [f"--{self.precision} true"] if self.precision != "fp32" else []
        return " ".join(words + ["--gradient_checkpointing true"] * candidate.checkpointing)

    def more_words(self, ranks: int) -> tuple[str, ...]:
        """What the script needs in addition to the flags."""
        if self.sequence_parallel == 1:
            return ()
        mesh = f"sp_size={self.sequence_parallel}, dp_shard_size={self.data_ranks(ranks)}"
        return (f'and pass ParallelismConfig({mesh}, sp_backend="deepspeed") to TrainingArguments',)


def with_batch(training: Training, micro: int | None, steps: int | None, total: int | None, ranks: int) -> Training:
    """Return the training with a batch of micro-batch, accumulation and samples per update; None is not given, and what
    does not follow from the others is searched.

    Raises:
        ConfigError: they contradict each other.
    """
    data_ranks = training.data_ranks(ranks)
    if total is None:
        return replace(training, micro_batch=micro or 1, accumulation=steps or 1, searches=micro is None)
    per = (micro or 1) * (steps or 1) * data_ranks
    if total % per or (micro is not None and steps is not None and total != per):
        shown = f"{micro or 'n'} x {steps or 'n'} x {data_ranks}"
        rule = f"global batch = micro-batch x accumulation x data ranks does not hold: {total} != {shown}"
        raise ConfigError(
            Problem("--global-batch", total, rule, f"give a multiple of {per}, or leave out another size")
        )
    if micro is None and steps is None:
        return replace(training, searches=True, global_batch=total)
    rest = total // per
    return replace(training, micro_batch=micro or rest, accumulation=steps or rest, global_batch=total)


def candidates(training: Training, *, ranks: int, separate: bool, per_host: int | None = None) -> Iterator[Candidate]:
    """Yield the candidates that differ on such a machine, in order of preference; without checkpointing first.

    Args:
        ranks: ranks that share the states, unless a candidate has smaller groups.
        per_host: ranks per host; default: all. Each of several hosts may have a copy of the states or, at stage 3,
            second shards.
    """
    ways = (False, True) if training.checkpointing is None else (training.checkpointing,)
    for each in PREFERRED:
        if "nvme" in (each.optimizer, each.parameters) and training.nvme_path is None:
            continue
        if not separate and "cpu" in (each.optimizer, each.parameters):
            continue  # host memory is where everything is
        if each.streams and not training.can_stream:
            continue
        if ranks == 1 and each.stage in (1, 2) and each != Candidate(2, optimizer="cpu"):
            continue  # nothing to shard: the same as stage 0
        for grouped in _grouped(each, ranks, per_host or ranks):
            yield from (replace(grouped, checkpointing=checkpointing) for checkpointing in ways)


def _grouped(each: Candidate, ranks: int, per_host: int) -> Iterator[Candidate]:
    yield each
    if each.stage == 0 or not 1 < per_host < ranks:
        return
    if each.stage == 3 and each.parameters is None:
        yield replace(each, second_shard=per_host)
    if not each.streams:
        yield replace(each, copy_per_host=True)


def ds_config(candidate: Candidate, training: Training) -> dict[str, Any]:
    """Return a complete ds.json; values that TrainingArguments also have are "auto"."""
    zero: dict[str, Any] = {"stage": candidate.stage, "overlap_comm": True, "reduce_bucket_size": "auto"}
    if candidate.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    for key, place in (("offload_optimizer", candidate.optimizer), ("offload_param", candidate.parameters)):
        if place is not None:
            zero[key] = {"device": place, "pin_memory": True}
            zero[key] |= {"nvme_path": training.nvme_path} if place == "nvme" else {}
    if candidate.ratio < 1:
        zero["offload_optimizer"]["ratio"] = candidate.ratio
    zero |= {"zero_hpz_partition_size": candidate.second_shard} if candidate.second_shard > 1 else {}
    config: dict[str, Any] = {"zero_optimization": zero}
    config |= {"hf_zero": {"shard_group": "host"}} if candidate.copy_per_host else {}
    config |= {"hf_zero": {"streaming": {"enabled": True}}} if candidate.streams else {}
    if training.precision != "fp32":
        config[training.precision] = {"enabled": "auto"}
    if training.optimizer.lower() != "adamw":
        config["optimizer"] = {"type": training.optimizer, "params": {"lr": "auto"}}
    config |= {"tensor_parallel": {"autotp_size": training.tensor_parallel}} if training.tensor_parallel > 1 else {}
    config |= {"sequence_parallel_size": training.sequence_parallel} if training.sequence_parallel > 1 else {}
    if training.expert_parallel > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": training.expert_parallel}
    keys = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
    return config | dict.fromkeys(keys.split(), "auto")


def for_long_sequences(config: dict[str, Any], tiling: TilingChoice, *, on_host: bool) -> dict[str, Any]:
    """Return a config with tiles, and with the inputs of checkpointed layers in host memory (`on_host`)."""
    own = {key: True for key, is_on in (("tiled_mlp", tiling.mlp), ("tiled_loss", tiling.loss)) if is_on}
    config = config | ({"hf_zero": {**config.get("hf_zero", {}), **own}} if own else {})
    return config | ({"activation_checkpointing": {"cpu_checkpointing": True}} if on_host else {})


def resolved(config: dict[str, Any], training: Training, model: PlannedModel, ranks: int) -> Resolved:
    """Resolve a config as an engine would.

    Raises:
        ConfigError: the config is invalid.
    """
    return resolve(config, training.view(), model=model.view, world_size=ranks)


def check_sizes(training: Training, ranks: int) -> None:
    """
    Raises:
        ConfigError: the ranks cannot be divided into groups of these sizes.
    """
    experts = training.expert_parallel
    resolve(ds_config(PREFERRED[min(1, experts - 1)], training), training.view(), world_size=ranks)
    if ranks % experts:
        rule = f"world size = data ranks x expert_parallel.autoep_size does not hold: {ranks} != n x {experts}"
        raise ConfigError(Problem("--expert-parallel", experts, rule, "give a divisor of the number of ranks"))
    if experts > 1 and training.neighbours > 1:
        rule = "experts, matrices and sequences exchange messages in different groups, and a plan counts one of them"
        raise ConfigError(Problem("--expert-parallel", experts, rule, "plan with only one of them"))


# The user's ds.json


def training_of(config: ConfigDict, training: Training, ranks: int) -> Training:
    """Return `training` with the settings of a ds.json, if it has them.

    Raises:
        ConfigError: the config is invalid.
    """
    views = Views(
        world_size=ranks,
        sequence_size=training.sequence_parallel if training.sequence_parallel > 1 else None,
        tensor_size=training.tensor_parallel if training.tensor_parallel > 1 else None,
    )
    examined = examine(config, views, complete=False)
    if examined.problems:
        raise ConfigError(examined.problems)
    micro, steps = examined.config.train_micro_batch_size_per_gpu, examined.config.gradient_accumulation_steps
    if examined.batch is not None and not {MICRO, STEPS} & examined.autos:
        micro, steps = examined.batch.micro_batch_size, examined.batch.accumulation_steps
    if training.global_batch is not None and (micro or steps):
        rule, fix = "the config has a batch of its own", 'leave out one of the two, or write "auto" in the config'
        raise ConfigError(Problem("--global-batch", training.global_batch, rule, fix))
    is_open = bool({"bf16.enabled", "fp16.enabled"} & examined.autos)
    clips = "gradient_clipping" in config and "gradient_clipping" not in examined.autos
    return replace(
        training,
        micro_batch=micro or training.micro_batch,
        searches=training.searches and micro is None,
        accumulation=steps or training.accumulation,
        precision=training.precision if is_open else model_dtype(examined.config),
        optimizer=training.optimizer if examined.optimizer is None else examined.optimizer.type,
        clip=examined.config.gradient_clipping if clips else training.clip,
        sequence_parallel=examined.sequence_size,
        tensor_parallel=examined.tensor_size,
        expert_parallel=service("expert_size")(examined.config)
        if "expert_parallel" in config
        else training.expert_parallel,
    )


def given_config(config: ConfigDict, training: Training) -> ConfigDict:
    """Return the ds.json with "auto" replaced by the values of `training`, as Trainer does."""
    filled = load_config(config)
    filled.update({MICRO: training.micro_batch, STEPS: training.accumulation})
    if is_auto(filled.get(TRAIN)):
        del filled[TRAIN]
    if is_auto(filled.get("gradient_clipping")):
        filled["gradient_clipping"] = training.clip
    for name in ("bf16", "fp16"):
        section = filled.get(name)
        if isinstance(section, dict) and is_auto(section.get("enabled")):
            filled[name] = {**section, "enabled": training.precision == name}
    return filled


def _place_of(section: OffloadOptimizer | OffloadParam | None) -> Literal["cpu", "nvme"] | None:
    return None if section is None else "nvme" if section.device == "nvme" else "cpu"


def candidate_of(answers: Resolved, *, checkpointing: bool) -> Candidate:
    zero = answers.zero
    return Candidate(
        zero.stage,
        optimizer=_place_of(zero.offload_optimizer),
        parameters=_place_of(zero.offload_param),
        checkpointing=checkpointing,
        copy_per_host=zero.shard_size == "host",
        second_shard=zero.gather_size if isinstance(zero.gather_size, int) else 1,
        is_given=True,
        streams=zero.streaming is not None,
        ratio=1.0 if zero.offload_optimizer is None else zero.offload_optimizer.first_ratio,
    )
