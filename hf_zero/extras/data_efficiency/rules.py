"""Checks the sections of data efficiency, and derives their policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from hf_zero.config.errors import ABSENT, Edit, Finding, Problem, Remark, key_path
from hf_zero.config.rules import Ranks, Several
from hf_zero.extras.data_efficiency.section import (
    CurriculumLearning,
    CurriculumMetric,
    DataEfficiency,
    DataPolicy,
    DataRouting,
    DataSampling,
    DifficultyPolicy,
    LtdSchedule,
    LtdScheduleConfig,
    MetricPolicy,
    PackingPolicy,
    RandomLTDPolicy,
    RandomLTDSection,
    SamplingPolicy,
    ScheduleConfig,
)

_SCHEDULE_KEYS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
# Metrics that change batches, and whose difficulty is a length.
TRUNCATE, RESHAPE = "seqlen_truncate", "seqlen_reshape"


@dataclass(slots=True)
class Examined:
    """Findings about the sections; the policy is None if they are off or have problems."""

    problems: list[Problem] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    policy: DataPolicy | None = None


def _findings(config: Any, ranks: Ranks) -> Iterator[Finding]:
    examined = _examine(config)
    yield from examined.problems
    yield from examined.remarks


def policy_of(config: Any) -> DataPolicy | None:
    return _examine(config).policy


RULES = (Several(every=_findings),)


def _examine(config: Any) -> Examined:
    """Check all sections; a feature with problems has no policy."""
    examined = Examined()
    efficiency = config.data_efficiency or DataEfficiency()
    sampling, routing = _switched_on(efficiency, examined)
    drop = config.progressive_layer_drop
    policy = DataPolicy(
        sequence_length=_sequence_length(config.curriculum_learning, examined),
        sampling=_sampling(sampling, efficiency.seed, examined),
        packing=packing_of(sampling, efficiency.seed, examined.problems),
        random_ltd=_random_ltd(routing, efficiency.seed, examined),
        layer_drop=drop if drop is not None and drop.enabled else None,
    )
    if policy.random_ltd is not None and policy.layer_drop is not None:
        rule = "both drop work of layers"
        paths = "progressive_layer_drop, data_efficiency.data_routing.random_ltd"
        examined.problems.append(Problem(paths, True, rule, "disable one of them"))
    examined.policy = None if policy == DataPolicy() else policy
    return examined


_FEATURES = {"data_sampling": ("curriculum_learning", "dynamic_batching"), "data_routing": ("random_ltd",)}


def _switched_on(section: DataEfficiency, examined: Examined) -> tuple[DataSampling | None, DataRouting | None]:
    """The enabled subsections: an outer `enabled` disables them only if it is false, not if it is absent."""
    parts: list[Any] = []
    for name, features in _FEATURES.items():
        part = getattr(section, name)
        off = "data_efficiency" if section.enabled is False else None
        if off is None and part is not None and part.enabled is False:
            off = f"data_efficiency.{name}"
        for feature in features if part is not None and off is not None else ():
            own = getattr(part, feature)
            if own is not None and own.enabled:
                path, text = f"data_efficiency.{name}.{feature}.enabled", f"no effect, {off}.enabled is false"
                examined.remarks.append(Remark(path, text, True, ignored=True))
        parts.append(None if off is not None else part)
    return parts[0], parts[1]


def _sequence_length(section: CurriculumLearning | None, examined: Examined) -> DifficultyPolicy | None:
    path = "curriculum_learning"
    if section is None or not section.model_fields_set:
        return None
    if section.enabled is None:
        rule = "must be given, as in DeepSpeed"
        examined.problems.append(Problem(f"{path}.enabled", ABSENT, rule, "write true or false"))
    if not section.enabled:
        return None
    if section.curriculum_type is None:
        examined.problems.append(_missing(f"{path}.curriculum_type", "set it to seqlen", "seqlen"))
    elif section.curriculum_type != "seqlen":
        rule = "seqlen is the only metric that this section supports, as in DeepSpeed"
        fix = "set seqlen, or choose samples by other metrics in data_efficiency.data_sampling"
        examined.problems.append(Problem(f"{path}.curriculum_type", section.curriculum_type, rule, fix))
    return _difficulty(section, path, examined)


def _missing(path: str, fix: str, value: object = ABSENT) -> Problem:
    edit = None if value is ABSENT else Edit.at(path, value)
    return Problem(path, ABSENT, "must be given if the feature is enabled", fix, edit=edit)


def _difficulty(
    section: CurriculumLearning | CurriculumMetric, path: str, examined: Examined
) -> DifficultyPolicy | None:
    numbers = section.schedule_config or ScheduleConfig()
    missing = [name for name in ("min_difficulty", "max_difficulty") if getattr(section, name) is None]
    kind = section.schedule_type
    inner = [f"schedule_config.{name}" for name in _SCHEDULE_KEYS[kind or "custom"] if getattr(numbers, name) is None]
    problems = [_missing(f"{path}.{name}", "write a number, or a list of them") for name in (*missing, *inner)]
    if kind is None:
        problems.append(_missing(f"{path}.schedule_type", "fixed_linear is usual"))
    low, high = section.min_difficulty, section.max_difficulty
    if low is not None and high is not None and low > high:
        problems.append(Problem(f"{path}.min_difficulty", low, f"is more than max_difficulty = {high}", "swap them"))
    if not problems and kind == "fixed_discrete":
        problems += _discrete_problems(numbers, f"{path}.schedule_config")
    examined.problems += problems
    if problems or kind is None or low is None or high is None:
        return None
    return DifficultyPolicy(
        schedule=kind,
        minimum=low,
        maximum=high,
        total_steps=numbers.total_curriculum_step or 1,
        multiple=numbers.difficulty_step or 1,
        degree=(numbers.root_degree or 1) if kind == "fixed_root" else 1,
        difficulties=tuple(numbers.difficulty or ()),
        last_steps=tuple(numbers.max_step or ()),
    )


def difficulty_of(config: Mapping[str, Any]) -> tuple[DifficultyPolicy | None, list[Problem]]:
    """The schedule in a dict of min_difficulty, max_difficulty, schedule_type and schedule_config; other keys are
    ignored."""
    examined = Examined()
    known = {str(key): value for key, value in config.items() if key in CurriculumMetric.model_fields}
    try:
        policy = _difficulty(CurriculumMetric.model_validate(known), "curriculum", examined)
    except ValidationError as error:
        return None, list(_worded(error, known, "curriculum"))
    return policy, examined.problems


def _discrete_problems(numbers: ScheduleConfig, path: str) -> Iterator[Problem]:
    steps, values = numbers.max_step or [], numbers.difficulty or []
    if not steps or len(values) != len(steps) + 1:
        rule = f"must have one entry less than difficulty ({len(values)}), and at least one"
        yield Problem(f"{path}.max_step", steps, rule, "the last difficulty has no last update")
    elif steps != sorted(steps):
        yield Problem(f"{path}.max_step", steps, "must be ascending", "sort it, with its difficulties")


def _sampling(section: DataSampling | None, seed: int, examined: Examined) -> SamplingPolicy | None:
    path = "data_efficiency.data_sampling.curriculum_learning"
    if section is None or section.curriculum_learning is None or not section.curriculum_learning.enabled:
        return None
    given = section.curriculum_learning.curriculum_metrics
    if not given:
        examined.problems.append(_missing(f"{path}.curriculum_metrics", "write at least one metric"))
        return None
    before = len(examined.problems)
    metrics = [_metric(str(name), value, f"{path}.curriculum_metrics", examined) for name, value in given.items()]
    lengths = [metric for metric in (TRUNCATE, RESHAPE) if metric in given]
    if len(lengths) > 1:
        rule = "both change the length of the same batches"
        examined.problems.append(Problem(f"{path}.curriculum_metrics", lengths, rule, "keep one of them"))
    if len(examined.problems) > before:
        return None
    return SamplingPolicy(
        seed=seed,
        num_epochs=section.num_epochs,
        num_workers=section.num_workers,
        metrics=tuple(metric for metric in metrics if metric is not None),
    )


def _metric(name: str, value: object, around: str, examined: Examined) -> MetricPolicy | None:
    path = key_path(around, name)
    if not isinstance(value, Mapping):
        examined.problems.append(Problem(path, value, "must be an object {...}", "write the metric's settings"))
        return None
    try:
        metric = CurriculumMetric.model_validate({str(key): entry for key, entry in value.items()})
    except ValidationError as error:
        examined.problems += _worded(error, value, path)
        return None
    difficulty = _difficulty(metric, path, examined)
    chooses = metric.clustering_type != "single_cluster"
    wanted = ["clustering_type"] + (["difficulty_type", "index_to_sample_path"] if chooses else [])
    if chooses and metric.difficulty_type == "value":
        wanted.append("index_to_metric_path")
    missing = [_missing(f"{path}.{key}", "see docs/data_efficiency.md") for key in wanted if not getattr(metric, key)]
    examined.problems += missing
    if difficulty is None or missing:
        return None
    return MetricPolicy(
        name=name,
        difficulty=difficulty,
        by_percentile=metric.difficulty_type == "percentile",
        chooses_samples=chooses,
        index_to_sample=metric.index_to_sample_path or "",
        index_to_metric=metric.index_to_metric_path or "",
    )


def _worded(error: ValidationError, value: Mapping[Any, Any], path: str) -> Iterator[Problem]:
    for entry in error.errors(include_url=False, include_context=True, include_input=False):
        place, given = path, value
        for step in entry["loc"]:
            place = key_path(place, str(step)) if isinstance(step, str) else f"{place}[{step}]"
            given = given.get(step, ABSENT) if isinstance(given, Mapping) else given
        unknown = entry["type"] == "extra_forbidden"
        rule = "a metric has no such key" if unknown else str(entry["msg"]).removeprefix("Value error, ")
        names = ", ".join(CurriculumMetric.model_fields)
        yield Problem(place, given, rule, f"a metric has {names}" if unknown else "correct it")


def _random_ltd(section: DataRouting | None, seed: int, examined: Examined) -> RandomLTDPolicy | None:
    path = "data_efficiency.data_routing.random_ltd"
    if section is None or section.random_ltd is None or not section.random_ltd.enabled:
        return None
    own: RandomLTDSection = section.random_ltd
    schedule = own.random_ltd_schedule or LtdSchedule()
    numbers = schedule.schedule_config or LtdScheduleConfig()
    required: dict[str, Any] = {
        name: getattr(own, name) for name in "total_layer_num random_ltd_layer_id model_type hidden_state_order".split()
    }
    inner = {name: getattr(schedule, name) for name in ("min_value", "max_value", "schedule_type")}
    inner |= {f"schedule_config.{name}": getattr(numbers, name) for name in ("require_steps", "seq_per_step")}
    required |= {f"random_ltd_schedule.{name}": value for name, value in inner.items()}
    problems = [_missing(f"{path}.{name}", "see docs/data_efficiency.md") for name, v in required.items() if v is None]
    problems += _ltd_problems(own, schedule, path)
    examined.problems += problems
    if problems:
        return None
    assert own.total_layer_num and own.random_ltd_layer_id is not None, "asked for above"
    assert schedule.min_value and schedule.max_value and numbers.require_steps and numbers.seq_per_step
    return RandomLTDPolicy(
        num_layers=own.total_layer_num,
        layer_ids=tuple(sorted(own.random_ltd_layer_id)),
        mask_name=own.model_mask_name,
        sequence_first=own.hidden_state_order == "seq_batch_dim",
        min_tokens=schedule.min_value,
        max_tokens=schedule.max_value,
        total_steps=numbers.require_steps,
        multiple=numbers.seq_per_step,
        scales_schedule=own.layer_token_lr_schedule is not None and own.layer_token_lr_schedule.enabled,
        seed=seed,
    )


def _ltd_problems(own: RandomLTDSection, schedule: LtdSchedule, path: str) -> Iterator[Problem]:
    ids, total = own.random_ltd_layer_id, own.total_layer_num
    if ids is not None and own.random_ltd_layer_num not in (None, len(ids)):
        rule = f"random_ltd_layer_id lists {len(ids)} layers"
        name, fix = f"{path}.random_ltd_layer_num", f"write {len(ids)}, or remove it"
        yield Problem(name, own.random_ltd_layer_num, rule, fix, edit=Edit.at(name, len(ids)))
    if ids is not None and len(set(ids)) < len(ids):
        yield Problem(f"{path}.random_ltd_layer_id", ids, "lists a layer twice", "list every layer once")
    if ids and total is not None and max(ids) >= total:
        rule = f"layers are numbered from 0 to {total - 1} (total_layer_num = {total})"
        yield Problem(f"{path}.random_ltd_layer_id", ids, rule, "correct the list")
    low, high = schedule.min_value, schedule.max_value
    if low is not None and high is not None and low > high:
        rule = f"is more than max_value = {high}"
        yield Problem(f"{path}.random_ltd_schedule.min_value", low, rule, "swap them")


_PATH = "data_efficiency.data_sampling.dynamic_batching"


def packing_of(section: DataSampling | None, seed: int, problems: list[Problem]) -> PackingPolicy | None:
    """The policy of dynamic_batching; None if it is disabled or invalid. Adds to `problems`."""
    given = None if section is None else section.dynamic_batching
    if section is None or given is None or not given.enabled:
        return None
    if given.max_tokens is None:
        rule, fix = "is required if dynamic_batching is enabled", "set the maximum number of tokens per pack"
        problems.append(Problem(f"{_PATH}.max_tokens", ABSENT, rule, fix))
        return None
    if given.max_batch_size is not None and given.max_batch_size < given.min_batch_size:
        rule = f"must be at least min_batch_size ({given.min_batch_size})"
        problems.append(Problem(f"{_PATH}.max_batch_size", given.max_batch_size, rule, "raise it"))
        return None
    if section.curriculum_learning is not None and section.curriculum_learning.enabled:
        rule = "both choose the samples of a batch"
        paths = "data_efficiency.data_sampling.dynamic_batching, data_efficiency.data_sampling.curriculum_learning"
        problems.append(Problem(paths, True, rule, "disable one of them"))
        return None
    return PackingPolicy(
        max_tokens=given.max_tokens,
        min_samples=given.min_batch_size,
        max_samples=given.max_batch_size,
        order=given.sequence_picking_order,
        seed=seed,
    )
