"""Stage 5: the rules between keys, and a finding for every key that is set in vain or is not available.

A rule is an object beside the fields of its section (`Section.rules`). It names the keys that it reads, and is not
checked if one of them has no usable value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_zero.config.errors import FEATURES_PAGE, Edit, Finding, Problem, Remark
from hf_zero.config.schema.fields import ALL_STAGES, Section, Verdict, rules_of, verdict_of

if TYPE_CHECKING:
    from hf_zero.config.draft import Draft
    from hf_zero.config.features import BatchSizesOfExtra

RANKS = "(ranks)"  # among the keys of a rule: it also reads the `Ranks`
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What rules and policies may read besides the values of keys.

    Attributes:
        host_sizes: the number of ranks of every host; empty if it is not known yet.
        sequence_size: the number of ranks that share each sequence, which count as one data rank.
        tensor_size: of so many ranks, which stand side by side, one has the same parts of the weights as one of others:
            states are shared among these.
        autos: the keys that are still "auto".
        is_complete: whether all values are known.
        is_written: whether the author wrote the value at a path, as opposed to a filled "auto".
        sizes: the batch sizes, if a section decides them.
    """

    world_size: int
    host_sizes: tuple[int, ...] = ()
    sequence_size: int = 1
    tensor_size: int = 1
    autos: frozenset[str] = frozenset()
    is_complete: bool = True
    is_written: Callable[[str], bool] = lambda path: True
    sizes: BatchSizesOfExtra | None = None

    @property
    def data_ranks(self) -> int:
        """The number of ranks with different samples, each with the ranks that share its sequences and matrices."""
        return self.world_size // (self.sequence_size * self.tensor_size) or 1

    @property
    def divides(self) -> bool:
        """Whether groups of these sizes divide the ranks; a rule reports it if not."""
        return self.world_size % (self.sequence_size * self.tensor_size) == 0

    @property
    def with_same_weights(self) -> int:
        """The number of ranks that hold the same parts of matrices."""
        return self.world_size // self.tensor_size

    @property
    def hosts(self) -> tuple[int, ...]:
        """Of those, the number on each host."""
        whole = all(size % self.tensor_size == 0 for size in self.host_sizes)
        return tuple(size // self.tensor_size for size in self.host_sizes) if whole else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyRule:
    """What rules have in common.

    Attributes:
        keys: the paths of the keys that it reads; a section stands for all of its keys. The first is where it reports.
        needs_agreement: it is not checked either if a value contradicts one that is stated elsewhere.
    """

    keys: tuple[str, ...]
    needs_agreement: bool = False

    def find(self, config: Section, ranks: Ranks) -> Iterable[Finding]:
        raise NotImplementedError

    def values(self, config: Section, ranks: Ranks) -> list[Any]:
        return [ranks if key == RANKS else config.at(key.split(".")) for key in self.keys]

    def named(self, values: Iterable[object], facts: object) -> dict[str, object]:
        """Return what a text may name in braces: the values by the last part of their keys, and the facts."""
        named = {key.rpartition(".")[2]: value for key, value in zip(self.keys, values)}
        return named | (dict(facts) if isinstance(facts, Mapping) else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(AnyRule):
    """A rule, which gives a problem if it is broken.

    Attributes:
        broken: gets the values of the keys. Returns whether the rule is broken, or facts for the texts if it is; also
            the facts `value`, if it is not that of the first key, and `edit`.
        rule, fix: formats, of the values by the last part of their keys and of the facts.
        at, shows: the path and the value of the problem, if they are not those of the first key.
        unusable: the first key's value cannot be used then: other rules that read it are not checked.
        edit: the fix that `explain --fix` makes, if the text names a key and its value; the facts may have it, too.
        raises, words: type and words of DeepSpeed's error.
    """

    broken: Callable[..., object]
    rule: str
    fix: str
    at: str = ""
    shows: object = None
    unusable: bool = False
    edit: Edit | None = None
    raises: type[Exception] | None = None
    words: str = ""

    def find(self, config: Section, ranks: Ranks) -> Iterator[Problem]:
        values = self.values(config, ranks)
        facts = self.broken(*values)
        if facts:
            named = self.named(values, facts)
            rule, fix = self.rule.format_map(named), self.fix.format_map(named)
            value = named.get("value", values[0] if self.shows is None else self.shows)
            edit: Any = named.get("edit", self.edit)
            yield Problem(self.at or self.keys[0], value, rule, fix, edit=edit, raises=self.raises, words=self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(AnyRule):
    """A remark about a key that is given in vain (`ignored`), or that could have a better value.

    Attributes:
        applies: like `Rule.broken`.
        text: a format like `Rule.rule`.
    """

    applies: Callable[..., object]
    text: str
    ignored: bool = False

    def find(self, config: Section, ranks: Ranks) -> Iterator[Remark]:
        path = tuple(self.keys[0].split("."))
        if not config.has(path):
            return
        values = self.values(config, ranks)
        facts = self.applies(*values)
        if facts:
            text = self.text.format_map(self.named(values, facts))
            yield Remark(self.keys[0], text, plain(values[0]), self.ignored, Edit(path) if self.ignored else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Several(AnyRule):
    """Rules that share what they look at, or whose keys have names of the user's.

    Attributes:
        every: yields the findings for the config and the ranks.
    """

    keys: tuple[str, ...] = ()
    every: Callable[[Any, Ranks], Iterable[Finding]]

    def find(self, config: Section, ranks: Ranks) -> Iterable[Finding]:
        return self.every(config, ranks)


def needs(path: str, needed: str, **more: Any) -> Rule:
    """A rule that a switch needs another one."""
    fix = f"set {needed} to true, or remove {path}"
    more |= {"rule": f"needs {needed}", "fix": fix, "edit": Edit.at(needed, True)}
    return Rule(keys=(path, needed), broken=lambda on, there: on and not there, **more)


def ranks_of(draft: Draft, *, is_complete: bool) -> Ranks:
    """Return what rules and policies may read besides the keys of a typed draft."""
    config, views = draft.config, draft.views
    sequence_size = views.sequence_size or config.sequence_parallel_size
    tensor_size = views.tensor_size or max(1, config.at(("tensor_parallel", "autotp_size")))
    ranks = Ranks(
        world_size=views.world_size,
        host_sizes=views.host_sizes,
        sequence_size=sequence_size,
        tensor_size=tensor_size,
        autos=draft.autos,
        is_complete=is_complete,
        is_written=draft.is_written,
    )
    decided = (extra.sizes(config, ranks) for extra in config.features if extra.sizes is not None)
    return dataclasses.replace(ranks, sizes=next((sizes for sizes in decided if sizes is not None), None))


def plain(value: object) -> object:
    return value.given() if isinstance(value, Section) else value


def apply_rules(draft: Draft, ranks: Ranks) -> Draft:
    """Return the draft with the findings of all rules."""
    config = draft.config
    stage = config.at(("zero_optimization", "stage"))
    # An invalid stage is reported by its rule; the other keys must be checked in spite of it.
    findings = [*effects(config, stage if stage in ALL_STAGES else max(ALL_STAGES), ranks)]
    problems = [finding for finding in draft.findings if isinstance(finding, Problem)]
    unusable = {path for problem in problems if problem.other is None for path in problem.unusable}
    contradicted = {problem.path for problem in problems if problem.other is not None}
    for rule in rules_of(type(config)):
        places = unusable | contradicted if rule.needs_agreement else unusable
        if not any(key == path or key.startswith(f"{path}.") for key in rule.keys for path in places):
            broken = list(rule.find(config, ranks))
            findings += broken
            if broken and isinstance(rule, Rule) and rule.unusable:
                unusable.add(rule.keys[0])
    if config.at(("hf_zero", "strict")):
        fix = "remove it, or set hf_zero.strict to false to have it ignored with a warning"
        ignored = [one for one in (*draft.findings, *findings) if isinstance(one, Remark) and one.ignored]
        findings += [Problem(one.path, one.value, one.text, fix, edit=one.edit) for one in ignored]
    return draft.plus([*findings, *(ranks.sizes.problems if ranks.sizes is not None else ())])


def effects(section: Section, stage: int, ranks: Ranks, around: Path = ()) -> Iterator[Finding]:
    """Yield a finding for every key that the user set and that is ignored or refused."""
    for name, field in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        value, verdict, path = getattr(section, name), verdict_of(field), (*around, name)
        asks = not verdict.met and _asks(value, field.default) and ranks.is_written(".".join(path))
        key, wanted = verdict.beside or ("", ())
        beside = getattr(section, key) if key else None
        if stage not in verdict.stages:
            why = f"; {verdict.why}" if verdict.kind == "supported" and verdict.why else ""
            text = f"no effect at stage {stage} (used at {_stages(verdict)}){why}"
            # A stage in the key's name says where it is used, and a config for several stages is not a mistake.
            yield _without_effect(path, text, value, asks=asks and not name.startswith("stage3_"))
        elif verdict.kind == "ignored":
            yield _without_effect(path, f"no effect, {verdict.why}", value, asks=asks)
        elif verdict.kind == "unsupported":
            yield from _refusal(".".join(path), plain(value), field.default, verdict)
        elif key and beside not in wanted:
            if value not in (None, "none"):
                text = f"no effect with {key} {beside or 'none'} (used with {' or '.join(wanted)})"
                yield _without_effect(path, text, value, asks=asks and beside not in (None, "none"))
        elif isinstance(value, Section):
            yield from effects(value, stage, ranks, path)


def _without_effect(path: Path, text: str, value: object, *, asks: bool) -> Remark:
    return Remark(".".join(path), text, plain(value), asks, Edit(path), idle=not asks)


def _stages(verdict: Verdict) -> str:
    stages = [str(stage) for stage in verdict.stages]
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages)}"


def _asks(value: object, default: object) -> bool:
    """Whether a value requests something other than the default. A section that is switched off does not."""
    if not isinstance(value, Section):
        return value != default
    if getattr(value, "device", "") in (None, "none") or getattr(value, "enabled", None) is False:
        return False
    fields = type(value).model_fields
    return any(_asks(getattr(value, name), fields[name].default) for name in value.model_fields_set)


def _refusal(path: str, value: object, default: object, verdict: Verdict) -> Iterator[Problem]:
    rule = f"not available: {verdict.why}"
    if isinstance(value, dict):
        if verdict.switch is None:
            fix = f"remove the section, also if it is empty; see {FEATURES_PAGE}"
            yield Problem(path, value, rule, fix, edit=Edit.at(path))
        elif any(_switches(value, verdict.switch)) if verdict.switch else value:
            off = f'set "{verdict.switch}": false in it' if verdict.switch else "leave it empty"
            fix = f"remove the section or {off}; see {FEATURES_PAGE}"
            yield Problem(path, value, rule, fix, edit=Edit.at(path))
    elif value != default:
        off = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        yield Problem(path, value, rule, f"remove it or set {off}; see {FEATURES_PAGE}", edit=Edit.at(path))


def _switches(value: object, switch: str) -> Iterator[bool]:
    """Yield whether each switch in a section is on, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == switch:
                yield inner.lower() not in ("", "false") if isinstance(inner, str) else inner not in (None, False, 0)
            else:
                yield from _switches(inner, switch)
    elif isinstance(value, list):
        for inner in value:
            yield from _switches(inner, switch)
