"""The batch triad as a table; "-" means that the key is absent or "auto"."""

from __future__ import annotations

import pytest

from hf_zero.config import BatchPolicy, ConfigError, resolve
from tests.config.building import error_of, problem_of

# train, micro, steps, world size -> train, micro, steps
TABLE = """
    8    2    2    2   ->   8    2    2
    8    2    -    2   ->   8    2    2
    8    -    2    2   ->   8    2    2
    -    2    2    2   ->   8    2    2
    8    -    -    2   ->   8    4    1
    -    4    -    2   ->   8    4    1
    1    1    1    1   ->   1    1    1
    24   -    3    4   ->   24   2    3
    24   4    -    3   ->   24   4    2
    -    8.0  "2"  1   ->   16   8    2
"""

# the same, but the equation does not hold
BROKEN = """
    8    3    -    1   ->   8 (train_batch_size) != 3 (train_micro_batch_size_per_gpu) x 2 (gradient_accumulation_steps, derived) x 1 (world size) = 6
    8    2    2    3   ->   8 (train_batch_size) != 2 (train_micro_batch_size_per_gpu) x 2 (gradient_accumulation_steps) x 3 (world size) = 12
    7    -    2    2   ->   7 (train_batch_size) != 1 (train_micro_batch_size_per_gpu, derived) x 2 (gradient_accumulation_steps) x 2 (world size) = 4
    2    -    -    4   ->   2 (train_batch_size) != 0 (train_micro_batch_size_per_gpu, derived) x 1 (gradient_accumulation_steps, derived) x 4 (world size) = 0
    8    16   -    1   ->   8 (train_batch_size) != 16 (train_micro_batch_size_per_gpu) x 0 (gradient_accumulation_steps, derived) x 1 (world size) = 0
"""  # noqa: E501

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def rows(table: str) -> list[tuple[dict[str, object], int, str]]:
    result = []
    for line in table.strip().splitlines():
        left, right = line.split("->")
        *values, world = left.split()
        given = {key: _value(text) for key, text in zip(KEYS, values) if text != "-"}
        for config in (given, {**dict.fromkeys(KEYS, "auto"), **given}) if "-" in values else (given,):
            result.append((config, int(world), right.strip()))
    return result


def _value(text: str) -> object:
    return text.strip('"') if '"' in text else float(text) if "." in text else int(text)


@pytest.mark.parametrize(("config", "world_size", "expected"), rows(TABLE))
def test_triad(config: dict[str, object], world_size: int, expected: str) -> None:
    train, micro, steps = map(int, expected.split())
    batch = resolve(config, world_size=world_size).batch
    assert batch == BatchPolicy(train_batch_size=train, micro_batch_size=micro, accumulation_steps=steps)


@pytest.mark.parametrize(("config", "world_size", "expected"), rows(BROKEN))
def test_broken_triad_prints_the_equation(config: dict[str, object], world_size: int, expected: str) -> None:
    assert expected in problem_of(config, world_size=world_size).rule


def test_advice_names_numbers_that_work() -> None:
    with pytest.raises(ConfigError, match=r"multiple of .*gpu 3 x world size 2 = 6, for example 6"):
        resolve({KEYS[0]: 8, KEYS[1]: 3}, world_size=2)
    with pytest.raises(ConfigError, match=r"remove train_batch_size \(it follows: 12\), or write 12"):
        resolve({KEYS[0]: 8, KEYS[1]: 2, KEYS[2]: 2}, world_size=3)


@pytest.mark.parametrize("config", [{}, {KEYS[2]: 4}, {KEYS[0]: None, KEYS[1]: None}])
def test_no_batch_size_at_all(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="at least one of the two batch sizes must be given"):
        resolve(config, world_size=1)


def test_batch_sizes_that_nobody_fills_say_what_to_give() -> None:
    error = error_of(dict.fromkeys(KEYS, "auto"))
    assert "per_device_train_batch_size" in str(error) and "dataloader" in str(error)
    assert len(error.problems) == 1


@pytest.mark.parametrize("value", [0, -1, 1.5, "eight", True, float("nan"), float("inf"), [8], {}, "", 10**30])
@pytest.mark.parametrize("key", KEYS)
def test_nonsense_is_one_problem_at_its_key(key: str, value: object) -> None:
    problem = problem_of({"train_batch_size": 8, key: value})
    assert problem.path == key and problem.rule.startswith("must be")


@pytest.mark.parametrize("world_size", [0, -1, 1.0, "2", None, True])
def test_world_size_is_checked(world_size: object) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        resolve({"train_batch_size": 8}, world_size=world_size)  # type: ignore[arg-type]
