"""How checkpoints are written and found, from the `checkpoint` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """What save and load do beyond their arguments."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = "Warn"  # when ranks name the tag differently
    load_universal: bool = False  # read what `latest_universal` names
    node_local: bool = False  # every node has a folder of its own
    in_background: bool = False  # training goes on while files are written
    round_robin: bool = False  # files of stages 1 and 2 in the order of round_robin_gradients


def checkpoint_policy(raw: Mapping[str, object]) -> CheckpointPolicy:
    """The policy of a config whose values have been checked."""
    section, zero = _section(raw, "checkpoint"), _section(raw, "zero_optimization")
    ours = _section(_section(raw, "hf_zero"), "checkpoint")
    rule = str(section.get("tag_validation", "Warn")).capitalize()
    return CheckpointPolicy(
        tag_validation=cast(Literal["Ignore", "Warn", "Fail"], rule),
        load_universal=section.get("load_universal") is True,
        node_local=section.get("use_node_local_storage") is True,
        round_robin=zero.get("round_robin_gradients") is True,
        in_background=ours.get("async") is True,
    )


def _section(raw: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}
