"""The resolver: turns a config and its context into typed, frozen policies, or reports all problems at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, cast

from hf_zero.config import policies
from hf_zero.config.batch import MICRO, STEPS, TRAIN, resolve_batch
from hf_zero.config.checks import SEQUENCE, advice, autocast_of, contradictions, model_dtype
from hf_zero.config.choices.groups import (
    GROUP_KEYS,
    TENSOR,
    gather_size_in,
    group_problems,
    shard_size_in,
    tensor_problems,
    tensor_size_in,
)
from hf_zero.config.choices.sections import resolve_optimizer, resolve_scheduler
from hf_zero.config.errors import FEATURES_PAGE, ConfigError, Edit, Problem, Remark
from hf_zero.config.extras import extra_named
from hf_zero.config.features import Sizes
from hf_zero.config.fill import fill, filled
from hf_zero.config.policies import BatchPolicy, Findings, Provenance
from hf_zero.config.schema import Root, Section, Verdict
from hf_zero.config.schema.fields import ALL_STAGES, verdict_of
from hf_zero.config.schema.root import HfZero
from hf_zero.config.schema.training import Aio, Amp, Bf16, DataTypes, Fp16
from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam, Zero
from hf_zero.config.sources import DEFAULT, AcceleratorView, ModelView, Source, TrainingView, Views, source_in
from hf_zero.config.validate import Translated, translate, validate

Place = TypeVar("Place", OffloadOptimizer, OffloadParam)
_BATCH_KEYS = (TRAIN, MICRO, STEPS)


def resolve(
    raw: Mapping[str, object],
    training_args: TrainingView | None = None,
    accelerator_view: AcceleratorView | None = None,
    model: ModelView | None = None,
    *,
    world_size: int,
    host_sizes: tuple[int, ...] = (),
    sequence_size: int | None = None,
    tensor_size: int | None = None,
) -> policies.Resolved:
    """Resolve a config: fill in every open value and validate the result.

    Args:
        raw: the config as a dict. If it comes from `load_config`, messages name file and line.
        training_args: TrainingArguments, if there is a Trainer.
        accelerator_view: the values from a launcher, an Accelerator and the objects given to `prepare`.
        model: the model, for sizes that depend on it.
        world_size: the number of ranks.
        host_sizes: the number of ranks of each host, if known.
        sequence_size: the number of ranks that share a sequence, from an mpu or a mesh; default: the config's key.
        tensor_size: the tensor-parallel size, if a program sets it; default: the config's key.

    Raises:
        ConfigError: the config is invalid; lists all problems.
    """
    views = Views(
        world_size=world_size,
        host_sizes=host_sizes,
        training=training_args,
        accelerator=accelerator_view,
        model=model,
        sequence_size=sequence_size,
        tensor_size=tensor_size,
    )
    findings = examine(raw, views)
    if findings.problems:
        raise ConfigError(findings.problems)
    return _resolved(findings, raw)


def examine(raw: Mapping[str, object], views: Views, *, complete: bool = True) -> Findings:
    """Validate a config and collect all findings.

    Args:
        complete: whether all values are known. Otherwise an unfilled "auto" is not a problem.
    """
    _check_call(raw, views.world_size)
    changes = fill(raw, views)
    translated = translate(filled(raw, changes) if changes.values else raw)
    origins = Origins(raw, changes.sources, translated.renamed)
    config, invalid = validate(translated.tree)
    stage = (config.zero_optimization or Zero()).stage
    # An invalid stage is reported separately; the other keys must be checked in spite of it.
    verdicts = judge(config, stage if stage in ALL_STAGES else max(ALL_STAGES), origins.is_written)
    findings = [*invalid, *verdicts, *advice(config)]
    unfilled = '"auto" was not filled in; treated as unset'
    remarks = [*translated.remarks, *(Remark(path, unfilled, "auto") for path in sorted(translated.autos))]
    remarks += [finding for finding in findings if isinstance(finding, Remark)]
    problems = [*translated.problems, *changes.problems]
    problems += [finding for finding in findings if isinstance(finding, Problem)]
    sequence_size = views.sequence_size or config.sequence_parallel_size
    problems += contradictions(config, views.world_size, sequence_size)
    tensor_size = views.tensor_size or tensor_size_in(config)
    problems += tensor_problems(config, views.world_size, sequence_size, tensor_size)
    problems += group_problems(config, views.world_size, views.host_sizes, tensor_size)
    broken = {problem.path for problem in problems}
    batch, wrong = _batch(config, translated, views.world_size, sequence_size, broken)
    data_ranks = views.world_size // (sequence_size * tensor_size) or 1
    for sizes in _decided_sizes(config, data_ranks, origins, tensor_size):
        batch = sizes.batch and dataclasses.replace(sizes.batch, drop_last=config.dataloader_drop_last)
        wrong = []
        problems += sizes.problems
    if complete or not {TRAIN, MICRO} & translated.autos:
        problems += wrong
    optimizer, wrong = resolve_optimizer(config.optimizer, translated.autos)
    problems += wrong
    scheduler, wrong = resolve_scheduler(config.scheduler, translated.autos)
    problems += wrong
    extras = {extra.name: extra.examine(config) for extra in config.features if extra.examine is not None}
    problems += [problem for examined in extras.values() for problem in examined.problems]
    remarks += [remark for examined in extras.values() for remark in examined.remarks]
    if config.hf_zero is not None and config.hf_zero.strict:
        problems += [_as_problem(remark) for remark in remarks if remark.ignored]
    return Findings(
        config=config,
        batch=batch,
        optimizer=optimizer,
        scheduler=scheduler,
        extras={name: examined.policy for name, examined in extras.items() if examined.policy is not None},
        problems=tuple(with_origins(problems, origins)),
        remarks=tuple(remarks),
        provenance=MappingProxyType(record(config, batch, origins)),
        autos=frozenset(translated.autos),
        world_size=views.world_size,
        sequence_size=sequence_size,
        tensor_size=tensor_size,
    )


def _decided_sizes(config: Root, data_ranks: int, origins: Origins, tensor_size: int) -> Iterator[Sizes]:
    """Yield the sizes from extras that determine batch sizes."""
    for extra in config.features:
        sizes = extra.sizes(config, data_ranks, origins.is_written, tensor_size) if extra.sizes is not None else None
        if sizes is not None:
            yield sizes


def _check_call(raw: object, world_size: object) -> None:
    if not isinstance(raw, Mapping):
        raise ConfigError(Problem("config", raw, "must be a dict", "load files and text with load_config first"))
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(Problem("world_size", world_size, "must be the number of ranks", "give an int of at least 1"))


def _as_problem(remark: Remark) -> Problem:
    fix = "remove it, or set hf_zero.strict to false to have it ignored with a warning"
    return Problem(remark.path, remark.value, remark.text, fix, edit=remark.edit)


def _batch(
    config: Root, translated: Translated, world_size: int, sequence_size: int, broken: set[str]
) -> tuple[policies.BatchPolicy | None, list[Problem]]:
    if broken & {*_BATCH_KEYS, SEQUENCE, TENSOR}:
        return None, []  # checking the equation would repeat these problems
    try:
        batch = resolve_batch(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            world_size=world_size,
            sequence_size=sequence_size,
            autos=translated.autos,
        )
    except ConfigError as error:
        return None, list(error.problems)
    return dataclasses.replace(batch, drop_last=config.dataloader_drop_last), []


def _resolved(findings: Findings, raw: Mapping[str, object]) -> policies.Resolved:
    config = findings.config
    return policies.Resolved(
        **{field.name: getattr(findings, field.name) for field in dataclasses.fields(findings)},
        precision=_precision(config, findings.sequence_size),
        zero=_zero(config.section(Zero), config.section(Aio), config.section(HfZero), findings),
        gradients=_gradients(config, findings.world_size),
        raw=cast("dict[str, object]", raw),
    )


def resolve_for_init(raw: Mapping[str, object], world_size: int, host_sizes: tuple[int, ...]) -> policies.InitPolicy:
    """Return the policy for building a model, from a config that may have unfilled autos.

    Raises:
        ConfigError: errors in dtypes and shard groups. Others are reported when all values are known.
    """
    findings = examine(raw, Views(world_size=world_size, host_sizes=host_sizes), complete=False)
    dtypes = ("bf16", "fp16", "data_types")
    wrong = [one for one in findings.problems if one.path in GROUP_KEYS or one.path.startswith(dtypes)]
    if wrong:
        raise ConfigError(wrong)
    config, zero = findings.config, findings.config.section(Zero)
    return policies.InitPolicy(
        precision=_precision(config),
        shard_size=shard_size_in(zero, config.section(HfZero)),
        offload=_placed(zero.offload_param if zero.stage == 3 else None),
        files=config.section(Aio),
    )


def resolve_extra(raw: Mapping[str, object], name: str) -> Any:
    """Return the policy of one of our extras, from a config that may have unfilled autos (before Trainer fills them),
    or None if the config does not use the extra.

    Raises:
        ConfigError: its sections have problems.
        ExtraMissing: it is not installed.
    """
    findings = examine(raw, Views(world_size=1), complete=False)
    paths = tuple(section.path for section in extra_named(name).sections)
    wrong = [problem for problem in findings.problems if problem.path.startswith(paths)]
    if wrong:
        raise ConfigError(wrong)
    return findings.extras.get(name)


def _zero(zero: Zero, aio: Aio, own: HfZero, findings: Findings) -> policies.ZeroPolicy:
    streaming, states = findings.extras.get("streaming"), _placed(zero.offload_optimizer)
    if streaming is not None and states is None and zero.offload_param is not None:
        states = OffloadOptimizer(device="cpu", pin_memory=zero.offload_param.pin_memory)
    return policies.ZeroPolicy(
        stage=zero.stage,
        shard_size=shard_size_in(zero, own),
        gather_size=gather_size_in(zero, own),
        hops=own.hops,
        bucket_numel=min(zero.reduce_bucket_size, zero.allgather_bucket_size),
        bucket_is_given=not zero.model_fields_set.isdisjoint(("reduce_bucket_size", "allgather_bucket_size")),
        overlap_reduction=zero.overlap_comm is not False,
        sparse_gradients=findings.config.sparse_gradients,
        require_all_gradients=not zero.ignore_unused_parameters,
        sub_group_numel=zero.sub_group_size,
        keys=zero,
        follows_plans=own.gather_order == "planned",
        gradient_bits=own.quantized_gradient_bits if zero.stage == 3 and zero.zero_quantized_gradients else None,
        optimizer_sees=own.optimizer_sees,
        offload_optimizer=states,
        offload_param=_placed(zero.offload_param if zero.stage == 3 else None),
        offload_threads=own.offload_threads,
        streaming=streaming,
        files=aio,
    )


def _placed(section: Place | None) -> Place | None:
    """Return the section, or None if it does not offload anything."""
    return None if section is None or section.device in (None, "none") else section


def _precision(config: Root, sequence_size: int = 1) -> policies.PrecisionPolicy:
    fp16, bf16, types = config.fp16 or Fp16(), config.bf16 or Bf16(), config.data_types or DataTypes()
    autocast = autocast_of(config)
    loss_scale = _loss_scale(config, autocast)
    kept = types.keep_in_fp32_modules
    communication = config.communication_data_type
    if sequence_size > 1:
        communication = config.seq_parallel_communication_data_type or communication
    return policies.PrecisionPolicy(
        model=model_dtype(config),
        communication=communication,
        accumulation=types.grad_accum_dtype,
        skip_nonfinite=bf16.check_grad_overflow or loss_scale is not None,
        auto_cast_inputs=fp16.enabled and fp16.auto_cast,
        loss_scale=loss_scale,
        autocast=autocast,
        low_precision_masters=bf16.bf16_master_weights_and_grads or fp16.fp16_master_weights_and_grads,
        low_precision_states=bf16.bf16_optimizer_states,
        rounds_stochastically=config.hf_zero is not None and config.hf_zero.stochastic_rounding,
        buffers=types.buffer_dtype,
        kept_buffers=None if kept == "auto" else tuple(kept),
    )


def _loss_scale(config: Root, autocast: policies.AutocastPolicy | None) -> policies.LossScalePolicy | None:
    fp16, amp = config.fp16 or Fp16(), config.amp or Amp()
    if fp16.enabled:
        return policies.LossScalePolicy(
            fixed=fp16.loss_scale or None,
            initial=2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            minimum=float(fp16.min_loss_scale),
            hysteresis=fp16.hysteresis,
            consecutive=fp16.consecutive_hysteresis,
        )
    if autocast is None or autocast.dtype != "fp16":
        return None
    # The initial scale of torch's GradScaler.
    fixed = None if amp.loss_scale == "dynamic" else float(amp.loss_scale)
    minimum = 1.0 if amp.min_loss_scale is None else amp.min_loss_scale
    return policies.LossScalePolicy(fixed=fixed or None, window=2000, hysteresis=1, minimum=minimum)


def _gradients(config: Root, world_size: int) -> policies.GradientPolicy:
    return policies.GradientPolicy(
        clip_norm=config.gradient_clipping,
        average=config.gradient_allreduce_op == "mean",
        predivide=float(world_size) if config.prescale_gradients else config.gradient_predivide_factor,
    )


# Provenance of every key: the source of its value, and whether it has an effect. No key is ignored silently: every key
# that is set is supported, noted as without effect, or refused with the reason.

BATCH_FIELDS = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
}
_WITH_DEFAULT = ("supported", "check")


@dataclass(frozen=True, slots=True)
class Origins:
    """Looks up the source of the value at a path."""

    raw: Mapping[str, object]
    filled: Mapping[str, Source]
    renamed: Mapping[str, str]  # current path -> path in the file

    def of(self, path: str) -> Source:
        for new, old in self.renamed.items():
            if path == new or path.startswith(f"{new}."):
                written = old + path[len(new) :]
                path = written if source_in(self.raw, written).kind != "dict" else old
        return self.filled.get(path) or source_in(self.raw, path)

    def is_written(self, path: str) -> bool:
        """Whether the author of the config wrote this value, as opposed to a filled "auto"."""
        return self.of(path).kind in ("file", "text", "dict")

    def words(self, path: str) -> str:
        """Describe the source for a message; `path` may list several paths. Empty for a plain dict."""
        sources = [self.of(part.partition("[")[0]) for part in path.split(", ")]
        return ", ".join(str(source) for source in sources if source.kind not in ("dict", "default"))


def with_origins(problems: Iterable[Problem], origins: Origins) -> list[Problem]:
    """Add the source of its value to each problem."""
    return [
        problem if problem.origin else dataclasses.replace(problem, origin=origins.words(problem.path))
        for problem in problems
    ]


def record(config: Root, batch: BatchPolicy | None, origins: Origins) -> dict[str, Provenance]:
    """Return provenance by path in schema order: all keys that were set, and the defaults of supported keys."""
    entries = {entry.path: entry for entry in _entries(config, "", origins)}
    for path, field in BATCH_FIELDS.items():
        if batch is not None and getattr(config, path) is None:
            derived = Source("derived", "train_batch_size = micro batch x accumulation steps x world size")
            entries[path] = Provenance(path=path, value=getattr(batch, field), source=derived)
    return entries


def _entries(section: Section, prefix: str, origins: Origins) -> Iterator[Provenance]:
    for name, field in type(section).model_fields.items():
        value, path = getattr(section, name), prefix + name
        if isinstance(value, Section):
            yield from _entries(value, f"{path}.", origins)
        elif name not in section.model_fields_set:
            if verdict_of(field).kind in _WITH_DEFAULT:
                yield Provenance(path=path, value=value, source=DEFAULT)
        elif isinstance(value, dict) and value:
            for key, inner in value.items():
                shown = inner.model_dump(exclude_unset=True) if isinstance(inner, Section) else inner
                yield Provenance(path=f"{path}.{key}", value=shown, source=origins.of(f"{path}.{key}"))
        else:
            yield Provenance(path=path, value=value, source=origins.of(path))


Finding = Problem | Remark
IsWritten = Callable[[str], bool]  # whether the author wrote the value at a path, as opposed to a filled "auto"
Path = tuple[str, ...]


def judge(section: Section, stage: int, is_written: IsWritten, around: Path = ()) -> Iterator[Finding]:
    """Yield a finding for every key that the user set and that is ignored or refused."""
    for name, field in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        value, verdict, path = getattr(section, name), verdict_of(field), (*around, name)
        ignored = not verdict.met and is_written(".".join(path)) and _asks(value, field.default)
        if stage not in verdict.stages:
            # The key's name contains the stage, and a config for several stages is not a mistake.
            ignored = ignored and not name.startswith("stage3_")
            yield _without_effect(path, value, _elsewhere(verdict, stage), ignored)
        elif verdict.kind == "ignored":
            yield _without_effect(path, value, f"no effect, {verdict.why}", ignored)
        elif verdict.kind == "unsupported":
            yield from _refusal(path, value, field.default, verdict)
        elif isinstance(value, Section):
            yield from judge(value, stage, is_written, path)


def _without_effect(path: Path, value: object, text: str, ignored: bool) -> Remark:
    shown = value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
    return Remark(".".join(path), text, shown, ignored=ignored, edit=Edit(path))


def _elsewhere(verdict: Verdict, stage: int) -> str:
    why = f"; {verdict.why}" if verdict.kind == "supported" and verdict.why else ""
    return f"no effect at stage {stage} (used at {_stages(verdict)}){why}"


def _asks(value: object, default: object) -> bool:
    """Whether a value requests something other than the default. A section that is switched off does not."""
    if not isinstance(value, Section):
        return value != default
    if getattr(value, "device", "") in (None, "none") or getattr(value, "enabled", None) is False:
        return False
    fields = type(value).model_fields
    return any(_asks(getattr(value, name), fields[name].default) for name in value.model_fields_set)


def _stages(verdict: Verdict) -> str:
    stages = [str(stage) for stage in verdict.stages]
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages)}"


def _refusal(around: Path, value: object, default: object, verdict: Verdict) -> Iterator[Problem]:
    path, rule = ".".join(around), f"not available: {verdict.why}"
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True) or {}
    if isinstance(value, dict):
        if verdict.switch is None:
            yield Problem(path, value, rule, f"remove the section, also if it is empty; see {FEATURES_PAGE}")
        elif not _is_off(value, verdict.switch):
            off = f'set "{verdict.switch}": false in it' if verdict.switch else "leave it empty"
            yield Problem(path, value, rule, f"remove the section or {off}; see {FEATURES_PAGE}")
    elif value != default:
        keep = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
        yield Problem(path, value, rule, f"remove it or set {keep}; see {FEATURES_PAGE}")


def _is_off(section: dict[str, object], switch: str) -> bool:
    """Whether no switch in the section is on, at any depth; without a switch, whether the section is empty."""
    return not any(_switches(section, switch)) if switch else not section


def _switches(value: object, switch: str) -> Iterator[bool]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == switch:
                yield not _says_off(inner)
            else:
                yield from _switches(inner, switch)
    elif isinstance(value, list):
        for inner in value:
            yield from _switches(inner, switch)


def _says_off(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() in ("", "false")
    return value is None or (isinstance(value, (bool, int, float)) and not value)
