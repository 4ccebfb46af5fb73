"""Stage 6: what the engine and other packages read, the findings or the policies of a config.

A policy is made beside the sections whose values it has.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from hf_zero.config.draft import Draft, Path
from hf_zero.config.errors import ConfigError, Problem, Remark
from hf_zero.config.rules import Ranks
from hf_zero.config.schema.batch import MICRO, SEQUENCE, STEPS, TENSOR, TRAIN, BatchPolicy
from hf_zero.config.schema.fields import S, Section, verdict_of
from hf_zero.config.schema.optimizer import Optimizer, OptimizerPolicy, Scheduler, SchedulerPolicy
from hf_zero.config.schema.precision import PrecisionPolicy, precision_of
from hf_zero.config.schema.root import GradientPolicy, Root
from hf_zero.config.schema.zero import Zero, ZeroPolicy, zero_of
from hf_zero.config.sources import DEFAULT, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The final value of a key and its source."""

    path: str
    value: object
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results of examining a valid or invalid config."""

    config: Root  # typed, without the invalid keys; see `section`
    batch: BatchPolicy | None  # None: not enough is known to derive it
    optimizer: OptimizerPolicy | None
    scheduler: SchedulerPolicy | None
    extras: Mapping[str, Any]  # policies of the enabled features by name
    problems: tuple[Problem, ...]
    remarks: tuple[Remark, ...]
    provenance: Mapping[str, Provenance]  # by key path: value and origin
    autos: frozenset[str]  # the keys that are still "auto"
    filled: Mapping[Path, tuple[object, Source | None]]  # by path in the config as given: what was filled in
    world_size: int
    sequence_size: int  # ranks that share each sequence
    tensor_size: int  # ranks that hold parts of the same matrices

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on keys: settings without effect, old names, unfilled autos."""
        return tuple(str(remark) for remark in self.remarks if not remark.ignored)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Requested settings that have no effect, each with the reason."""
        return tuple(str(remark) for remark in self.remarks if remark.ignored)

    def absent_folders(self) -> Iterator[Problem]:
        """Yield a problem for each drive's folder that this machine lacks.

        They are not among `problems`, because a config may be examined on another machine than those that train.
        """
        zero = self.config.section(Zero)
        for name, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
            section = getattr(zero, name)
            folder = None if section is None or section.device != "nvme" else section.nvme_path
            if folder and folder != "none" and zero.stage in stages and not os.path.isdir(folder):
                path = f"zero_optimization.{name}.nvme_path"
                source = self.provenance[path].source
                origin = "" if source.kind in ("dict", "default") else str(source)
                rule, fix = "is not an existing folder of this machine", "mount the drive, or create the folder"
                yield Problem(path, folder, rule, fix, origin=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Findings):
    """A resolved config, which has no problems, and no "auto" except in `raw`."""

    batch: BatchPolicy
    precision: PrecisionPolicy
    zero: ZeroPolicy
    gradients: GradientPolicy
    raw: dict[str, object]  # the user's own dict, untouched, for `engine.config`

    @property
    def features(self) -> tuple[str, ...]:
        """The functions, as "module:function", that create the training features which the config enables."""
        enabled = (extra for extra in self.config.features if extra.name in self.extras)
        return tuple(target for extra in enabled for target in extra.features)

    @property
    def samples_per_update(self) -> int:
        """The number of distinct samples: those of a tensor-parallel group count once."""
        return self.batch.train_batch_size // self.tensor_size

    @property
    def accumulates(self) -> bool:
        """Whether an update may have several backward passes."""
        return self.batch.accumulation_steps > 1 or not self.config.managed_gradient_accumulation

    def section(self, kind: type[S]) -> S:
        """Return the section of this class, or its defaults if the config does not have it."""
        return self.config.section(kind)


def decide(draft: Draft, ranks: Ranks) -> Findings:
    """Return everything about a config that has passed all stages. Parts with problems have no policy."""
    config, problems = draft.config, draft.problems()
    broken = {path for problem in problems for path in problem.unusable}

    def is_right(*sections: str) -> bool:
        return not any(path == name or path.startswith(f"{name}.") for path in broken for name in sections)

    batch = ranks.sizes.batch if ranks.sizes is not None else None
    if ranks.sizes is None and is_right(TRAIN, MICRO, STEPS, SEQUENCE, TENSOR):
        batch = config.batch(ranks)
    extras = {
        extra.name: extra.policy(config)
        for extra in config.features
        if extra.policy is not None and is_right(*(section.path for section in extra.sections))
    }
    return Findings(
        config=config,
        batch=batch and dataclasses.replace(batch, drop_last=config.dataloader_drop_last),
        optimizer=config.section(Optimizer).policy if is_right("optimizer") else None,
        scheduler=config.section(Scheduler).policy if is_right("scheduler") else None,
        extras={name: policy for name, policy in extras.items() if policy is not None},
        problems=problems,
        remarks=tuple(finding for finding in draft.findings if isinstance(finding, Remark)),
        provenance=MappingProxyType(_record(draft, batch)),
        autos=draft.autos,
        filled={tuple(draft.written(".".join(path)).split(".")): entry for path, entry in draft.filled.items()},
        world_size=ranks.world_size,
        sequence_size=ranks.sequence_size,
        tensor_size=ranks.tensor_size,
    )


def resolved(findings: Findings, raw: Mapping[str, object]) -> Resolved:
    """Return all policies of a config.

    Raises:
        ConfigError: it has problems; lists all of them.
    """
    if findings.problems:
        raise ConfigError(findings.problems)
    config = findings.config
    return Resolved(
        **{field.name: getattr(findings, field.name) for field in dataclasses.fields(findings)},
        precision=precision_of(config, findings.sequence_size),
        zero=zero_of(config, findings.extras.get("streaming")),
        gradients=config.gradients(findings.world_size),
        raw=cast("dict[str, object]", raw),
    )


def _record(draft: Draft, batch: BatchPolicy | None) -> dict[str, Provenance]:
    """Return provenance by path in schema order: all keys that were set, and the defaults of supported keys."""
    entries = {entry.path: entry for entry in _entries(draft, draft.config, "")}
    sizes = {} if batch is None else dict(zip((TRAIN, MICRO, STEPS), dataclasses.astuple(batch)))
    for path, size in sizes.items():
        if getattr(draft.config, path) is None:
            source = Source("derived", "train_batch_size = micro batch x accumulation steps x world size")
            entries[path] = Provenance(path=path, value=size, source=source)
    return entries


def _entries(draft: Draft, section: Section, prefix: str) -> Iterator[Provenance]:
    for name, field in type(section).model_fields.items():
        value, path = getattr(section, name), prefix + name
        if isinstance(value, Section):
            yield from _entries(draft, value, f"{path}.")
        elif name not in section.model_fields_set:
            if verdict_of(field).kind in ("supported", "check"):
                yield Provenance(path=path, value=value, source=DEFAULT)
        elif isinstance(value, dict) and value:
            for key, inner in value.items():
                shown = inner.given() if isinstance(inner, Section) else inner
                yield Provenance(path=f"{path}.{key}", value=shown, source=draft.source(f"{path}.{key}"))
        else:
            yield Provenance(path=path, value=value, source=draft.source(path))
