"""Training features: the callbacks that they get, and their states in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.features import Features, Progress, TrainingFeature
from tests.api.test_engine import new_engine, one_step


class Diary(TrainingFeature):
    """Records its callbacks."""

    def __init__(self, name: str = "diary") -> None:
        self.name = name
        self.told: list[Any] = []
        self.loaded: Mapping[str, Any] | None = {"untouched": True}

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        self.told.append(("forward", progress.step, progress.micro_step, progress.training))
        return keywords

    def before_step(self, progress: Progress) -> None:
        self.told.append(("before", progress.step))

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        self.told.append(("after", progress.step, applied))

    def state_dict(self) -> Mapping[str, Any]:
        return {"entries": len(self.told)}

    def load_state_dict(self, state: Mapping[str, Any] | None, progress: Progress) -> None:
        self.loaded = state
        self.told = [("loaded", progress.step)]

    def close(self) -> None:
        self.told.append("closed")


def test_features_are_told_of_every_forward_and_update() -> None:
    engine, diary = new_engine(gradient_accumulation_steps=2), Diary()
    engine.training_features.add(diary)
    for _ in range(3):
        one_step(engine)
    first = [("forward", 0, 0, True), ("forward", 0, 1, True), ("before", 0), ("after", 1, True)]
    assert diary.told == [*first, ("forward", 1, 0, True)]
    engine.destroy()
    assert diary.told[-1] == "closed"


@pytest.mark.parametrize("name", ["diary", ds.DATA_SAMPLER, ds.RANDOM_LTD])
def test_states_are_in_checkpoints_and_not_in_the_client_state(name: str, tmp_path: Path) -> None:
    engine = new_engine()
    engine.training_features.add(Diary(name))
    one_step(engine)
    engine.save_checkpoint(str(tmp_path), client_state={"mine": 1})
    again, diary, other = new_engine(), Diary(name), Diary("other")
    again.training_features.add(diary)
    again.training_features.add(other)
    _, client = again.load_checkpoint(str(tmp_path))
    assert client is not None and client["mine"] == 1 and not {name, ds.TRAINING_FEATURES} & client.keys()
    assert diary.loaded == {"entries": 3} and diary.told == [("loaded", 1)]
    assert other.loaded is None


def test_a_name_is_given_once() -> None:
    features = Features([Diary()])
    with pytest.raises(ValueError, match="already has a training feature named 'diary'"):
        features.add(Diary())
